"""A short chaos run over the whole service: each fault once, in the order of a seed."""

from pathlib import Path

from tests.chaos import faults
from tests.chaos.scenario import Plan, run
from tests.chaos.workload import READERS
from tests.tiny_models import save_model

SEED = 4
TO_PROCESSES = (
    faults.freeze_worker, faults.kill_worker, faults.drain_worker, faults.kill_api, faults.fail_receiver,
)  # fmt: skip


def test_no_token_is_lost_or_doubled_under_faults(tmp_path: Path) -> None:
    plan = Plan(seed=SEED, to_processes={fault.__name__: fault for fault in TO_PROCESSES})
    lines: list[str] = []

    verdict = run(plan, save_model(tmp_path / "model"), tmp_path, lines.append)

    assert not verdict.problems, "\n".join([*map(str, verdict.problems), str(verdict), *lines])
    assert verdict.num_faults == len(TO_PROCESSES) + len(faults.TO_REDIS)
    assert verdict.num_requests >= plan.min_requests
    assert verdict.num_resumed_tokens > 0
    requests = [record.request for record in verdict.records]
    assert {request.reader for request in requests} == set(READERS)
    assert {request.is_greedy for request in requests} == {True, False}
    assert any(request.cancel_at is not None for request in requests)
    assert any(request.resubmits for request in requests)
    assert any(record.expects_webhook for record in verdict.records)
    left = [record.reading.statuses for record in verdict.records if record.request.disconnect_at is not None]
    assert ["cancelled"] in left, "no disconnect ended a task"
    assert str(verdict) == (
        f"chaos: requests={verdict.num_requests} faults={verdict.num_faults}"
        f" resumed_tokens={verdict.num_resumed_tokens} lost=0 doubled=0 stuck=0 seed={SEED}"
    )
