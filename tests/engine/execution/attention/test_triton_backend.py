"""The Triton kernels against torch's backend, run by Triton's interpreter: see `tests/conftest.py`."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.errors import UnsupportedModel
from engine.execution.attention import triton_backend as triton_attention
from engine.execution.attention import triton_launch
from engine.execution.attention.interface import (
    AttentionBatch,
    DecodeRows,
    GraphableBackend,
    LayerCall,
    LayerSpec,
    install,
)
from engine.execution.attention.triton_backend import TritonAttention
from engine.execution.loading.agreement import check_agreement
from engine.execution.runner.inputs import InputBuilder
from engine.execution.runner.synthetic_steps import null_inputs
from engine.outputs import SchedulerOutputs
from tests.engine.execution.attention.bench import TOLERANCE, Bench, Outputs
from tests.engine.execution.pools import cpu_shape
from tests.engine.execution.serving import part
from tests.tiny_models import make_config

CPU = torch.device("cpu")
TOLERANCES = {**TOLERANCE, torch.float16: 4e-3}
# First chunks, a chunk with context beside decode rows, decode rows alone; blocks of 32 are crossed.
STEPS = (
    ((0, 0, 21), (1, 0, 1), (2, 0, 6)),
    ((1, 1, 2), (0, 21, 40), (2, 6, 7)),
    ((0, 40, 41), (1, 2, 3), (2, 7, 8)),
)
LONGEST = 41
LONG = 700
"""More than two splits."""
READ = ((0, 0, LONG - 10), (1, 0, 100), (2, 0, 300))
"""What torch's backend computes before, in no time."""


def check(spec: LayerSpec, block_size: int, dtype: torch.dtype) -> None:
    bench = Bench(spec, block_size, dtype, LONGEST)
    agree(bench.run(bench.backend("triton"), STEPS), bench.run(bench.backend("torch"), STEPS), dtype)


def agree(ours: Outputs, theirs: Outputs, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(stacked(ours), stacked(theirs), rtol=tolerance, atol=tolerance)


def have_read(bench: Bench) -> tuple[Any, Any]:
    """Backends of Triton and of torch over one pool, in which `READ` is written."""
    ours: Any = bench.backend("triton")
    theirs: Any = bench.backend("torch")
    theirs.pool = ours.pool
    bench.run(theirs, (READ,))
    return ours, theirs


def stacked(outputs: Outputs) -> torch.Tensor:
    return torch.stack(list(outputs.values()))


def covering_cases() -> list[tuple[Any, ...]]:
    """16 of the 512 combinations, in which any two values of two parameters meet."""
    cases = []
    for a, b, c, d in itertools.product((0, 1), repeat=4):
        size, group = (64, 96, 128, 256)[2 * a + b], (1, 3, 7, 8)[2 * c + d]
        block_size, dtype = (16, 32)[a ^ c], (torch.float32, torch.bfloat16)[b ^ c ^ d]
        window, softcap, sinks = (None, 18)[b ^ d], (None, 1.5)[a ^ d], bool(a ^ b ^ c)
        cases.append((size, group, block_size, dtype, window, softcap, sinks))
    return cases


def test_the_cases_cover_every_pair_of_values() -> None:
    for one, other in itertools.combinations(zip(*covering_cases(), strict=True), 2):
        assert set(zip(one, other, strict=True)) == set(itertools.product(set(one), set(other)))


@pytest.mark.parametrize(
    ("size", "group", "block_size", "dtype", "window", "softcap", "sinks"), covering_cases()
)
def test_sizes_groups_and_features(
    size: int,
    group: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    sinks: bool,
) -> None:
    check(LayerSpec(2 * group, 2, size, size, size**-0.5, window, softcap, sinks), block_size, dtype)


@pytest.mark.parametrize("window", [1, 40])
@pytest.mark.parametrize(("head_dim", "value_dim", "block_size"), [(24, 7, 4), (7, 40, 1), (16, 16, 24)])
def test_odd_sizes(head_dim: int, value_dim: int, block_size: int, window: int) -> None:
    check(LayerSpec(6, 2, head_dim, value_dim, 0.4, window), block_size, torch.float16)


@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "dtype"),
    [(None, None, False, torch.bfloat16), (300, 1.5, True, torch.float32)],
)
def test_long_contexts(window: int | None, softcap: float | None, sinks: bool, dtype: torch.dtype) -> None:
    bench = Bench(LayerSpec(4, 2, 64, 64, 0.125, window, softcap, sinks), 32, dtype, LONG)
    steps = (((0, LONG - 10, LONG - 1), (1, 100, 101)), ((0, LONG - 1, LONG), (2, 300, 301)))
    ours, theirs = (bench.run(one, steps) for one in have_read(bench))
    agree(ours, theirs, dtype)


