"""Any mix of sampling parameters: each row is sampled as if it were alone."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.constraints import NO_TOKEN_ALLOWED, Constraints
from engine.execution.sampling import sampler
from engine.execution.sampling.logits_processors import LogitsProcessors
from engine.execution.sampling.sampler import NON_FINITE, Sampler
from engine.outputs import SampledToken, ScheduledSequence
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.engine.execution.sampling.bench import ModuloGrammar, naive_sample, random_logits, row, sample

VOCAB = 70
ids = st.integers(0, VOCAB - 1)
#: Few ids, so that penalties and bad words occur in prompts and outputs.
common_ids = st.integers(0, 9)


@st.composite
def requests(draw: st.DrawFn, vocab_size: int = VOCAB) -> ScheduledSequence:
    """A request in the middle of its output, with any parameters."""
    rarely = st.integers(0, 2).map(lambda number: number == 0)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 1, 4, 300])),
        top_p=draw(st.sampled_from([0.2, 0.9, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        seed=draw(st.integers(0, 2**64 - 1)),
        min_tokens=draw(st.sampled_from([0, 0, 2, 4])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 1.1, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7, -0.1])),
        logit_bias=draw(st.dictionaries(common_ids, st.floats(-100, 100, width=32), max_size=3)),
        allowed_token_ids=tuple(draw(st.lists(ids, min_size=1))) if draw(rarely) else None,
        logprobs=draw(st.none() | st.integers(0, 20)),
    )
    return row(
        params,
        prompt=draw(st.lists(common_ids, min_size=1, max_size=6)),
        output=draw(st.lists(common_ids, max_size=5)),
        end_token_ids=frozenset(draw(st.sets(common_ids, max_size=3))),
        bad_token_ids=tuple(map(tuple, draw(st.lists(st.lists(common_ids, min_size=1, max_size=3))))),
        grammar=ModuloGrammar(draw(st.integers(1, 40)), draw(common_ids)) if draw(rarely) else None,
    )


@settings(max_examples=80, derandomize=True)
@given(
    items=st.lists(requests(), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    levels=st.sampled_from([None, 3]),
    bad_row=st.none() | st.integers(0, 5),
)
def test_equals_the_naive_sampler(
    items: list[ScheduledSequence], seed: int, levels: int | None, bad_row: int | None
) -> None:
    """vllm#5639, unsloth#11039: penalties and filters of one row reached another, or crashed the batch.

    With `levels`, many logits are equal. Only a row with NaN fails, whatever its parameters.
    """
    logits = random_logits(len(items), VOCAB, seed)
    if levels:
        logits = (logits / 3 * levels).round() / levels
    if bad_row is not None and bad_row < len(items):
        logits[bad_row, 3] = torch.nan
    before = logits.clone()
    found = Sampler().sample(logits, tuple(items))
    assert found == [naive_sample(one, item) for one, item in zip(logits, items, strict=True)]
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=12, derandomize=True)
@given(
    items=st.lists(requests(), min_size=2, max_size=4),
    plain=st.lists(st.booleans(), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_a_row_is_bit_identical_to_itself_alone(
    items: list[ScheduledSequence], plain: list[bool], seed: int
) -> None:
    """In a vocabulary large enough for tiles and windows, beside plain rows."""
    batch: list[ScheduledSequence] = []
    for number, (item, is_plain) in enumerate(zip(items, plain, strict=False)):
        batch += [item] + [row(SamplingParams(seed=number, top_p=0.9, logprobs=3))] * is_plain
    logits = random_logits(len(batch), 9_000, seed)
    together = Sampler().sample(logits, tuple(batch))
    assert together == [Sampler().sample(logits[[at]], (item,))[0] for at, item in enumerate(batch)]


def test_a_batch_that_is_sampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(7, 50)
    items = tuple(
        row(SamplingParams(seed=at, logprobs=1, presence_penalty=at % 2), output=[at, 3]) for at in range(7)
    )
    whole = Sampler().sample(logits, items)
    monkeypatch.setattr(sampler, "ROWS_AT_ONCE", 3)
    assert Sampler().sample(logits, items) == whole


def test_five_kinds_in_all_orders() -> None:
    """tenstorrent/vllm#286, vllm-metal#646: parameters were applied to another row."""
    kinds = [
        row(SamplingParams(temperature=0.0)),
        row(SamplingParams(temperature=0.0, repetition_penalty=2.0), prompt=[5, 6, 7], output=[8, 9]),
        row(SamplingParams(seed=3, top_k=1)),
        row(SamplingParams(seed=4, top_k=5)),
        row(SamplingParams(seed=5, min_tokens=9), end_token_ids=frozenset(range(0, 60, 2))),
    ]
    logits = random_logits(5, 60)
    logits[:, 8] = 9.0
    logits[4, 2] = 20.0
    alone = [naive_sample(one, kind) for one, kind in zip(logits, kinds, strict=True)]
    assert alone[1].token_id != 8
    for order in itertools.permutations(range(5)):
        found = Sampler().sample(logits[list(order)], tuple(kinds[at] for at in order))
        assert found == [alone[at] for at in order]


