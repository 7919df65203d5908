"""Attention backends by name: whether they agree with torch's on the CPU, and what a layer costs.

A shape that a backend does not support is reported as refused, not as wrong.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.parts import Absent, Options
from benchmarks.gpu.timing import seconds_of
from engine.errors import InvalidParameter, UnsupportedModel
from engine.execution.attention.interface import (
    AttentionBackend,
    Backend,
    DecodeRows,
    GraphableBackend,
    LayerCall,
    LayerSpec,
    PoolShape,
)
from engine.execution.graphs.cuda_capture import CudaCapture
from engine.execution.loading.attention_backends import TORCH, choose_backends
from engine.execution.machine.native_build import CannotBuild
from engine.execution.machine.native_library import NativeLibrary, find_library
from engine.execution.runner.inputs import InputBuilder, StepInputs
from engine.execution.runner.transfers import move_inputs
from engine.outputs import ScheduledSequence, SchedulerOutputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

NAMES = ("torch", "triton", "native")
BLOCK_SIZE = 16
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 3e-2}
"""Of outputs of about size one. In float32 a GPU may round factors to ten bits (TF32)."""
SPECS = {
    "grouped heads": LayerSpec(9, 3, 64, 64, 0.125),
    "no groups": LayerSpec(6, 6, 48, 48, 0.14),
    "heads of 96": LayerSpec(8, 8, 96, 96, 0.1),
    "heads of 128, groups of 7": LayerSpec(14, 2, 128, 128, 0.088),
    "heads of 256": LayerSpec(4, 1, 256, 256, 0.0625),
    "window": LayerSpec(8, 1, 64, 64, 0.125, sliding_window=33),
    "soft cap": LayerSpec(4, 2, 64, 64, 0.125, softcap=2.0),
    "sinks": LayerSpec(8, 2, 64, 64, 0.125, sliding_window=40, sinks=True),
}
STEPS = (
    ((0, 0, 70), (1, 0, 1), (2, 0, 16), (3, 0, 33)),
    ((1, 1, 2), (0, 70, 97), (2, 16, 17), (3, 33, 64)),
    ((0, 97, 98), (1, 2, 3), (2, 17, 18), (3, 64, 65)),
    ((0, 98, 99), (1, 3, 4), (3, 65, 66)),
)
"""(sequence, start, end) of each step: chunks and decode rows, and finally decode rows only."""
LONGEST = 112


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


class Case(NamedTuple):
    """(start, end) of each sequence in a timed step."""

    name: str
    parts: list[tuple[int, int]]


SHAPES = {"7M": Shape(6, 6, 48), "0.5B": Shape(14, 2, 64), "8B": Shape(32, 8, 128)}
CASES = (
    Case("64 decode rows after 1,023", [(1023, 1024)] * 64),
    Case("1 decode row after 8,191", [(8191, 8192)]),
    Case("a chunk of 512 after 512", [(512, 1024)]),
)
QUICK_CASES = (Case("4 decode rows after 63", [(63, 64)] * 4),)
LAYERS = 4
"""Each with its own pool, so that no keys are cached."""


def backend_named(name: str, options: Options) -> Backend:
    """Raises `Absent`."""
    device = torch.device(options.device)
    library: NativeLibrary | CannotBuild = CannotBuild("it is for a CPU")
    if device.type == "cpu":
        library = find_library(Path(options.cache), print)
    try:
        (found,) = choose_backends(
            name,
            deterministic=False,
            device=device,
            library=library,
        )
    except InvalidParameter as error:
        raise Absent(str(error)) from error
    return found


def check(options: Options, name: str) -> dict[str, Any]:
    """The largest difference by dtype and features; `wrong`: those beyond their tolerance."""
    backend = backend_named(name, options)
    differences: dict[str, float | str] = {}
    wrong = []
    for dtype, tolerance in TOLERANCE.items():
        for features, spec in SPECS.items():
            case = f"{str(dtype).removeprefix('torch.')}, {features}"
            try:
                found = _difference(backend, spec, dtype, options)
            except UnsupportedModel as reason:
                differences[case] = f"refused: {reason}"
                continue
            differences[case] = found
            if not found <= tolerance:
                wrong.append(case)
    return {"largest_differences": differences, "wrong": wrong}


def _difference(backend: Backend, spec: LayerSpec, dtype: torch.dtype, options: Options) -> float:
    device = torch.device(options.device)
    num_blocks = 1 + 4 * -(-LONGEST // BLOCK_SIZE)
    shape = PoolShape((spec,), num_blocks, BLOCK_SIZE, dtype, device)
    ours = backend.make(shape)
    right = TORCH.make(shape._replace(dtype=torch.float32, device=CPU))
    generator = torch.Generator().manual_seed(0)
    sinks = torch.randn(spec.num_heads, generator=generator) if spec.sinks else None
    sequences = _sequences(4, LONGEST)
    inputs = InputBuilder(4, LONGEST, BLOCK_SIZE)
    largest = 0.0
    with torch.inference_mode():
        for step in STEPS:
            rows = sum(end - start for _, start, end in step)
            drawn = [torch.randn(rows, *shape, generator=generator).to(dtype) for shape in _row_shapes(spec)]
            items = tuple(_part(sequences[who], start, end) for who, start, end in step)
            made = inputs.build(SchedulerOutputs(prefill=items))
            call = LayerCall(0, spec.scaling, spec.sliding_window, spec.softcap, sinks)
            expected = right.build_metadata(made.batch).forward(call, *(one.float() for one in drawn))
            there = call._replace(sinks=None if sinks is None else sinks.to(device))
            found = _attend(ours, made, there, [one.to(device) for one in drawn])
            largest = max(largest, *(float((one.cpu().float() - expected).abs().max()) for one in found))
    return largest


def _attend(
    backend: AttentionBackend, inputs: StepInputs, call: LayerCall, rows: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The backend's output, and that of its captured decode step if it supports graphs."""
    query, key, value = rows
    batch = move_inputs(inputs, query.device).batch
    found = [backend.build_metadata(batch).forward(call, query, key, value)]
    if isinstance(backend, GraphableBackend) and not batch.chunks:
        moved = batch.on(query.device)
        decode = DecodeRows(moved.slot_mapping, moved.decode_lengths, moved.decode_tables)
        found.append(backend.build_decode_metadata(decode).forward(call, query, key, value))
    return found


