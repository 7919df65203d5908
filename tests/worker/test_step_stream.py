"""The stream of a worker's steps: every step while somebody watches, samples otherwise, never an error."""

from typing import Any

import pytest
import redis

from engine.outputs import Lane, StepReport
from tests.worker.fakes import new_metrics, submit
from tests.worker.running import running
from tokenmill.protocol import keys, steps
from worker.step_stream import CHECK_SECONDS, MAX_PENDING, PAUSE_SECONDS, SAMPLE_SECONDS, StepStream


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.metrics = new_metrics()
        self.stream = StepStream("w", lambda: self.now, self.metrics)

    def add(self, number: int) -> None:
        lanes = (Lane("mine:o", 0, "decode", 1), Lane("other:o", 1, "waiting", 0, "behind"))
        report = StepReport(step=number, lanes=lanes, num_kv_blocks=8, num_free_kv_blocks=5)
        self.stream.add(report, lambda request_id: request_id[0])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def entries(client: "redis.Redis", name: str = "w") -> list[dict[str, Any]]:
    rows: Any = client.xrange(keys.steps(name))
    return [steps.decode(fields[steps.FIELD], "m") for _, fields in rows]


def test_a_step_is_stored_with_its_lanes(bench: Bench, redis_client: "redis.Redis") -> None:
    bench.add(7)
    bench.stream.write(redis_client)

    (step,) = entries(redis_client)
    assert step["step"] == 7
    assert step["kv"] == {"used": 3, "cached": 0, "total": 8}
    assert step["lanes"] == [
        {"task": "mine", "index": 0, "state": "decode", "tokens": 1, "reason": None},
        {"task": None, "index": 1, "state": "waiting", "tokens": 0, "reason": "behind"},
    ]
    assert 0 < int(redis_client.ttl(keys.steps("w"))) <= steps.TTL_SECONDS


def test_steps_are_sampled_until_somebody_watches(bench: Bench, redis_client: "redis.Redis") -> None:
    assert [bench.stream.wants_lanes() for _ in range(3)] == [True, False, False]
    bench.now += SAMPLE_SECONDS
    assert [bench.stream.wants_lanes() for _ in range(2)] == [True, False]

    redis_client.set(keys.steps_watched("w"), b"1", ex=60)
    bench.now += CHECK_SECONDS
    bench.stream.write(redis_client)
    assert [bench.stream.wants_lanes() for _ in range(2)] == [True, True]

    redis_client.delete(keys.steps_watched("w"))
    bench.now += CHECK_SECONDS
    bench.stream.write(redis_client)
    assert [bench.stream.wants_lanes() for _ in range(2)] == [True, False]


def test_the_stream_is_capped(bench: Bench, redis_client: "redis.Redis") -> None:
    for number in range(steps.MAX_ENTRIES + 500):
        bench.add(number)
        bench.stream.write(redis_client)
    assert steps.MAX_ENTRIES <= int(redis_client.xlen(keys.steps("w"))) < steps.MAX_ENTRIES + 200


def test_without_redis_steps_are_dropped_and_writing_pauses(
    bench: Bench, redis_client: "redis.Redis"
) -> None:
    class Down:
        def pipeline(self, **_: Any) -> Any:
            raise redis.ConnectionError("down")

    bench.add(1)
    bench.stream.write(Down())
    bench.add(2)
    bench.stream.write(redis_client)
    assert entries(redis_client) == []

    bench.now += PAUSE_SECONDS
    bench.stream.write(redis_client)
    assert [step["step"] for step in entries(redis_client)] == [2]


def test_a_backlog_keeps_the_newest_steps(bench: Bench, redis_client: "redis.Redis") -> None:
    for number in range(MAX_PENDING + 3):
        bench.add(number)
    bench.stream.write(redis_client)
    assert [step["step"] for step in entries(redis_client)] == list(range(3, MAX_PENDING + 3))


def test_a_worker_writes_its_steps(redis_url: str, redis_client: "redis.Redis") -> None:
    with running(redis_url) as run:
        redis_client.set(keys.steps_watched(run.worker.name), b"1", ex=60)
        task_id = submit(redis_client)
        assert redis_client.xread({keys.steps(run.worker.name): "0"}, block=4_000)
    rows: Any = redis_client.xrange(keys.steps(run.worker.name))
    found = [steps.decode(fields[steps.FIELD], "default") for _, fields in rows]
    assert {lane["task"] for step in found for lane in step["lanes"]} == {task_id}
