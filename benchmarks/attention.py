"""The native attention against torch's backend, which gathers and calls SDPA: decode rows and chunks.

    python benchmarks/attention.py [--threads 1 2] [--shapes S M L] [--repeats 9] [--steps] [--out FILE.json]

Both take turns in every repeat, so that a busy machine slows them alike. Prints medians and quartiles of the
microseconds of a layer; with `--steps` also of the forward pass of a random model of SmolLM2-135M's shape
that decodes 64 sequences. The caches are cold, as in a model: every layer has its own pool.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.execution.attention.interface import (
    ATTENTION_NAME,
    AttentionBackend,
    AttentionBatch,
    Backend,
    LayerCall,
    LayerSpec,
    PoolShape,
    install,
)
from engine.execution.attention.probe import record_layers
from engine.execution.loading.attention_backends import TORCH, native_backend
from engine.execution.machine.native_library import load_library
from engine.execution.runner.inputs import InputBuilder, StepInputs
from engine.execution.runner.model_runner import ModelRunner
from engine.outputs import ScheduledSequence, SchedulerOutputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

SHAPES = {"S": (6, 6, 48), "M": (9, 3, 64), "L": (14, 2, 64)}
"""Heads, KV heads and head size of a 7M model, of SmolLM2-135M and of Qwen2.5-0.5B."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYERS = 8
BLOCK_SIZE = 16
CPU = torch.device("cpu")


def lengths(num: int, minimum: int, maximum: int) -> list[tuple[int, int]]:
    drawn = torch.randint(minimum, maximum, (num,), generator=torch.Generator().manual_seed(0)).tolist()
    return [(length - 1, length) for length in drawn]


CASES = {
    "64 decode rows of 32-384": lengths(64, 32, 384),
    "8 decode rows of 32-384": lengths(8, 32, 384),
    "1 decode row of 2048": [(2047, 2048)],
    "a chunk of 512": [(0, 512)],
    "a chunk of 512 after 1024": [(1024, 1536)],
    "a chunk of 64 after 512": [(512, 576)],
}
"""First and last token (exclusive) of each sequence in a step."""


def step_inputs(parts: list[tuple[int, int]]) -> tuple[StepInputs, int]:
    """A step's inputs and the number of its blocks, which are scattered."""
    counts = [-(-end // BLOCK_SIZE) for _, end in parts]
    blocks = (1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1))).tolist()
    items = []
    for slot, (start, end) in enumerate(parts):
        sequence = Sequence(f"{slot}", [1] * end, SamplingParams(), arrival_time=0.0)
        sequence.admit(slot)
        sequence.block_table = [blocks.pop() for _ in range(counts[slot])]
        items.append(ScheduledSequence(sequence, start, end - start, end - start - 1, True))
    builder = InputBuilder(len(parts), max(end for _, end in parts), BLOCK_SIZE)
    return builder.build(SchedulerOutputs(prefill=tuple(items))), sum(counts)


def layer_times(
    spec: LayerSpec, dtype: torch.dtype, parts: list[tuple[int, int]], backends: list[Backend], repeats: int
) -> dict[str, list[float]]:
    inputs, num_blocks = step_inputs(parts)
    rows = len(inputs.token_ids)
    heads = (
        (spec.num_heads, spec.head_dim),
        (spec.num_kv_heads, spec.head_dim),
        (spec.num_kv_heads, spec.value_dim),
    )
    query, key, value = (torch.randn(rows, *shape).to(dtype) for shape in heads)

    def run(backend: AttentionBackend, batch: AttentionBatch) -> None:
        step = backend.build_metadata(batch)
        for layer in range(LAYERS):
            step.forward(LayerCall(layer, spec.scaling, None, None, None), query, key, value)

    shape = PoolShape((spec,) * LAYERS, num_blocks + 1, BLOCK_SIZE, dtype, CPU)
    made = {one.name: one.make(shape) for one in backends}
    for backend in made.values():
        backend.zero_blocks(tuple(range(num_blocks + 1)))
    functions = {name: lambda backend=backend: run(backend, inputs.batch) for name, backend in made.items()}
    return {name: [t / LAYERS for t in times] for name, times in take_turns(functions, repeats).items()}


def forward_times(dtype: torch.dtype, backends: list[Backend], repeats: int) -> dict[str, list[float]]:
    install()
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype).eval()
    specs = record_layers(model)
    inputs, num_blocks = step_inputs(CASES["64 decode rows of 32-384"])
    functions = {}
    for one in backends:
        backend = one.make(PoolShape(specs, num_blocks + 1, BLOCK_SIZE, dtype, CPU))
        backend.zero_blocks(tuple(range(num_blocks + 1)))
        runner = ModelRunner(model, backend, InputBuilder(64, 384, BLOCK_SIZE))
        functions[one.name] = lambda runner=runner: runner.forward(inputs)
    return take_turns(functions, repeats)


def take_turns(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Microseconds of each function, in turns; the first repeat is not counted."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                if repeat:
                    times[name].append((time.perf_counter() - start) * 1e6)
    return times


def summary(case: dict[str, object], times: dict[str, list[float]]) -> dict[str, object]:
    quartiles = {name: [round(q, 1) for q in statistics.quantiles(one, n=4)] for name, one in times.items()}
    ratios = [theirs / ours for ours, theirs in zip(times["native"], times["torch"], strict=True)]
    ratio = round(statistics.median(ratios), 2)
    print(
        *case.values(),
        f"native {quartiles['native'][1]} torch {quartiles['torch'][1]} us: {ratio}",
        sep=" | ",
    )
    return {**case, "microseconds_quartiles": quartiles, "median_ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--cache", type=Path, default=Path(".tokenmill"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    backends = [native_backend(load_library(given.cache, print)), TORCH]
    results = []
    for threads in given.threads:
        torch.set_num_threads(threads)
        for name, dtype in DTYPES.items():
            for shape in given.shapes:
                heads, kv_heads, size = SHAPES[shape]
                spec = LayerSpec(heads, kv_heads, size, size, size**-0.5)
                for case, parts in CASES.items():
                    about = {"threads": threads, "dtype": name, "shape": shape, "case": case}
                    results.append(summary(about, layer_times(spec, dtype, parts, backends, given.repeats)))
            if given.steps:
                about = {"threads": threads, "dtype": name, "shape": "M", "case": "forward of 64 decode rows"}
                results.append(summary(about, forward_times(dtype, backends, given.repeats)))
    if given.out is not None:
        given.out.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
