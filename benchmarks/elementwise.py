"""The native norm and gate against the same in torch, which is what the modules of transformers run.

    python -m benchmarks.elementwise [--threads 1 2] [--rows 1 8 64 256] [--repeats 200] [--cache .tokenmill]

Both take turns in every repeat, so that a busy machine slows them alike; the least microseconds of a call,
with SmolLM2-135M's sizes: rows of 576 for norms, and of 1536 within a fused product of 3072 for gates.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from engine.execution.layers.elementwise_operator import Activation, ElementwiseOperator, NormFormula
from engine.execution.machine.native_library import DTYPES, load_library

HIDDEN, INNER = 576, 1536
Way = Callable[[], object]


def ways(operator: ElementwiseOperator, num_rows: int, dtype: torch.dtype) -> Iterator[tuple[str, Way, Way]]:
    """What is computed, natively and by torch."""
    hidden, weight = torch.randn(1, num_rows, HIDDEN).to(dtype), torch.randn(HIDDEN).to(dtype)
    formula = NormFormula(1e-5, 0.0, rounds_first=True)
    norm = operator.norm(formula, weight)
    yield "norm", lambda: norm(hidden), lambda: formula.of(hidden, weight)
    gate, up = torch.randn(1, num_rows, 2 * INNER).to(dtype).chunk(2, dim=-1)
    for activation in Activation:
        native = operator.gate(activation)
        yield (
            activation.name.lower(),
            lambda native=native: native(gate, up),
            lambda activation=activation: activation.of(gate) * up,
        )


def least_microseconds(one: Way, other: Way, repeats: int) -> tuple[float, float]:
    least = [float("inf")] * 2
    for _ in range(repeats):
        for index, way in enumerate((one, other)):
            begun = time.perf_counter()
            way()
            least[index] = min(least[index], (time.perf_counter() - begun) * 1e6)
    return least[0], least[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--cache", type=Path, default=Path(".tokenmill"))
    given = parser.parse_args()
    operator = ElementwiseOperator(load_library(given.cache, print))
    with torch.inference_mode():
        for threads in given.threads:
            torch.set_num_threads(threads)
            for dtype, word in DTYPES.items():
                for num_rows in given.rows:
                    for name, native, plain in ways(operator, num_rows, dtype):
                        ours, theirs = least_microseconds(native, plain, given.repeats)
                        about = f"{threads} threads | {word} | {num_rows} rows | {name}"
                        print(f"{about} | native {ours:.1f} torch {theirs:.1f} us: {theirs / ours:.2f}")


if __name__ == "__main__":
    main()