@pytest.mark.parametrize("window", [None, 300])
def test_the_bits_of_a_decode_row_do_not_depend_on_the_batch(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone or beside a longer one, whose splits other numbers of programs share."""
    bench = Bench(LayerSpec(2, 1, 32, 48, 0.2, window, sinks=True), 16, torch.float32, LONG)
    backend, _ = have_read(bench)
    alone: Outputs = {}
    for who, end in ((0, LONG - 9), (1, 101), (2, 301)):
        alone |= bench.run(backend, (((who, end - 1, end),),))
    for programs in (1, 2, triton_launch.PROGRAMS):
        monkeypatch.setattr(triton_launch, "PROGRAMS", programs)
        together = bench.run(backend, (((1, 100, 101), (0, LONG - 10, LONG - 9), (2, 300, 301)),))
        assert all(torch.equal(row, alone[at]) for at, row in together.items())


def test_nan_affects_its_own_sequence_only() -> None:
    bench = Bench(LayerSpec(6, 2, 32, 48, 0.2, sinks=True), 16, torch.float32, LONGEST)
    clean = bench.run(bench.backend("triton"), STEPS)
    bench.tokens[0][1][30] = torch.nan
    bench.tokens[2][2][3] = torch.nan
    found = bench.run(bench.backend("triton"), STEPS)
    for (who, at), row in found.items():
        if (who == 0 and at >= 30) or (who == 2 and at >= 3):
            assert row.isnan().any()
        elif who == 1:
            assert torch.equal(row, clean[who, at])


def test_a_batch_may_be_run_again() -> None:
    bench = Bench(LayerSpec(6, 2, 32, 32, 0.2), 16, torch.float32, LONGEST)
    once = bench.run(bench.backend("triton"), STEPS)
    again = bench.run(bench.backend("triton"), tuple(step for step in STEPS for _ in range(2)))
    assert torch.equal(stacked(once), stacked(again))


def test_strided_rows() -> None:
    """As a model hands them on: heads first, and queries, keys and values side by side in one tensor."""
    bench = Bench(LayerSpec(6, 2, 32, 32, 0.2), 16, torch.float32, LONGEST)
    right = bench.run(bench.backend("triton"), STEPS)

    def fused(rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        sizes = [row.shape[1] for row in rows]
        whole = torch.cat(rows, dim=1).transpose(0, 1).contiguous().transpose(0, 1)
        return torch.split_with_sizes(whole, sizes, dim=1)

    def transposed(rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(row.transpose(1, 2).contiguous().transpose(1, 2) for row in rows)

    lay_outs: tuple[Callable[..., Any], ...] = (fused, transposed)
    for lay_out in lay_outs:
        bench.lay_out = lay_out
        assert torch.equal(stacked(bench.run(bench.backend("triton"), STEPS)), stacked(right))


def decode_batch(bench: Bench, ends: tuple[int, ...]) -> AttentionBatch:
    """One token of each sequence."""
    sequences = bench.sequences()
    items = tuple(part(sequences[who], end - 1, end) for who, end in enumerate(ends))
    builder = InputBuilder(len(ends), bench.longest, bench.block_size)
    return builder.build(SchedulerOutputs(prefill=items)).batch


def with_nobody(bench: Bench, ends: tuple[int, ...], num_rows: int) -> DecodeRows:
    """The same with tables of full width, and padding rows up to `num_rows`."""
    batch = decode_batch(bench, ends)
    width = -(-bench.longest // bench.block_size) - batch.decode_tables.shape[1]
    num_padding = num_rows - len(ends)
    pad = torch.nn.functional.pad
    return DecodeRows(
        slot_mapping=pad(batch.slot_mapping, (0, num_padding)),
        lengths=pad(batch.decode_lengths, (0, num_padding), value=1),
        tables=pad(batch.decode_tables, (0, width, 0, num_padding)),
    )


def decode_rows(bench: Bench, ends: tuple[int, ...], num_rows: int) -> tuple[torch.Tensor, ...]:
    """Their queries, keys and values; those of padding rows are NaN."""
    rows = []
    for kind in range(3):
        real = torch.stack([bench.tokens[who][kind][end - 1] for who, end in enumerate(ends)])
        rows.append(
            torch.cat([real, torch.full_like(real[:1], torch.nan).repeat(num_rows - len(ends), 1, 1)])
        )
    return tuple(rows)


def test_padding_rows_change_nothing() -> None:
    bench = Bench(LayerSpec(2, 1, 16, 16, 0.2), 16, torch.float32, LONG)
    backend, _ = have_read(bench)
    ends = (301, 101)
    metadata = backend.build_metadata(decode_batch(bench, ends))
    right = metadata.forward(bench.call, *decode_rows(bench, ends, 2))
    assert not right.isnan().any()
    assert isinstance(backend, GraphableBackend)
    for num_rows in (2, 4):
        step = backend.build_decode_metadata(with_nobody(bench, ends, num_rows))
        assert torch.equal(step.forward(bench.call, *decode_rows(bench, ends, num_rows))[:2], right)


class Spy:
    """A kernel that tells how it is launched: grid, shapes of tensors, all other arguments."""

    def __init__(self, kernel: Any, launches_seen: list[Any]) -> None:
        self.kernel, self.launches_seen = kernel, launches_seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            given = [*args, *(named[name] for name in sorted(named))]
            self.launches_seen.append((grid, [one.shape if torch.is_tensor(one) else one for one in given]))
            self.kernel[grid](*args, **named)

        return launch


def test_launches_depend_on_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph plays the launches of one step again over what other steps put into its tensors."""
    bench = Bench(LayerSpec(2, 1, 16, 16, 0.2, 200), 16, torch.float32, LONG)
    backend, _ = have_read(bench)
    launches_seen: list[Any] = []
    for name in ("store_kernel", "attend_kernel", "split_kernel", "combine_kernel"):
        monkeypatch.setattr(triton_launch, name, Spy(getattr(triton_launch, name), launches_seen))
    launches = []
    for ends in ((LONG - 9, 21), (2, 1), (300,)):
        launches_seen.clear()
        step = backend.build_decode_metadata(with_nobody(bench, ends, 3))
        step.forward(bench.call, *decode_rows(bench, ends, 3))
        launches.append(list(launches_seen))
    assert len(launches[0]) == 3
    assert launches[0] == launches[1] == launches[2]


def test_zero_blocks_zeroes_them() -> None:
    backend = TritonAttention(cpu_shape((LayerSpec(2, 2, 4, 4, 1.0),), 4, 2))
    for pool in (*backend.pool.keys, *backend.pool.values):
        pool[:] = 7.0
    backend.zero_blocks((1, 3))
    for pool in (*backend.pool.keys, *backend.pool.values):
        assert not pool[[1, 3]].any()
        assert bool((pool[[0, 2]] == 7.0).all())


def test_the_null_step_runs() -> None:
    backend = TritonAttention(cpu_shape((LayerSpec(2, 2, 4, 4, 1.0),), 2, 2))
    rows = torch.ones(1, 2, 4)
    metadata = backend.build_metadata(null_inputs().batch)
    assert torch.equal(metadata.forward(LayerCall(0, 1.0, None, None, None), *[rows] * 3), rows)


@pytest.mark.parametrize("arch", ["gemma2", "gpt_oss"])
def test_a_model_passes_the_agreement_check(arch: str) -> None:
    """Between them windows, soft caps and sinks, as transformers hands them on."""
    install()
    check_agreement(make_config(arch), TritonAttention, CPU)


@pytest.mark.parametrize(
    ("spec", "dtype", "reason"),
    [
        (LayerSpec(2, 2, 64, 64, 1.0), torch.float64, "the dtype torch.float64"),
        (LayerSpec(2, 2, 257, 64, 1.0), torch.float32, "more than 256"),
        (LayerSpec(2, 2, 64, 257, 1.0), torch.float32, "more than 256"),
        (LayerSpec(3, 2, 64, 64, 1.0), torch.float32, "3 heads that share 2"),
        (LayerSpec(129, 1, 64, 64, 1.0), torch.float32, "more than 128 heads"),
    ],
)
def test_unsupported_shapes_are_refused(spec: LayerSpec, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        TritonAttention(cpu_shape((spec,), 4, 16, dtype))


def test_compiled_kernels_require_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "IS_COMPILED", True)
    with pytest.raises(UnsupportedModel, match="the device cpu"):
        TritonAttention(cpu_shape((LayerSpec(2, 2, 64, 64, 1.0),), 4, 16))
