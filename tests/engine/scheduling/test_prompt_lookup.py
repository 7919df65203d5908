"""Which tokens prompt lookup drafts, and how many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.scheduling.prompt_lookup import FIRST_LENGTH, MAX_LENGTH, MIN_LENGTH, PromptLookup
from engine.sequence import Sequence


def lookup_of(*token_ids: int) -> PromptLookup:
    return PromptLookup(Sequence("r", list(token_ids), SamplingParams(), arrival_time=0.0))


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ((1, 2, 3, 4, 5, 6, 7, 1, 2, 3), (4, 5, 6, 7, 1, 2, 3)),
        # The latest occurrence counts.
        ((1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3), (5, 1, 2, 3, 5, 1, 2)),
        # Three tokens before two.
        ((9, 2, 3, 4, 8, 2, 3, 5, 9, 2, 3), (4, 8, 2, 3, 5, 9, 2)),
        ((2, 3, 4, 1, 2, 3), (4, 1, 2, 3, 4, 1, 2)),
        # A text with a short period continues beyond its end.
        ((7, 7, 7), (7,) * 7),
        ((1, 2, 3, 4, 5), ()),
        ((1,), ()),
    ],
)
def test_the_tokens_after_the_same_ngram_are_drafted(
    token_ids: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert lookup_of(*token_ids).draft(FIRST_LENGTH) == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(-1, 9), st.data())
def test_an_index_kept_token_by_token_equals_one_made_at_once(
    token_ids: list[int], maximum: int, data: st.DataObject
) -> None:
    kept = lookup_of(*token_ids[:1])
    for token_id in token_ids[1:]:
        if data.draw(st.booleans()):
            kept.draft(maximum)
        kept.sequence.append(token_id)
    draft = kept.draft(maximum)
    assert draft == lookup_of(*token_ids).draft(maximum)
    assert len(draft) <= max(0, maximum)


def test_lengths_follow_what_was_accepted() -> None:
    lookup = lookup_of(7, 7, 7)

    def length() -> int:
        return len(lookup.draft(10**6))

    assert length() == FIRST_LENGTH
    lookup.adapt(FIRST_LENGTH, FIRST_LENGTH)
    assert length() == 2 * FIRST_LENGTH + 1
    for _ in range(9):
        lookup.adapt(1, 1)
    assert length() == MAX_LENGTH
    lookup.adapt(MAX_LENGTH, MAX_LENGTH // 2 + 1)
    assert length() == MAX_LENGTH
    for _ in range(9):
        lookup.adapt(MAX_LENGTH, 1)
    assert length() == MIN_LENGTH


def test_drafts_that_are_always_wrong_become_rare() -> None:
    lookup = lookup_of(7, 7, 7)
    num_drafts = 0
    for _ in range(1000):
        if draft := lookup.draft(7):
            num_drafts += 1
            lookup.adapt(len(draft), 0)
    assert num_drafts < 30
    # One right token, and drafts are made again at once.
    while not (draft := lookup.draft(7)):
        pass
    lookup.adapt(len(draft), 1)
    assert lookup.draft(7)
