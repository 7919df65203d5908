"""Whole steps of a model on a CPU, with decode graphs, as served and with parts of the plan exchanged.

    python -m benchmarks.steps [--model DIR] [--dtype bfloat16] [--variants served torch-elements ...]
                               [--rows 1 8 64] [--chunk 512] [--context 256] [--seconds 10] [--out FILE.json]

`served`: the execution plan's own choice. `torch-elements`: norms, gates and rotary embeddings by torch.
`plain`, `packed`: no linear, or every linear at any number of rows, is multiplied by the native operator. The
variants take turns, step by step, so that a busy machine slows them alike. Prints medians, minima, and the
median of the ratios to the first variant in a turn. With OMP_NUM_THREADS=1 the clock is the process's CPU
time, else wall time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.execution.attention.interface import PoolShape
from engine.execution.attention.native_backend import AttentionOperator, NativeAttention
from engine.execution.graphs.cpu_capture import CpuCapture
from engine.execution.graphs.decode_graphs import make_decode_graphs
from engine.execution.layers.elementwise_operator import ElementwiseOperator
from engine.execution.layers.fused_linears import fuse_linears
from engine.execution.layers.linear_operator import LinearOperator
from engine.execution.layers.module_slots import linear_slots
from engine.execution.layers.native_elements import use_native_elements
from engine.execution.layers.packed_linears import PackedLinear, pack_linears
from engine.execution.loading.attention_backends import native_backend
from engine.execution.loading.default_model import DEFAULT_MODEL, default_model
from engine.execution.loading.loader import load_model
from engine.execution.machine.native_library import NativeLibrary, load_library
from engine.execution.runner.inputs import InputBuilder
from engine.execution.runner.model_runner import ModelRunner
from engine.execution.runner.synthetic_steps import SyntheticSequences
from engine.outputs import SchedulerOutputs

BLOCK_SIZE = 16
VARIANTS = ("served", "torch-elements", "plain", "packed")
Prepare = Callable[[PreTrainedModel], None]


def preparation(variant: str, library: NativeLibrary) -> Prepare:
    elementwise, linears = ElementwiseOperator(library), LinearOperator(library)

    def prepare(model: PreTrainedModel) -> None:
        if variant != "torch-elements":
            use_native_elements(model, elementwise)
        fuse_linears(model)
        if variant == "packed":
            for slot in list(linear_slots(model)):
                slot.replace(PackedLinear(slot.module, linears, maximum_rows=None))
        elif variant != "plain":
            pack_linears(model, linears, max_bytes=1 << 40)

    return prepare


def make_runner(
    source: str, dtype: str, prepare: Prepare, library: NativeLibrary, config: EngineConfig
) -> ModelRunner:
    loaded = load_model(
        source,
        backends=(native_backend(library),),
        prepare=prepare,
        dtype=dtype,
        device="cpu",
        progress=lambda _: None,
    )
    shape = PoolShape(loaded.layers, config.num_kv_blocks + 1, BLOCK_SIZE, loaded.dtype, loaded.device)
    backend = NativeAttention(AttentionOperator(library), shape)
    graphs = make_decode_graphs(loaded.model, backend, config, CpuCapture(library), lambda _: None)
    assert graphs is not None
    for layer in backend.pool.layers:
        layer.normal_()
    inputs = InputBuilder(config.max_num_seqs, config.max_model_len, BLOCK_SIZE)
    return ModelRunner(loaded.model, backend, inputs, graphs)


def step_of(num_rows: int, context: int) -> SchedulerOutputs:
    """A decode step of `num_rows` sequences of `context` tokens."""
    sequences = SyntheticSequences([context] * num_rows, BLOCK_SIZE, vocab_size=1000)
    return sequences.step((row, context - 1, context) for row in range(num_rows))


def chunk_of(num_tokens: int) -> SchedulerOutputs:
    """A prompt of `num_tokens`, without logits."""
    return SyntheticSequences([num_tokens], BLOCK_SIZE, vocab_size=1000).step(
        [(0, 0, num_tokens)], logits=False
    )


def measure(runners: dict[str, ModelRunner], step: SchedulerOutputs, budget: float) -> dict[str, list[float]]:
    """Milliseconds of a step, of each runner in turn, until `budget` seconds are spent."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in runners}
    for runner in runners.values():
        runner.execute(step)
    end = time.perf_counter() + budget
    while time.perf_counter() < end:
        for name, runner in runners.items():
            start = clock()
            runner.execute(step)
            found[name].append((clock() - start) * 1e3)
    return found


def report(case: str, found: dict[str, list[float]]) -> dict[str, object]:
    first = next(iter(found.values()))
    figures = {
        name: {
            "median_ms": round(statistics.median(times), 3),
            "minimum_ms": round(min(times), 3),
            "ratio": round(statistics.median(a / b for a, b in zip(times, first, strict=True)), 3),
        }
        for name, times in found.items()
    }
    print(
        case,
        f"({len(first)} turns)",
        *(f"{name} {one}" for name, one in figures.items()),
        sep="\n  ",
        flush=True,
    )
    return {"case": case, "turns": len(first), **figures}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--cache", type=Path, default=Path(".tokenmill"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    source = str(default_model(options.cache, print)) if options.model == DEFAULT_MODEL else options.model
    library = load_library(options.cache, print)
    max_rows = max(options.rows)
    config = EngineConfig(
        max_model_len=max(options.context, options.chunk) + BLOCK_SIZE,
        num_kv_blocks=max_rows * (options.context // BLOCK_SIZE + 2) + options.chunk // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max(max_rows, options.chunk),
        max_num_seqs=max_rows,
    )
    runners = {
        name: make_runner(source, options.dtype, preparation(name, library), library, config)
        for name in options.variants
    }
    steps = {f"{rows} decode rows": step_of(rows, options.context) for rows in options.rows}
    steps[f"a chunk of {options.chunk}"] = chunk_of(options.chunk)
    results = [report(case, measure(runners, step, options.seconds)) for case, step in steps.items()]
    if options.out is not None:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "dtype": options.dtype}
        options.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
