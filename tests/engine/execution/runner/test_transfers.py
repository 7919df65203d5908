"""The arrays of a step are copied to the device in one transfer. The device here is "meta"."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.graphs.decode_buffers import NUM_FIELDS, DecodeBuffers, pack_step
from engine.execution.runner.inputs import InputBuilder, StepInputs
from engine.execution.runner.transfers import ALIGNMENT, move, move_inputs
from engine.outputs import SchedulerOutputs
from tests.engine.execution.serving import in_slot, part

CPU, META = torch.device("cpu"), torch.device("meta")
shapes = st.lists(st.integers(0, 20) | st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8)


@settings(max_examples=60, derandomize=True)
@given(shapes=shapes)
def test_moved_tensors_are_equal_and_aligned(shapes: list[int | tuple[int, int]]) -> None:
    tensors = [
        torch.randint(-(2**62), 2**62, shape if isinstance(shape, tuple) else (shape,)) for shape in shapes
    ]
    found = move(tensors, CPU)
    assert len(found) == len(tensors)
    assert all(map(torch.equal, tensors, found))
    offsets = [one.storage_offset() for one in found if one.numel()]
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert len(set(offsets)) == len(offsets)


def mixed_step() -> StepInputs:
    builder = InputBuilder(max_num_seqs=3, max_model_len=12, block_size=4)
    decoding = part(in_slot(2, [10, 11, 12, 13, 14], [5, 3]), 4, 5)
    fresh = part(in_slot(0, [20, 21, 22, 23, 24, 25], [7, 1]), 0, 6, logits_from=5)
    going_on = part(in_slot(1, list(range(30, 42)), [2, 9, 4]), 3, 7, logits_from=4)
    return builder.build(SchedulerOutputs(decode=(decoding,), prefill=(fresh, going_on)))


def test_a_batch_in_other_tensors_is_the_same_batch() -> None:
    batch = mixed_step().batch
    tensors = batch.tensors
    assert len(tensors) == 7
    again = batch.with_tensors([tensor.clone() for tensor in tensors])
    for name in ("slot_mapping", "blocks_begun", "decode_rows", "decode_lengths", "decode_tables"):
        assert torch.equal(getattr(again, name), getattr(batch, name))
    assert [chunk[:3] for chunk in again.chunks] == [chunk[:3] for chunk in batch.chunks]
    assert all(
        torch.equal(one.table, other.table) for one, other in zip(again.chunks, batch.chunks, strict=True)
    )


def test_a_step_is_moved_in_one_copy() -> None:
    inputs = mixed_step()
    moved = move_inputs(inputs, META)
    there = [moved.token_ids, moved.positions, moved.logits_rows, *moved.batch.on(META).tensors]
    here = [inputs.token_ids, inputs.positions, inputs.logits_rows, *inputs.batch.tensors]
    assert [tensor.shape for tensor in there] == [tensor.shape for tensor in here]
    assert {tensor.device for tensor in there} == {META}
    # Views of one tensor, in the order in which they were packed.
    offsets = [tensor.storage_offset() for tensor in there]
    assert offsets == sorted(offsets)
    assert len({tensor.untyped_storage()._cdata for tensor in there}) == 1
    # The batch is also on the host.
    assert [tensor.tolist() for tensor in moved.batch.tensors] == [
        tensor.tolist() for tensor in inputs.batch.tensors
    ]
    assert moved.batch.on(CPU) is moved.batch


def test_nothing_is_moved_on_a_cpu() -> None:
    inputs = mixed_step()
    assert move_inputs(inputs, CPU) is inputs
    assert inputs.batch.on(CPU) is inputs.batch


def test_a_batch_is_moved_on_demand() -> None:
    batch = mixed_step().batch.on(META)
    assert {tensor.device for tensor in batch.tensors} == {META}


def decode_step(lengths: list[int]) -> StepInputs:
    items = []
    blocks = iter(range(1, 100))
    for slot, length in enumerate(lengths):
        table = [next(blocks) for _ in range(-(-length // 4))]
        items.append(
            part(in_slot(slot, [100 * slot + at for at in range(length)], table), length - 1, length)
        )
    return InputBuilder(len(lengths), 64, 4).build(SchedulerOutputs(decode=tuple(items)))


def test_a_decode_step_is_padded() -> None:
    buffer = torch.full((4 * (NUM_FIELDS + 2),), -7)
    pack_step(decode_step([3, 6]), 4, buffer)
    assert buffer[: 4 * NUM_FIELDS].view(NUM_FIELDS, 4).tolist() == [
        [2, 105, 0, 0],
        [2, 5, 0, 0],
        [6, 13, 0, 0],
        [3, 6, 1, 1],
    ]
    assert buffer[4 * NUM_FIELDS :].view(4, 2).tolist() == [[1, 0], [2, 3], [0, 0], [0, 0]]


def test_buffers_keep_their_addresses_and_hold_the_last_step() -> None:
    buffers = DecodeBuffers(4, 16, CPU)
    first = buffers.first(2)
    assert first.rows.lengths.tolist() == [1, 1]
    buffers.write(decode_step([9, 9, 9, 9]), 4)
    buffers.write(decode_step([6]), 2)
    assert first.token_ids.tolist() == [5, 0]
    assert first.positions.tolist() == [5, 0]
    assert first.all_rows.tolist() == [0, 1]
    assert first.rows.slot_mapping.tolist() == [9, 0]
    assert first.rows.lengths.tolist() == [6, 1]
    # Beyond its own blocks a row may hold old values.
    assert first.rows.tables[:, :2].tolist() == [[1, 2], [0, 0]]
    assert first.rows.tables.shape == (2, 16)
    buffers.clear()
    assert not buffers.first(4).rows.tables.any()
    assert buffers.first(4).rows.lengths.tolist() == [1] * 4


def test_the_rows_of_every_size_are_aligned() -> None:
    inputs = DecodeBuffers(70, 3, CPU).first(70)
    for tensor in (inputs.token_ids, inputs.positions, inputs.rows.slot_mapping, inputs.rows.lengths):
        assert tensor.storage_offset() % ALIGNMENT == 0
        assert tensor.is_contiguous()
