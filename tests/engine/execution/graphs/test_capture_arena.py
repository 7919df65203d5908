"""The capture arena: regions stay unchanged while they are viewed and are reused afterwards."""

import gc
from contextlib import suppress
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.graphs.capture_arena import ArenaFull, CaptureArena

NUM_BYTES = 4096


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
REQUESTS = st.tuples(st.integers(1, 70), st.sampled_from(DTYPES), st.integers(0, 8))
"""Size and dtype of a copy, and the number of copies that are dropped then."""


@settings(max_examples=200)
@given(st.lists(REQUESTS, max_size=40), st.integers(0, 99))
def test_viewed_regions_keep_their_contents(requests: list[tuple[int, torch.dtype, int]], seed: int) -> None:
    memory, random = CaptureArena(NUM_BYTES), Random(seed)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, (size, dtype, num_dropped) in enumerate(requests):
        original = torch.full((size,), number % 2, dtype=dtype)
        # The free regions may be too small.
        with suppress(ArenaFull):
            held.append((memory.copy_of(original), original))
        random.shuffle(held)
        del held[:num_dropped]
        assert all(torch.equal(*pair) for pair in held)
    held.clear()
    # All free regions are merged again.
    assert len(memory.copy_of(torch.zeros(NUM_BYTES, dtype=torch.uint8))) == NUM_BYTES


def test_a_view_keeps_its_region_and_an_unowned_tensor_does_not() -> None:
    memory = CaptureArena(256)
    whole = memory.copy_of(torch.arange(32.0))
    view, name = whole.view(4, 8)[1:3, ::2], memory.unowned(whole[8:])
    del whole
    with pytest.raises(ArenaFull):
        memory.copy_of(torch.zeros(33))
    assert view.tolist() == [[8, 10, 12, 14], [16, 18, 20, 22]]
    del view
    gc.collect()
    other = memory.copy_of(torch.full((64,), 7.0))
    assert name.tolist() == [7.0] * 24
    assert other.data_ptr() + 32 == name.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_keeps_shape_and_strides(dtype: torch.dtype) -> None:
    memory = CaptureArena(4096)
    original = torch.arange(24).view(2, 3, 4).to(dtype).transpose(0, 2)
    copy = memory.copy_of(original)
    name = memory.unowned(copy[1:, 1])
    assert (copy.stride(), copy.dtype) == (original.stride(), dtype)
    assert torch.equal(copy, original)
    assert torch.equal(name, original[1:, 1])
    assert memory.copy_of(torch.tensor(3)).shape == ()


def test_tensors_outside_the_arena_are_returned_unchanged() -> None:
    memory = CaptureArena(256)
    here, packed = torch.ones(3), torch.ones(3, 4).to_mkldnn()
    assert memory.unowned(here) is here
    assert memory.unowned(packed) is packed


def test_peak_bytes_is_the_end_of_the_highest_region() -> None:
    memory = CaptureArena(1 << 20)
    first, second = memory.copy_of(torch.zeros(16)), memory.copy_of(torch.zeros(17))
    assert memory.peak_bytes == 64 + 128
    del first
    third = memory.copy_of(torch.zeros(16))
    assert memory.peak_bytes == 64 + 128
    del second, third
    memory.copy_of(torch.zeros(100))
    assert memory.peak_bytes == 448
