"""Measures the machine's limits: memory bandwidth and matrix products. Prints one line of JSON.

The best of several attempts counts. Products are measured in the dtype and in float32, as values of any dtype
can be converted first. Uses torch, whose kernels are close to those of all engines here.

    OMP_NUM_THREADS=2 python -m benchmarks.serving.measure_machine THREADS DTYPE WEIGHTS_BYTES
"""

import json
import sys
import time
from collections.abc import Callable

import torch

TRIES = 7
MEMORY_BYTES = 2**30
PRODUCTS = ((512, 512, 2048), (512, 576, 3072), (1024, 1024, 1024), (2048, 2048, 2048), (512, 4096, 4096))
"""Rows, inner and outer sizes: those of layers at a full step, and square ones."""


def best_seconds(work: Callable[[], object]) -> float:
    """Of one call, the first not counted."""
    work()
    seconds = []
    for _ in range(TRIES):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def read_rate(num_bytes: int) -> float:
    """Bytes per second, the better of a sum and a product with a vector."""
    rows = max(1, num_bytes // 4 // 1024)
    values = torch.ones(rows, 1024)
    vector = torch.ones(1024)
    seconds = min(best_seconds(values.sum), best_seconds(lambda: torch.mv(values, vector)))
    return values.numel() * 4 / seconds


def product_rate(dtype: torch.dtype) -> float:
    """Operations per second of the best of `PRODUCTS`."""
    rates = []
    for rows, inner, outer in PRODUCTS:
        left, right = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
        seconds = best_seconds(lambda a=left, b=right: torch.nn.functional.linear(a, b))  # type: ignore[misc]
        rates.append(2 * rows * inner * outer / seconds)
    return max(rates)


def main() -> None:
    threads, dtype, weights_bytes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(threads)
    rates = {
        "weights_bytes_per_second": read_rate(weights_bytes),
        "memory_bytes_per_second": read_rate(MEMORY_BYTES),
        "flops_per_second": max(product_rate(each) for each in {getattr(torch, dtype), torch.float32}),
    }
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
