"""Forbidden tokens are -inf, and no others."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.execution.sampling import logit_masks
from engine.execution.sampling.logits_processors import LogitsProcessors
from engine.outputs import ScheduledSequence
from engine.sampling_params import SamplingParams
from tests.engine.execution.sampling.bench import ModuloGrammar, SetGrammar, random_logits, row

VOCAB = 70


def allowed(item: ScheduledSequence, vocab_size: int = VOCAB) -> list[int]:
    """The tokens that are not -inf, whose logits must be unchanged."""
    logits = random_logits(1, vocab_size)
    changed = LogitsProcessors().apply(logits, [item.sequence], [0])
    if changed is None:
        return list(range(vocab_size))
    assert not changed.faults
    left = changed.logits[0] != -torch.inf
    assert torch.equal(changed.logits[0][left], logits[0][left])
    return left.nonzero()[:, 0].tolist()


def without(*token_ids: int) -> list[int]:
    return [token for token in range(VOCAB) if token not in token_ids]


GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("prompt", "output", "bad", "left"),
    [
        ([1], [], ((5,),), without(5)),
        ([1], [], ((5, 6),), without()),
        ([1], [5], ((5, 6),), without(6)),
        ([1], [5, 1], ((5, 6),), without()),
        ([1], [1, 5], ((5, 6), (1, 5, 7), (2, 5, 8)), without(6, 7)),
        # The sequence begins in the prompt, which does not count.
        ([5], [], ((5, 6),), without()),
        ([1, 5], [6], ((5, 6, 7), (6, 8)), without(8)),
        ([1], [5, 5], ((5, 5, 5),), without(5)),
        ([1], [5], ((5, 6), (5, 9), (9,)), without(6, 9)),
    ],
)
def test_bad_words(
    prompt: list[int], output: list[int], bad: tuple[tuple[int, ...], ...], left: list[int]
) -> None:
    assert allowed(row(GREEDY, prompt=prompt, output=output, bad_token_ids=bad)) == left


@pytest.mark.parametrize(("num_output", "left"), [(0, without(3, 9)), (2, without(3, 9)), (3, without())])
def test_ends_are_masked_before_min_tokens(num_output: int, left: list[int]) -> None:
    """vllm#4589, vllm#21987: a second end of the model beat `min_tokens`."""
    params = SamplingParams(min_tokens=3)
    assert allowed(row(params, num_output, end_token_ids=frozenset({3, 9}))) == left


def test_only_allowed_ids_are_kept() -> None:
    assert allowed(row(SamplingParams(allowed_token_ids=(0, 31, 32, 69)))) == [0, 31, 32, 69]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 1000])
def test_a_grammar_of_any_vocabulary(vocab_size: int) -> None:
    item = row(GREEDY, output=[4, 3], grammar=ModuloGrammar(5))
    assert allowed(item, vocab_size) == [token for token in range(vocab_size) if token % 5 == 2]


def test_grammar_allowed_ids_and_bad_words_combine() -> None:
    params = SamplingParams(allowed_token_ids=(2, 3, 4, 5), min_tokens=2)
    item = row(params, bad_token_ids=((3,),), end_token_ids=frozenset({4}), grammar=SetGrammar(3, 4, 5, 6))
    assert allowed(item) == [5]


@pytest.mark.parametrize(
    ("grammar", "bad", "left"),
    [
        # Only end tokens are allowed: they stay, or the row would have no token.
        (SetGrammar(3, 9), (), [3, 9]),
        (SetGrammar(3, 9, 20), (), [20]),
        (SetGrammar(3, 9, 20), ((20,),), [3, 9]),
        (SetGrammar(), (), []),
    ],
)
def test_an_end_stays_if_the_grammar_allows_nothing_else(
    grammar: SetGrammar, bad: tuple[tuple[int, ...], ...], left: list[int]
) -> None:
    params = SamplingParams(min_tokens=5)
    ends = frozenset({3, 9})
    assert allowed(row(params, grammar=grammar, bad_token_ids=bad, end_token_ids=ends)) == left


def test_bits_beyond_the_vocabulary_are_ignored() -> None:
    """A grammar may fill whole words. These bits must not count as other allowed tokens."""

    class Careless(SetGrammar):
        def allows(self, token_id: int) -> bool:
            return token_id >= VOCAB or super().allows(token_id)

    item = row(SamplingParams(min_tokens=2), grammar=Careless(3), end_token_ids=frozenset({3}))
    assert allowed(item) == [3]


def test_a_grammar_reads_the_output_only() -> None:
    shown: list[list[int]] = []

    class Listening(SetGrammar):
        def advance(self, token_ids: list[int]) -> None:
            shown.append(token_ids)

    allowed(row(GREEDY, prompt=[1, 2], output=[6, 7], grammar=Listening(3)))
    assert shown == [[6, 7]]


def test_bits_are_unpacked_equally_on_every_device() -> None:
    bits = np.random.default_rng(1).integers(-(2**31), 2**31, size=(3, 40), dtype=np.int32)
    here = logit_masks.unpacked(bits, torch.device("cpu"))
    elsewhere = logit_masks.unpacked_on(bits, torch.device("cpu"))
    assert torch.equal(here, elsewhere)
    flags = (bits[:, :, None] >> np.arange(32)) & 1
    assert (here == 0).flatten().tolist() == flags.astype(bool).flatten().tolist()


@given(
    bad=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), min_size=1, max_size=6),
    output=st.lists(st.integers(0, 3), max_size=20),
)
def test_bad_words_equal_their_definition_at_every_step(
    bad: list[tuple[int, ...]], output: list[int]
) -> None:
    item = row(GREEDY, prompt=[1], bad_token_ids=tuple(bad))
    processors, logits = LogitsProcessors(), random_logits(1, VOCAB)

    for length in range(len(output) + 1):
        so_far = output[:length]
        changed = processors.apply(logits, [item.sequence], [0])
        assert changed is not None
        expected = {last for *before, last in bad if so_far[length - len(before) :] == before}
        banned = (changed.logits[0] == -torch.inf).nonzero()[:, 0].tolist()
        assert set(banned) == expected
        if length < len(output):
            item.sequence.append(output[length])


def test_outputs_of_one_request_share_their_large_masks() -> None:
    """128 outputs with as many allowed ids as the vocabulary share one mask."""
    params = SamplingParams(allowed_token_ids=tuple(range(0, VOCAB, 2)), n=2)
    one, two, other = row(params), row(params), row(replace(params, allowed_token_ids=(2, 4)))
    two.sequence.constraints = one.sequence.constraints
    for slot, item in enumerate((one, two, other)):
        item.sequence.slot = slot
    processors = LogitsProcessors()
    processors.apply(random_logits(3, VOCAB), [one.sequence, two.sequence, other.sequence], [0, 1, 2])
    masks = [processors._states[slot].masks for slot in range(3)]

    assert all(masks)
    assert masks[0]._constant is masks[1]._constant  # type: ignore[union-attr]
    assert masks[0]._constant is not masks[2]._constant  # type: ignore[union-attr]
