"""The budget of a step."""

import pytest

from engine.outputs import WaitingReason
from engine.scheduling.budget import SchedulingBudget


def totals(budget: SchedulingBudget) -> tuple[int, int, int]:
    return budget.num_batched_tokens, budget.num_seqs, budget.num_prefill_seqs


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ((10, 5, 5), WaitingReason.TOKEN_BUDGET),
        ((99, 2, 2), WaitingReason.SEQ_BUDGET),
        ((99, 5, 1), WaitingReason.PREFILL_BUDGET),
    ],
)
def test_an_addition_over_a_limit_is_rejected_with_that_limit(
    limits: tuple[int, int, int], reason: WaitingReason
) -> None:
    budget = SchedulingBudget(*limits)
    budget.add(4, 1)
    budget.add(4, 1, 1)
    before = totals(budget)

    assert not budget.can_schedule(4, 1, 1)
    assert budget.bound_by is reason
    with pytest.raises(ValueError, match=reason.value):
        budget.add(4, 1, 1)

    assert totals(budget) == before


def test_a_limit_can_be_used_up_and_zero_remaining_is_not_no_limit() -> None:
    """TGI#2241: a remainder of zero was read as "no limit"."""
    budget = SchedulingBudget(8, 2, 1)
    budget.add(7, 1, 1)
    assert budget.remaining_tokens == 1
    budget.add(1, 1)

    assert budget.remaining_tokens == 0
    assert not budget.can_schedule(1, 0)
    assert not budget.can_schedule(0, 1)
    assert SchedulingBudget(0, 0, 0).can_schedule(0, 0)
    assert not SchedulingBudget(0, 1, 1).can_schedule(1, 1)