def test_plain_rows_are_not_processed() -> None:
    """A batch of such rows is neither copied nor kept."""
    processors, logits = LogitsProcessors(), random_logits(3, 50)
    plain = [row(SamplingParams(seed=seed)).sequence for seed in (1, 2)]
    assert processors.apply(logits, plain, range(len(plain))) is None
    assert not processors._states
    processed = processors.apply(
        logits, [plain[0], row(SamplingParams(logit_bias={3: 1.0})).sequence, plain[1]], range(3)
    )
    assert processed
    assert processed.rows.tolist() == [1]
    assert processed.logits.shape == (1, 50)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_a_row_without_allowed_tokens_fails(temperature: float) -> None:
    logits = random_logits(4, 100)
    impossible = row(
        SamplingParams(temperature=temperature, allowed_token_ids=(4, 7), seed=1), bad_token_ids=((4,), (7,))
    )
    broken = row(SamplingParams(temperature=temperature, allowed_token_ids=(4, 7), seed=1))
    other = row(SamplingParams(seed=3))
    logits[2, 50] = torch.nan
    found = Sampler().sample(logits, (other, impossible, broken, other))
    assert found[1] == SampledToken(None, NO_TOKEN_ALLOWED)
    assert found[2] == SampledToken(None, NON_FINITE)
    assert [found[0].token_id, found[3].token_id] == sample(logits[[0, 3]], other, other)


def test_a_grammar_that_raises_fails_only_its_row() -> None:
    logits = random_logits(3, 100)
    others = [row(SamplingParams(seed=1)), row(SamplingParams(seed=2), grammar=ModuloGrammar(7))]
    bad = row(SamplingParams(seed=3), grammar=ModuloGrammar(7, fault=ValueError("no such token")))
    found = Sampler().sample(logits, (others[0], bad, others[1]))
    assert found[1].token_id is None
    assert found[1].error == "structured_outputs: no such token"
    assert [found[0].token_id, found[2].token_id] == sample(logits[[0, 2]], *others)


@settings(max_examples=60, derandomize=True)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["grow", "grow", "leave", "again", "preempt"]), st.integers(0, 2)),
        max_size=30,
    ),
    tokens=st.lists(common_ids, min_size=30, max_size=30),
)
def test_kept_state_equals_state_from_the_tokens(moves: list[tuple[str, int]], tokens: list[int]) -> None:
    """nano-vllm#217, vllm#16832: after a preemption, prompt and output were mixed up for penalties.

    Three slots, whose sequences grow, are preempted and come back to any slot, end, or are sampled twice for
    one token, as after a fault. At each step one sampler that has seen it all agrees with a fresh reader.
    """
    with_memory = Sampler()
    slots = [in_slot(slot, slot) for slot in range(3)]
    for number, (move, slot) in enumerate(moves):
        if move == "grow":
            slots[slot].append(tokens[number])
        elif move == "leave":
            slots[slot].preempt()
            slots[slot] = in_slot(slot, number)
        elif move == "preempt":
            # Two are preempted and return, each to the other's slot.
            other = (slot + 1) % 3
            slots[slot].preempt()
            slots[other].preempt()
            slots[slot], slots[other] = slots[other], slots[slot]
            slots[slot].admit(slot)
            slots[other].admit(other)
        items = tuple(ScheduledSequence(sequence, sequence.num_tokens - 1, 1, 0, True) for sequence in slots)
        logits = random_logits(3, 20, number)
        assert with_memory.sample(logits, items) == list(map(naive_sample, logits, items))


def in_slot(slot: int, number: int) -> Sequence:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.3, logprobs=1
    )
    bad = Constraints(bad_token_ids=((number % 10,), (3, 4)))
    sequence = Sequence("r", [number % 7, 2], params, arrival_time=0.0, constraints=bad)
    sequence.admit(slot)
    return sequence


def test_state_of_departed_sequences_is_evicted() -> None:
    remembering, sequence = Sampler(), in_slot(2, 1)
    remembering.sample(
        random_logits(1, 20), (ScheduledSequence(sequence, sequence.num_tokens - 1, 1, 0, True),)
    )
    assert list(remembering._processors._states) == [2]
    sequence.preempt()
    remembering.sample(random_logits(1, 20), (row(SamplingParams()),))
    assert not remembering._processors._states
