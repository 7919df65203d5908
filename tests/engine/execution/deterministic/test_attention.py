"""The attention of a row depends only on its position and equals eager attention."""

import pytest
import torch

from engine.execution.attention.interface import AttentionBatch, LayerCall, LayerSpec, install
from engine.execution.deterministic import attention as deterministic_attention
from engine.execution.deterministic.attention import DeterministicAttention, query_tiles
from engine.execution.deterministic.experts import use_whole_rows
from engine.execution.loading.agreement import check_agreement
from engine.execution.runner.inputs import InputBuilder
from engine.outputs import SchedulerOutputs
from tests.engine.execution.pools import cpu_shape
from tests.engine.execution.serving import in_slot, part
from tests.tiny_models import ARCHITECTURES, make_config


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_agrees_with_eager_attention(arch: str) -> None:
    install()
    check_agreement(make_config(arch), DeterministicAttention, torch.device("cpu"), use_whole_rows)


def batch_of(*parts: tuple[int, int, int]) -> AttentionBatch:
    """Parts (slot, start, end) of sequences of 200 tokens."""
    inputs = InputBuilder(8, 200, 16)
    sequences = [in_slot(slot, [5] * 200, list(range(1 + 13 * slot, 14 + 13 * slot))) for slot in range(8)]
    items = tuple(part(sequences[slot], start, end) for slot, start, end in parts)
    return inputs.build(SchedulerOutputs(prefill=items)).batch


def test_a_query_has_the_same_tile_in_every_batch() -> None:
    def tile_positions(batch: AttentionBatch) -> set[tuple[int, int]]:
        """(position of the tile, offset in it) of each computed row."""
        tiles = query_tiles(batch)
        return {
            (first, offset)
            for first, rows in zip(tiles.first.tolist(), tiles.rows.tolist(), strict=True)
            for offset, row in enumerate(rows)
            if row >= 0
        }

    single = {position: tile_positions(batch_of((0, position, position + 1))) for position in range(60, 70)}
    assert [single[position] for position in (60, 63, 65)] == [{(60, 0)}, {(60, 3)}, {(64, 1)}]
    assert tile_positions(batch_of((0, 60, 70))) == set().union(*single.values())
    assert tile_positions(batch_of((0, 61, 66), (1, 69, 70), (2, 66, 68))) == set().union(
        *(single[position] for position in (61, 62, 63, 64, 65, 66, 67, 69))
    )


@pytest.mark.parametrize("window", [None, 40])
def test_the_matrices_of_a_row_have_one_size_in_every_batch(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wider matrices may give the same bits here and other bits on another machine."""
    spec = LayerSpec(4, 2, 8, 8, 0.3, sliding_window=window)
    multiply = deterministic_attention._multiply
    sizes: set[tuple[int, ...]] = set()

    def recording(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        sizes.add((*left.shape[1:], *right.shape[1:]))
        return multiply(left, right)

    monkeypatch.setattr(deterministic_attention, "_multiply", recording)
    backend = DeterministicAttention(cpu_shape((spec,), 120, 16))
    call = LayerCall(0, spec.scaling, window, None, None)

    def sizes_of(*parts: tuple[int, int, int]) -> set[tuple[int, ...]]:
        sizes.clear()
        batch = batch_of(*parts)
        rows = torch.ones(len(batch.slot_mapping), 4, 8)
        backend.build_metadata(batch).forward(call, rows, rows[:, :2], rows[:, :2])
        return set(sizes)

    single = {position: sizes_of((0, position, position + 1)) for position in (2, 62, 63, 64, 65, 150)}
    assert single[63] != single[150] or window is not None
    assert sizes_of((0, 62, 66)) == set().union(*(single[position] for position in (62, 63, 64, 65)))
    assert sizes_of((0, 2, 3), (1, 63, 64), (2, 150, 151)) == single[2] | single[63] | single[150]
