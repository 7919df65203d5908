"""A cancel in every state and race of a worker ends exactly the named task, once.

rq#2160, rq#2292: a cancel between two steps of a worker was overwritten, and the job ran to its end.
"""

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis
from rq.job import Job
from rq.serializers import JSONSerializer

from tests.chaos import leftovers
from tests.worker.fakes import (
    SLUG,
    FakeRunner,
    build_engine,
    end_of,
    ended,
    expected_tokens,
    log_length,
    submit,
    tokens_of,
    until,
)
from tests.worker.running import Running, running
from tokenmill.protocol import keys, rq_keys
from tokenmill.protocol.store.task_store import TaskStore

LENGTH = 6
PROMPT = tuple(range(1, 41))
"""Takes five steps or more."""


class Gate:
    """Lets the engine's steps pass one by one. A step waits here after the outputs of the one before.

    `drawn`: for each token, the beginning of the text that it was drawn for.
    """

    def __init__(self) -> None:
        self.runner = FakeRunner()
        self.runner.before_step = self._pass
        self.runner.sample_fault = lambda sequence: self.drawn.append(tuple(sequence.token_ids[:40]))
        self.drawn: list[tuple[int, ...]] = []
        self._arrivals = 0
        self._permits = threading.Semaphore(0)

    def open(self) -> None:
        self._permits.release(10_000)

    def step_until(self, run: Running, condition: Callable[[], Any]) -> None:
        """Step until the stored data fulfils `condition`. The next step then waits here."""
        until(lambda: self._arrivals, "a first step")
        for _ in range(300):
            until(lambda: not run.context.outputs.backlog, "all is stored")
            if condition():
                return
            before = self._arrivals
            self._permits.release()
            until(partial(self._has_more_arrivals, before), "the next step")
        raise AssertionError("the condition did not come true within 300 steps")

    def _has_more_arrivals(self, than: int) -> bool:
        return self._arrivals > than

    def _pass(self) -> None:
        self._arrivals += 1
        self._permits.acquire()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def fate(client: "redis.Redis", task: str) -> str:
    """The final status. All records of the end agree, and each exists once."""
    status = TaskStore(client).cancel(task)
    assert status is not None
    end = end_of(client, task)
    assert (status == "cancelled") == (end.finish_reason == "cancelled")
    job = Job.fetch(task, connection=client, serializer=JSONSerializer)
    assert job.get_status() == ("canceled" if status == "cancelled" else "finished")
    assert client.xlen(rq_keys.results(task)) == (status != "cancelled")
    return status


@pytest.mark.parametrize(("heard", "times"), [(True, 1), (True, 3), (False, 1)])
@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "last token"])
def test_only_the_named_task_ends(
    redis_url: str, redis_client: "redis.Redis", gate: Gate, state: str, heard: bool, times: int
) -> None:
    """If the listener misses the cancel, the next write is rejected."""

    def is_there() -> bool:
        run_hash, length = redis_client.hgetall(keys.run(victim)), log_length(redis_client, victim)
        return {
            "waiting": b"owner" not in run_hash,
            "prefill": b"scheduled_at" in run_hash and not length,
            "decode": length == 2,
            "last token": length == LENGTH - 1,
        }[state]

    crowd = [submit(redis_client, sampling={"max_tokens": 100})] * (state != "waiting") or [
        submit(redis_client, sampling={"max_tokens": 100}) for _ in range(4)
    ]
    victim = submit(redis_client, prompt_token_ids=PROMPT, sampling={"max_tokens": LENGTH})
    behind = submit(redis_client, sampling={"max_tokens": LENGTH})
    engine = build_engine(gate.runner, max_num_seqs=2, max_num_batched_tokens=8)
    with running(redis_url, engine) as run:
        gate.step_until(run, is_there)
        if not heard:
            run.worker.threads.services["listener"].stop()
            until(lambda: run.worker.threads.services["listener"].join(1), "the listener has stopped")
        inbox = run.context.inbox
        num_before = len(inbox)
        statuses = {TaskStore(redis_client).cancel(victim) for _ in range(times)}
        num_stored = log_length(redis_client, victim)
        if heard and state != "waiting":
            until(lambda: len(inbox) > num_before, "the loop has the message")
        gate.open()
        for task in crowd:
            assert tokens_of(ended(redis_client, task)) == expected_tokens([1, 2, 3], 100)
        assert tokens_of(ended(redis_client, behind)) == expected_tokens([1, 2, 3], LENGTH)

    assert statuses == {"cancelled"}
    assert fate(redis_client, victim) == "cancelled"
    tokens = tokens_of(ended(redis_client, victim))
    assert len(tokens) == {"waiting": 0, "prefill": 0, "decode": 2, "last token": LENGTH - 1}[state]
    assert tokens == expected_tokens(list(PROMPT), LENGTH)[: len(tokens)]
    assert log_length(redis_client, victim) == num_stored, "nothing follows its end"
    # The current step is not undone.
    assert not heard or gate.drawn.count(PROMPT) <= len(tokens) + 1, "it continued after the cancel"
    assert {fate(redis_client, task) for task in (*crowd, behind)} == {"completed"}
    assert leftovers.look(redis_client, SLUG) == []


def test_an_unknown_or_ended_task_changes_nothing(redis_url: str, redis_client: "redis.Redis") -> None:
    task = submit(redis_client, sampling={"max_tokens": LENGTH})
    with running(redis_url):
        events = ended(redis_client, task)
        assert [TaskStore(redis_client).cancel(each) for each in (task, "f" * 32, task)] == [
            "completed", None, "completed",
        ]  # fmt: skip
        other = submit(redis_client)
        assert tokens_of(ended(redis_client, other)) == expected_tokens([1, 2, 3], 5)
    assert ended(redis_client, task) == events
    assert fate(redis_client, task) == "completed"


def test_cancels_race_with_every_part_of_a_short_task(redis_url: str, redis_client: "redis.Redis") -> None:
    """Two clients cancel each task at once, at any moment: while it is claimed, starts or ends."""
    chance = random.Random(5)
    tasks: list[str] = []
    statuses: dict[str, set[str | None]] = {}

    def cancel(each: list[str]) -> None:
        with redis.Redis.from_url(redis_url) as client:
            for task in each:
                statuses.setdefault(task, set()).add(TaskStore(client).cancel(task))

    with running(redis_url, build_engine(max_num_seqs=8)):
        for _ in range(12):
            wave = [submit(redis_client, sampling={"max_tokens": n % 3 + 1}) for n in range(10)]
            tasks += wave
            cancelling = [threading.Thread(target=cancel, args=(chance.sample(wave, 10),)) for _ in range(2)]
            for thread in cancelling:
                thread.start()
            for thread in cancelling:
                thread.join()
        fates = {task: fate(redis_client, task) for task in tasks}
        until(lambda: leftovers.is_quiet(redis_client, SLUG), "nothing waits or runs")

    assert {task: {status} for task, status in fates.items()} == statuses, "all callers got the same status"
    for number, task in enumerate(tasks):
        tokens, length = tokens_of(ended(redis_client, task)), number % 10 % 3 + 1
        assert tokens == expected_tokens([1, 2, 3], length)[: len(tokens)]
        assert len(tokens) == length or fates[task] == "cancelled"
    assert leftovers.look(redis_client, SLUG) == []
