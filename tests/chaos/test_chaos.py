"""A short storm over the whole service: each of the faults that its promise names, once, in seeded order."""

from pathlib import Path

from tests.chaos import faults
from tests.chaos.errands import READERS
from tests.chaos.scenario import Plan, run
from tests.tiny_models import save_model

SEED = 4
TO_PROCESSES = (
    faults.freeze_worker, faults.kill_worker, faults.drain_worker, faults.kill_api, faults.fail_receiver,
)  # fmt: skip


def test_no_token_is_lost_or_doubled_in_a_storm(tmp_path: Path) -> None:
    plan = Plan(seed=SEED, to_processes={fault.__name__: fault for fault in TO_PROCESSES})
    told: list[str] = []

    verdict = run(plan, save_model(tmp_path / "model"), tmp_path, told.append)

    assert not verdict.problems, "\n".join([*map(str, verdict.problems), str(verdict), *told])
    assert verdict.num_faults == len(TO_PROCESSES) + len(faults.TO_REDIS)
    assert verdict.num_requests >= plan.min_requests
    assert verdict.num_resumed_tokens > 0
    errands = [record.errand for record in verdict.records]
    assert {errand.reader for errand in errands} == set(READERS)
    assert {errand.is_greedy for errand in errands} == {True, False}
    assert any(errand.cancel_at is not None for errand in errands)
    assert any(errand.resubmits for errand in errands)
    assert any(record.is_to_be_told for record in verdict.records)
    left = [record.reading.told for record in verdict.records if record.errand.leave_at is not None]
    assert ["cancelled"] in left, "nobody's leaving ended a task"
    assert str(verdict) == (
        f"chaos: requests={verdict.num_requests} faults={verdict.num_faults}"
        f" resumed_tokens={verdict.num_resumed_tokens} lost=0 doubled=0 stuck=0 seed={SEED}"
    )
