"""The linears of SmolLM2-135M and of a 0.5B model in every kernel that there is: plain, oneDNN's order, our
own.

    python benchmarks/linears.py [--threads 1 2] [--shapes ...] [--rows ...] [--dtypes ...] [--out FILE.json]

All kernels take turns, call by call, so that a busy machine slows them alike; the least microseconds of a
call, and what that is in GFLOP/s and in GB/s of weights read. The caches are cold, as in a model: the calls
go over weights of more bytes than a cache holds.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

from engine.errors import UnsupportedModel
from engine.execution.layers.linear_kernels import LinearKernel, Product, linear_kernels
from engine.execution.machine.native_library import load_library

SHAPES = {
    "M qkv": (576, 960),
    "M out": (576, 576),
    "M gate, up": (576, 3072),
    "M down": (1536, 576),
    "M head": (576, 49152),
    "L qkv": (896, 1152),
    "L out": (896, 896),
    "L gate, up": (896, 9728),
    "L down": (4864, 896),
}
"""Inputs and outputs, those of one input fused: of SmolLM2-135M and of Qwen2.5-0.5B."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROWS = (1, 4, 16, 64, 256, 512)
COLD_BYTES = 1 << 26


def bound(kernels: tuple[LinearKernel, ...], linears: list[nn.Linear]) -> dict[str, list[Product]]:
    products = {}
    for kernel in kernels:
        try:
            products[kernel.name] = [kernel.bind(one) for one in linears]
        except UnsupportedModel as error:
            print(f"{kernel.name}: {error}")
    return products


def least_seconds(
    kernels: dict[str, list[Product]], hidden: torch.Tensor, least_rounds: int, budget: float
) -> dict[str, float]:
    """Of one call; the rounds go on until `budget` seconds are spent."""
    least = dict.fromkeys(kernels, float("inf"))
    begun, rounds = time.perf_counter(), 0
    while rounds < least_rounds or time.perf_counter() - begun < budget:
        for index in range(len(next(iter(kernels.values())))):
            for name, products in kernels.items():
                start = time.perf_counter()
                products[index](hidden)
                least[name] = min(least[name], time.perf_counter() - start)
        rounds += 1
    return least


def summary(
    about: dict[str, object], size: tuple[int, int], least: dict[str, float], itemsize: int, num_rows: int
) -> dict[str, object]:
    numbers = size[0] * size[1]
    kernels = {
        name: {
            "microseconds": round(seconds * 1e6, 1),
            "gflops": round(2 * numbers * num_rows / seconds / 1e9, 1),
            "weights_gb_per_s": round(numbers * itemsize / seconds / 1e9, 1),
        }
        for name, seconds in least.items()
    }
    told = (
        f"{name} {one['microseconds']} us, {one['gflops']} GFLOP/s, {one['weights_gb_per_s']} GB/s"
        for name, one in kernels.items()
    )
    print(*about.values(), *told, sep=" | ", flush=True)
    return {**about, "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each line, at the least")
    parser.add_argument("--cache", type=Path, default=Path(".tokenmill"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    kernels = linear_kernels(load_library(given.cache, print))
    results = []
    for threads in given.threads:
        torch.set_num_threads(threads)
        for name in given.dtypes:
            dtype = DTYPES[name]
            for shape in given.shapes:
                size = SHAPES[shape]
                num_weights = -(-COLD_BYTES // (size[0] * size[1] * dtype.itemsize))
                linears = [nn.Linear(*size, bias=False, dtype=dtype) for _ in range(num_weights)]
                products = bound(kernels, linears)
                for num_rows in given.rows:
                    hidden = torch.randn(num_rows, size[0]).to(dtype)
                    with torch.inference_mode():
                        least = least_seconds(products, hidden, given.rounds, given.seconds)
                    about = {"threads": threads, "dtype": name, "shape": shape, "rows": num_rows}
                    results.append(summary(about, size, least, dtype.itemsize, num_rows))
    if given.out is not None:
        given.out.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
