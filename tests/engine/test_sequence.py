"""The status of a sequence, and the validation of sampling parameters."""

from collections.abc import Callable

import pytest

from engine.errors import IllegalTransition, InvalidParameter
from engine.sampling_params import SamplingParams
from engine.sequence import TRANSITIONS, FinishReason, Sequence, SequenceStatus, worst_reason

CHANGES: dict[SequenceStatus, Callable[[Sequence], None]] = {
    SequenceStatus.WAITING: Sequence.preempt,
    SequenceStatus.RUNNING: lambda one: one.admit(slot=3),
    SequenceStatus.FINISHED: lambda one: one.finish(FinishReason.STOP),
}


def sequence_in(status: SequenceStatus) -> Sequence:
    sequence = Sequence("r", [1, 2, 3], SamplingParams(), arrival_time=0.0)
    if status is not SequenceStatus.WAITING:
        sequence.admit(slot=0)
        sequence.num_computed_tokens = 3
    if status is SequenceStatus.FINISHED:
        sequence.finish(FinishReason.LENGTH)
    return sequence


@pytest.mark.parametrize("origin", SequenceStatus)
@pytest.mark.parametrize("target", SequenceStatus)
def test_an_illegal_transition_raises_and_changes_nothing(
    origin: SequenceStatus, target: SequenceStatus
) -> None:
    sequence = sequence_in(origin)
    before = (sequence.slot, sequence.num_computed_tokens, sequence.finish_reason, sequence.num_preemptions)

    if target in TRANSITIONS[origin]:
        CHANGES[target](sequence)
        assert sequence.status is target
    else:
        with pytest.raises(IllegalTransition, match=origin.value):
            CHANGES[target](sequence)
        assert sequence.status is origin
        assert before == (
            sequence.slot,
            sequence.num_computed_tokens,
            sequence.finish_reason,
            sequence.num_preemptions,
        )


def test_preemption_keeps_tokens_and_arrival_and_discards_computed_tokens() -> None:
    sequence = sequence_in(SequenceStatus.RUNNING)
    sequence.append(9)

    sequence.preempt()

    assert sequence.token_ids == [1, 2, 3, 9]
    assert (sequence.get_prompt_len(), sequence.num_output_tokens) == (3, 1)
    assert sequence.num_uncomputed_tokens == 4
    assert sequence.arrival_time == 0.0


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", value) for value in (0, -1, True, "5", 1.5)],
        *[("temperature", value) for value in (-0.1, NAN, INF, -INF, 10**400, "1", True, None)],
        *[("top_p", value) for value in (0, -1, 1.1, NAN, INF, "x")],
        *[("min_p", value) for value in (-0.1, 1.1, NAN)],
        *[("top_k", value) for value in (-1, 1.5, True, "3")],
        *[("seed", value) for value in (2**64, -(2**63) - 1, 1.0, True, "1")],
        *[("stop", value) for value in ("text", ("",), (1,), None)],
        *[("stop_token_ids", value) for value in ((-1,), (True,), (1.0,), ("a",), 5)],
        ("ignore_eos", 1),
    ],
)
def test_an_invalid_sampling_parameter_is_rejected_by_name(field: str, value: object) -> None:
    """vllm#1623, sglang#28153: values that are not numbers reached the sampler and killed the engine."""
    with pytest.raises(InvalidParameter) as raised:
        SamplingParams(**{field: value})  # type: ignore[arg-type]

    assert raised.value.field == field
    assert str(raised.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 10**9),
        ("max_tokens", None),
        ("temperature", 1e-5),
        ("top_k", 9999999),
        ("top_p", 1),
        ("seed", -1),
        ("seed", 2**64 - 1),
        ("stop", ("a", "b")),
        ("stop_token_ids", (0, 1)),
    ],
)
def test_extreme_sampling_parameters_are_accepted(field: str, value: object) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p", "seed", "presence_penalty"])
def test_a_number_with_too_many_digits_to_print_is_rejected_by_name(field: str) -> None:
    with pytest.raises(InvalidParameter, match=field):
        SamplingParams(**{field: -(10**5000)})  # type: ignore[arg-type]


def test_a_request_ends_for_the_worst_reason_of_its_outputs() -> None:
    """From worst to best: error, timeout, cancelled, length, stop."""
    worst_first = ["error", "timeout", "cancelled", "length", "stop"]
    assert {reason.value for reason in FinishReason} == set(worst_first)
    for at, worst in enumerate(worst_first):
        reasons = [FinishReason(reason) for reason in reversed(worst_first[at:])]
        assert worst_reason(reasons) is FinishReason(worst)
