"""The arrays of a forward pass match the decision."""

import pytest

from engine.errors import BlockTableOverrun
from engine.execution.runner.inputs import InputBuilder
from engine.outputs import SchedulerOutputs
from tests.engine.execution.serving import in_slot, part


def test_a_mixed_step() -> None:
    builder = InputBuilder(max_num_seqs=3, max_model_len=12, block_size=4)
    decoding = in_slot(2, [10, 11, 12, 13, 14], [5, 3])
    fresh = in_slot(0, [20, 21, 22, 23, 24, 25], [7, 1])
    going_on = in_slot(1, list(range(30, 42)), [2, 9, 4])
    inputs = builder.build(
        SchedulerOutputs(
            decode=(part(decoding, 4, 5),),
            prefill=(part(fresh, 0, 6, logits_from=5), part(going_on, 3, 7, logits_from=4)),
        )
    )
    assert inputs.token_ids.tolist() == [14, 20, 21, 22, 23, 24, 25, 33, 34, 35, 36]
    assert inputs.positions.tolist() == [4, 0, 1, 2, 3, 4, 5, 3, 4, 5, 6]
    assert inputs.logits_rows.tolist() == [0, 6]
    batch = inputs.batch
    assert batch.slot_mapping.tolist() == [12, 28, 29, 30, 31, 4, 5, 11, 36, 37, 38]
    assert sorted(batch.blocks_begun.tolist()) == [1, 3, 9]
    assert batch.decode_rows.tolist() == [0]
    assert batch.decode_lengths.tolist() == [5]
    assert batch.decode_tables.tolist() == [[5, 3]]
    assert [(chunk.first_row, chunk.num_rows, chunk.start) for chunk in batch.chunks] == [
        (1, 6, 0),
        (7, 4, 3),
    ]
    assert [chunk.table.tolist() for chunk in batch.chunks] == [[7, 1], [2, 9]]


def test_a_step_of_single_tokens() -> None:
    """A decode, a first token, and a part of a prompt that does not sample yet."""
    decoding, going_on = in_slot(2, [10, 11, 12, 13, 14, 15], [5, 3]), in_slot(1, [30, 31, 32, 33], [2])
    fresh = in_slot(0, [20], [7])
    items = (part(fresh, 0, 1), part(going_on, 2, 3, logits_from=1))
    for prefill, wanted in ((items, [0, 1]), (items[:1], [0, 1])):
        inputs = InputBuilder(3, 12, 4).build(
            SchedulerOutputs(decode=(part(decoding, 5, 6),), prefill=prefill)
        )
        num_items = 1 + len(prefill)
        assert inputs.token_ids.tolist() == [15, 20, 32][:num_items]
        assert inputs.positions.tolist() == [5, 0, 2][:num_items]
        assert inputs.logits_rows.tolist() == wanted
        assert inputs.batch.slot_mapping.tolist() == [13, 28, 10][:num_items]
        assert inputs.batch.decode_rows.tolist() == [0, 1, 2][:num_items]
        assert inputs.batch.decode_lengths.tolist() == [6, 1, 3][:num_items]
        assert inputs.batch.chunks == ()


def test_a_chunk_with_all_logits_beside_a_decode() -> None:
    decoding, asking = in_slot(2, [10, 11], [5]), in_slot(0, [20, 21, 22, 23], [7])
    inputs = InputBuilder(3, 12, 4).build(
        SchedulerOutputs(decode=(part(decoding, 1, 2),), prefill=(part(asking, 0, 3),))
    )
    assert inputs.token_ids.tolist() == [11, 20, 21, 22]
    assert inputs.positions.tolist() == [1, 0, 1, 2]
    assert inputs.logits_rows.tolist() == [0, 1, 2, 3]
    assert [(chunk.first_row, chunk.num_rows) for chunk in inputs.batch.chunks] == [(1, 3)]


def test_empty_blocks_are_not_read() -> None:
    builder = InputBuilder(2, 16, 4)
    tables = builder.build(
        SchedulerOutputs(
            prefill=(part(in_slot(0, [1] * 12, [4, 5, 6]), 1, 2), part(in_slot(1, [1] * 8, [7, 8]), 5, 6))
        )
    ).batch.decode_tables
    assert tables.tolist() == [[4, 0], [7, 8]]


def test_a_full_last_block_is_not_zeroed_and_a_begun_one_only_once() -> None:
    builder = InputBuilder(1, 16, 4)
    sequence = in_slot(0, [1] * 12, [4, 5, 6])
    begun = [
        builder.build(SchedulerOutputs(prefill=(part(sequence, start, end),))).batch.blocks_begun.tolist()
        for start, end in ((0, 4), (4, 6), (6, 7), (7, 9))
    ]
    assert begun == [[], [5], [], [6]]