def times(options: Options, name: str) -> dict[str, Any]:
    """Microseconds of a layer in bfloat16; for decode rows also relative to the bandwidth of a copy."""
    backend = backend_named(name, options)
    found = {}
    for shape_name, shape in list(SHAPES.items())[: 1 if options.quick else None]:
        for case in QUICK_CASES if options.quick else CASES:
            seconds, read = _layer_seconds(backend, shape, case, options)
            figures = {"microseconds": round(seconds * 1e6, 2)}
            if options.copy_rate and all(end - start == 1 for start, end in case.parts):
                figures["bandwidth_share"] = round(read / seconds / options.copy_rate, 4)
            found[f"{shape_name}, {case.name}"] = figures
    return found


def _layer_seconds(backend: Backend, shape: Shape, case: Case, options: Options) -> tuple[float, int]:
    """Seconds of one layer, and the bytes of keys and values that it reads.

    Decode steps that can be captured are timed in a replay, without launch overhead.
    """
    device, dtype = torch.device(options.device), torch.bfloat16
    spec = LayerSpec(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim, shape.head_dim**-0.5)
    longest = max(end for _, end in case.parts)
    sequences = _sequences(len(case.parts), longest)
    num_blocks = 1 + len(sequences) * -(-longest // BLOCK_SIZE)
    made = backend.make(PoolShape((spec,) * LAYERS, num_blocks, BLOCK_SIZE, dtype, device))
    made.zero_blocks(tuple(range(num_blocks)))
    items = tuple(_part(one, *part) for one, part in zip(sequences, case.parts, strict=True))
    inputs = InputBuilder(len(sequences), longest, BLOCK_SIZE).build(SchedulerOutputs(prefill=items))
    batch = move_inputs(inputs, device).batch
    rows = len(inputs.token_ids)
    query, key, value = (torch.randn(rows, *size, dtype=dtype, device=device) for size in _row_shapes(spec))

    def run() -> None:
        step = decode.build_decode_metadata(rows_there) if decode else made.build_metadata(batch)
        for layer in range(LAYERS):
            step.forward(LayerCall(layer, spec.scaling, None, None, None), query, key, value)

    decode = (
        made if options.device == "cuda" and isinstance(made, GraphableBackend) and not batch.chunks else None
    )
    moved = batch.on(device)
    rows_there = DecodeRows(moved.slot_mapping, moved.decode_lengths, moved.decode_tables)
    with torch.inference_mode():
        way = CudaCapture(device)(run).replay if decode else run
        seconds = seconds_of(way, options.device, repeats=3 if options.quick else 9, inner=3)
    read = sum(end for _, end in case.parts) * spec.kv_size * dtype.itemsize
    return seconds / LAYERS, read


def _row_shapes(spec: LayerSpec) -> tuple[tuple[int, int], ...]:
    return (
        (spec.num_heads, spec.head_dim),
        (spec.num_kv_heads, spec.head_dim),
        (spec.num_kv_heads, spec.value_dim),
    )


def _sequences(count: int, longest: int) -> list[Sequence]:
    """Sequences with scattered blocks."""
    width = -(-longest // BLOCK_SIZE)
    generator = torch.Generator().manual_seed(1)
    blocks = (1 + torch.randperm(count * width, generator=generator)).view(count, width).tolist()
    made = []
    for slot, table in enumerate(blocks):
        sequence = Sequence(f"{slot}", [1] * longest, SamplingParams(), arrival_time=0.0)
        sequence.admit(slot)
        sequence.block_table = table
        made.append(sequence)
    return made


def _part(sequence: Sequence, start: int, end: int) -> ScheduledSequence:
    return ScheduledSequence(sequence, start, end - start, end - start - 1, True)
