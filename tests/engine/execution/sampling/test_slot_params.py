"""The parameters of a batch are those of its sequences, whichever sequences had their slots before."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.constraints import FREE, Constraints
from engine.execution.sampling.gumbel import seed_states
from engine.execution.sampling.slot_params import NO_LOGPROBS, SlotParams
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.engine.execution.sampling.bench import ModuloGrammar, row

any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.5, 1.0, 1e308]),
    top_k=st.sampled_from([0, 1, 50, 2**70]),
    top_p=st.sampled_from([0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.5]),
    seed=st.integers(-(2**63), 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 5]),
    logit_bias=st.sampled_from([{}, {3: 1.0}]),
)


def in_slot(params: SamplingParams, slot: int | None) -> Sequence:
    sequence = Sequence("r", [1], params, arrival_time=0.0)
    if slot is not None:
        sequence.admit(slot)
    return sequence


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.dictionaries(st.integers(0, 300), any_params, max_size=5), max_size=6), st.data())
def test_each_row_has_its_parameters(batches: list[dict[int, SamplingParams]], data: st.DataObject) -> None:
    """Some sequences stay in their slots, others are new."""
    slots, known = SlotParams(), dict[int, Sequence]()
    for batch in batches:
        for slot, params in batch.items():
            if slot not in known or data.draw(st.booleans()):
                known[slot] = in_slot(params, slot)
        sequences = [known[slot] for slot in batch]
        found = slots.of(sequences)
        for at, sequence in enumerate(sequences):
            params = sequence.params
            one = found[at]
            assert one["is_random"] == (not params.is_greedy)
            assert one["temperature"] == pytest.approx(min(params.temperature, 1e30))
            assert one["top_k"] == min(params.top_k, 2**63 - 1)
            assert (one["top_p"], one["min_p"]) == (params.top_p, params.min_p)
            assert one["seed_state"] == seed_states([params.seed])[0]
            assert one["num_logprobs"] == (NO_LOGPROBS if params.logprobs is None else params.logprobs)
            assert one["may_be_processed"] == bool(params.logit_bias)


@pytest.mark.parametrize(
    ("params", "constraints"),
    [
        ({"repetition_penalty": 1.1}, FREE),
        ({"presence_penalty": 0.1}, FREE),
        ({"frequency_penalty": -0.1}, FREE),
        ({"logit_bias": {1: 1.0}}, FREE),
        ({"allowed_token_ids": (1,)}, FREE),
        ({"min_tokens": 3}, FREE),
        ({}, Constraints(grammar=ModuloGrammar(2))),
        ({}, Constraints(bad_token_ids=((1, 2),))),
    ],
)
def test_which_sequences_may_be_processed(params: dict[str, Any], constraints: Constraints) -> None:
    item = row(
        SamplingParams(**params), **{one.name: getattr(constraints, one.name) for one in fields(Constraints)}
    )
    plain = row(SamplingParams(temperature=0.3, top_k=5, top_p=0.5, min_p=0.1, logprobs=3, stop=("x",)))
    found = SlotParams().of([item.sequence, plain.sequence])
    assert found["may_be_processed"].tolist() == [True, False]


def test_a_sequence_without_a_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="without a slot"):
        SlotParams().of([in_slot(SamplingParams(), None)])


def test_params_that_were_read_do_not_change() -> None:
    slots = SlotParams()
    first = slots.of([in_slot(SamplingParams(top_k=7), 0)])
    slots.of([in_slot(SamplingParams(top_k=9), 0)])
    assert first["top_k"].tolist() == [7]