def test_a_table_grows_in_place() -> None:
    builder = InputBuilder(1, 16, 4)
    sequence = in_slot(0, [1] * 9, [4])
    builder.build(SchedulerOutputs(prefill=(part(sequence, 0, 4),)))
    sequence.block_table.extend([9, 2])
    inputs = builder.build(SchedulerOutputs(prefill=(part(sequence, 4, 9),)))
    assert inputs.batch.slot_mapping.tolist() == [36, 37, 38, 39, 8]


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_preempted_sequence_returns_to_its_slot_with_other_blocks(is_reported: bool) -> None:
    builder = InputBuilder(1, 16, 4)
    sequence = in_slot(0, [1] * 6, [4, 5])
    builder.build(SchedulerOutputs(prefill=(part(sequence, 0, 6),)))
    sequence.preempt()
    sequence.admit(0)
    sequence.block_table = [6, 7]
    outputs = SchedulerOutputs(prefill=(part(sequence, 0, 6),), released_slots=(0,) if is_reported else ())
    assert builder.build(outputs).batch.slot_mapping.tolist() == [24, 25, 26, 27, 28, 29]


def test_another_sequence_in_the_slot_has_its_own_blocks() -> None:
    builder = InputBuilder(1, 16, 4)
    builder.build(SchedulerOutputs(prefill=(part(in_slot(0, [1] * 6, [4, 5]), 0, 6),)))
    other = in_slot(0, [1] * 6, [8, 9])
    slots = builder.build(SchedulerOutputs(prefill=(part(other, 0, 6),))).batch.slot_mapping
    assert slots.tolist() == [32, 33, 34, 35, 36, 37]


def test_building_again_for_a_part_changes_nothing() -> None:
    builder = InputBuilder(2, 16, 4)
    items = (part(in_slot(0, [1] * 6, [4, 5]), 0, 6), part(in_slot(1, [2] * 3, [6]), 0, 3))
    outputs = SchedulerOutputs(prefill=items, released_slots=(0, 1))
    builder.build(outputs)
    again = builder.build(outputs.subset(items[1:], is_first=False))
    assert again.token_ids.tolist() == [2, 2, 2]
    assert again.batch.slot_mapping.tolist() == [24, 25, 26]


def test_a_sequence_without_a_slot_is_an_error() -> None:
    sequence = in_slot(0, [1], [1])
    sequence.preempt()
    with pytest.raises(ValueError, match="without a slot"):
        InputBuilder(1, 16, 4).build(SchedulerOutputs(prefill=(part(sequence, 0, 1),)))


@pytest.mark.parametrize(("start", "end"), [(8, 9), (4, 9), (6, 12)])
def test_a_token_beyond_the_block_table_is_refused(start: int, end: int) -> None:
    """A stale row would name a block of another sequence, whose values would be overwritten."""
    builder = InputBuilder(2, 16, 4)
    builder.build(SchedulerOutputs(prefill=(part(in_slot(1, [1] * 12, [4, 5, 6]), 0, 12),)))
    sequence = in_slot(1, [1] * 12, [8, 9])
    with pytest.raises(
        BlockTableOverrun, match=f"slot 1/0 computes tokens {start} to {end}, but holds 2 blocks"
    ):
        builder.build(SchedulerOutputs(prefill=(part(sequence, start, end),)))
    full = builder.build(SchedulerOutputs(prefill=(part(sequence, 4, 8),)))
    assert full.batch.slot_mapping.tolist() == [36, 37, 38, 39]


def test_released_rows_and_padding_name_the_null_block() -> None:
    builder = InputBuilder(3, 16, 4)
    first, second = in_slot(0, [1] * 12, [4, 5, 6]), in_slot(1, [1] * 12, [7, 8, 9])
    builder.build(SchedulerOutputs(prefill=(part(first, 0, 12), part(second, 0, 12))))
    other = in_slot(1, [1] * 4, [3])
    builder.build(SchedulerOutputs(prefill=(part(other, 0, 4),), released_slots=(0,)))
    assert builder._tables.array.tolist() == [[0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0]]


def test_a_slot_that_is_reported_late_keeps_the_row_of_its_new_sequence() -> None:
    builder = InputBuilder(2, 16, 4)
    sequence = in_slot(0, [1] * 9, [4, 5, 6])
    builder.build(SchedulerOutputs(prefill=(part(sequence, 0, 8),)))
    beside = SchedulerOutputs(prefill=(part(in_slot(1, [1], [7]), 0, 1),), released_slots=(0,))
    builder.build(beside)
    assert builder.build(SchedulerOutputs(decode=(part(sequence, 8, 9),))).batch.slot_mapping.tolist() == [24]
