"""Workloads are the same everywhere, and no repeat can be served from the cache of another."""

import pytest

from benchmarks.serving.workloads import KINDS, LONG_PROMPTS, SHARED_TOKENS, Workload, make_workload

VOCAB = 1000
FIRST_TOKENS = [284, 992, 865, 394]
NUM_PROMPT_TOKENS = 7031
NUM_OUTPUT_TOKENS = 4695


def made(name: str, repeat: int = 0, **more: int) -> Workload:
    return make_workload(name, vocab_size=VOCAB, repeat=repeat, requests_per_second=4.0, **more)


@pytest.mark.parametrize("name", KINDS)
def test_one_name_and_repeat_give_one_workload(name: str) -> None:
    assert made(name) == made(name)


@pytest.mark.parametrize("name", KINDS)
def test_repeats_have_the_same_shape_and_other_tokens(name: str) -> None:
    first, second = made(name, 0), made(name, 1)
    assert [(len(one.prompt), one.max_tokens, one.arrival) for one in first.requests] == [
        (len(one.prompt), one.max_tokens, one.arrival) for one in second.requests
    ]
    assert all(
        one.prompt[:16] != other.prompt[:16]
        for one, other in zip(first.requests, second.requests, strict=True)
    )


def test_this_very_workload() -> None:
    """Figures of different days are comparable only while the numbers stay what they are."""
    workload = made("mixed")
    assert workload.requests[0].prompt[:4] == FIRST_TOKENS
    assert sum(len(one.prompt) for one in workload.requests) == NUM_PROMPT_TOKENS
    assert workload.num_output_tokens == NUM_OUTPUT_TOKENS


def test_lengths_are_within_their_bounds() -> None:
    workload = made("mixed")
    assert len(workload.requests) == 64
    assert all(16 <= len(one.prompt) <= 256 and 16 <= one.max_tokens <= 128 for one in workload.requests)
    assert all(10 <= token < VOCAB for one in workload.requests for token in one.prompt)


def test_a_shared_prefix_is_the_mixed_shape_with_the_same_beginning() -> None:
    workload = made("shared-prefix")
    assert len({tuple(one.prompt[:SHARED_TOKENS]) for one in workload.requests}) == 1
    assert len({tuple(one.prompt[: SHARED_TOKENS + 4]) for one in workload.requests}) == 64
    assert [len(one.prompt) - SHARED_TOKENS for one in workload.requests] == [
        len(one.prompt) for one in made("mixed").requests
    ]


def test_long_prompts_stand_among_chats() -> None:
    lengths = [len(one.prompt) for one in made("long-and-chats").requests]
    assert [length for length in lengths if length > 256] == list(LONG_PROMPTS)
    assert len(lengths) == 32
    assert lengths[0] <= 256


def test_arrivals_come_at_their_share_of_capacity() -> None:
    few, many = made("open-50", num_requests=2000), made("open-110", num_requests=2000)
    assert few.requests[0].arrival == 0.0
    assert 2000 / few.requests[-1].arrival == pytest.approx(2.0, rel=0.1)
    assert few.requests[-1].arrival / many.requests[-1].arrival == pytest.approx(2.2)


def test_an_open_loop_needs_a_capacity() -> None:
    with pytest.raises(ValueError, match="capacity"):
        make_workload("open-80", vocab_size=VOCAB, repeat=0)
