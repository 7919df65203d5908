"""Two workers with all of their parts take turns in any order, and may die or be cut off between two calls.
Each task must end once, with the tokens of a request without faults.

The test calls `turn` of the parts of real workers, so that any part may pause for any time. A script call may
be lost on its way, or its reply on the way back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.chaos import leftovers
from tests.worker.fakes import (
    SLUG,
    build_engine,
    expected_tokens,
    new_metrics,
    served_model,
    submit,
    tokens_of,
)
from tests.worker.intake_harness import NeverWaits
from tokenmill.protocol import keys, rq_keys
from tokenmill.protocol.messages import FinishedEvent
from tokenmill.protocol.store import scripting
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import Timing
from worker.batch_worker import BatchWorker
from worker.connections import connect
from worker.context import WorkerContext
from worker.intake import Intake
from worker.leases import Leases
from worker.loop import Load, Loop
from worker.publisher import Publisher

LEASE_SECONDS = 10.0
MANY_ROUNDS = 300
FAULTS = (None, None, None, "call lost", "reply lost", "dies before", "dies after")
"""Faults of the first script call of a turn."""


class Died(BaseException):
    """As by SIGKILL: no part of the worker runs any more."""


class Wire:
    """A worker's connection to Redis. `fault`: the fault of its next script call."""

    def __init__(self, url: str) -> None:
        self.fault: str | None = None
        self._url = url
        self._clients: list[Any] = []

    def connect(self, name: str) -> Any:
        client: Any = connect(self._url, name)
        send = client.execute_command

        def execute(*args: Any, **options: Any) -> Any:
            fault = self._take_fault() if args[0] == "EVALSHA" else None
            _raise_if(fault, "call lost", "dies before")
            reply = send(*args, **options)
            _raise_if(fault, "reply lost", "dies after")
            return reply

        client.execute_command = execute
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _take_fault(self) -> str | None:
        fault, self.fault = self.fault, None
        return fault


def _raise_if(fault: str | None, lost: str, dead: str) -> None:
    if fault == lost:
        raise redis.ConnectionError("the connection broke")
    if fault == dead:
        raise Died


class WorkerHarness:
    """A worker whose parts take turns when the test calls them, and never wait."""

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        self.wire = Wire(url)
        # Two slots, and blocks for less than two of the longest: some are preempted.
        self.engine = build_engine(max_num_seqs=2, num_kv_blocks=5)
        self.context = WorkerContext(
            model=served_model(),
            connect=self.wire.connect,
            metrics=new_metrics(),
            timing=Timing(lease_seconds=LEASE_SECONDS, stall_seconds=1e9),
            wake=NeverWaits(),
            clock=clock,
            arm=lambda _: None,
        )
        self.worker = BatchWorker(self.engine, self.context)
        self.threads = self.worker.threads

    def turn(self, part: str) -> None:
        """One turn of that part, unless it would only wait. Raises RedisError and `Died`."""
        if part == "loop" and self.is_loop_idle and self.threads.loop.load == Load():
            return
        if part == "publisher" and self.threads.publisher.is_drained:
            return
        parts: dict[str, Loop | Publisher | Intake | Leases] = {
            "loop": self.threads.loop,
            "publisher": self.threads.publisher,
            "intake": self.threads.intake,
            "leases": self.threads.leases,
        }
        parts[part].turn()

    @property
    def is_loop_idle(self) -> bool:
        return not (self.engine.has_work or self.context.inbox)

    @property
    def is_idle(self) -> bool:
        return self.is_loop_idle and not self.context.owned_tasks


PARTS = ("intake", "loop", "publisher", "leases")


@dataclass
class Task:
    """A submitted task. `cancelled`: a cancel was requested."""

    prompt: list[int]
    num_tokens: int
    cancelled: bool = False


class Service(RuleBasedStateMachine):
    """Clients and two workers. A worker that dies is replaced."""

    url: str
    client: Any

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.store = TaskStore(self.client)
        self.tasks: dict[str, Task] = {}
        self.now = 0.0
        self.workers = [self.new_worker(), self.new_worker()]

    submitted = Bundle("submitted")

    def new_worker(self) -> WorkerHarness:
        return WorkerHarness(self.url, lambda: self.now)

    @rule(
        target=submitted, number=st.integers(1, 40), num_tokens=st.integers(1, 9), priority=st.integers(1, 3)
    )
    def submit(self, number: int, num_tokens: int, priority: int) -> str:
        sampling = {"max_tokens": num_tokens, "temperature": 0}
        task_id = submit(self.client, prompt_token_ids=(number,), sampling=sampling, priority=priority)
        self.tasks[task_id] = Task([number], num_tokens)
        return task_id

    @rule(which=st.integers(0, 1), part=st.sampled_from(PARTS), fault=st.sampled_from(FAULTS))
    def take_turn(self, which: int, part: str, fault: str | None) -> None:
        harness = self.workers[which]
        others = self.tasks_not_owned_by(harness)
        harness.wire.fault = fault
        try:
            harness.turn(part)
        except redis.ConnectionError:
            pass  # the thread continues with its next turn
        except Died:
            self.replace(which)
        harness.wire.fault = None
        assert {task_id: self.progress(task_id) for task_id in others} == others, "it wrote to a lost task"

    @rule(which=st.integers(0, 1), times=st.integers(1, 4))
    def work(self, which: int, times: int) -> None:
        """A while without faults, so that tasks make progress."""
        for _ in range(times):
            for part in ("intake", "loop", "publisher"):
                self.take_turn(which, part, None)

    @rule(which=st.integers(0, 1))
    def crash(self, which: int) -> None:
        self.replace(which)

    @rule(which=st.integers(0, 1), fault=st.sampled_from((None, "dies before", "dies after")))
    def drain(self, which: int, fault: str | None) -> None:
        """SIGTERM without a grace period: the worker flushes, hands back, and is replaced."""
        harness = self.workers[which]
        others = self.tasks_not_owned_by(harness)
        harness.wire.fault = fault
        try:
            harness.worker.shut_down()
        except Died:
            pass
        else:
            held = harness.context.owned_tasks.owners()
            assert not [task_id for task_id, owner in held.items() if self.owner(task_id) == owner]
        assert {task_id: self.progress(task_id) for task_id in others} == others, "it wrote to a lost task"
        self.replace(which)

    @rule()
    def lapse(self) -> None:
        """No worker renews for the length of a lease: all leases lapse."""
        self.now += LEASE_SECONDS
        for task_id in self.client.zrange(keys.LEASES, 0, -1):
            self.client.zadd(keys.LEASES, {task_id: 1})

    @rule(task_id=submitted)
    def cancel(self, task_id: str) -> None:
        """No listener receives it: each part must find out by itself."""
        assert self.store.cancel(task_id) in ("cancelled", "completed")
        self.tasks[task_id].cancelled = True

    @invariant()
    def every_log_is_a_prefix_of_the_expected_output(self) -> None:
        for task_id, task in self.tasks.items():
            events = self.store.read_log(task_id)
            tokens = tokens_of(events)
            assert [event.seq for event in events] == list(range(len(events)))
            assert tokens == expected_tokens(task.prompt, task.num_tokens)[: len(tokens)]
            ends = [event for event in events if isinstance(event, FinishedEvent)]
            assert ends == events[len(tokens) :], "nothing follows the end"
            assert len(ends) == (self.field(task_id, "terminal") is not None)

    @invariant()
    def every_task_is_waiting_or_owned_or_ended(self) -> None:
        for task_id in self.tasks:
            queue = self.field(task_id, "queue")
            states = (
                self.client.zscore(keys.order(str(queue)), task_id) is not None,
                self.owner(task_id) is not None,
                self.field(task_id, "terminal") is not None,
            )
            assert sum(states) == 1, states
            assert (self.client.zscore(keys.LEASES, task_id) is not None) is states[1]

    def teardown(self) -> None:
        """Without more faults everything ends, and nothing is left over in Redis or in a worker."""
        try:
            self.lapse()
            for _ in range(MANY_ROUNDS):
                for which, part in ((which, part) for which in (0, 1) for part in PARTS):
                    self.take_turn(which, part, None)
                if leftovers.is_quiet(self.client, SLUG) and all(harness.is_idle for harness in self.workers):
                    break
            self.check_the_end()
        finally:
            for harness in self.workers:
                harness.wire.close()

    def check_the_end(self) -> None:
        self.every_log_is_a_prefix_of_the_expected_output()
        for task_id, task in self.tasks.items():
            status = self.field(task_id, "terminal")
            assert status in (("completed", "cancelled") if task.cancelled else ("completed",))
            if status == "completed":
                tokens = tokens_of(self.store.read_log(task_id))
                assert tokens == expected_tokens(task.prompt, task.num_tokens)
            assert self.client.xlen(rq_keys.results(task_id)) == (status == "completed")
        assert leftovers.look(self.client, SLUG) == []
        assert all(harness.is_idle for harness in self.workers)

    def tasks_not_owned_by(self, harness: WorkerHarness) -> dict[str, tuple[int, str | None]]:
        """The progress of the tasks that this worker does not own, whatever it believes."""
        held = harness.context.owned_tasks.owners()
        return {
            task_id: self.progress(task_id)
            for task_id in self.tasks
            if (owner := self.owner(task_id)) is None or held.get(task_id) != owner
        }

    def progress(self, task_id: str) -> tuple[int, str | None]:
        return self.client.xlen(keys.log(task_id)), self.field(task_id, "terminal")

    def replace(self, which: int) -> None:
        self.workers[which].wire.close()
        self.workers[which] = self.new_worker()

    def owner(self, task_id: str) -> str | None:
        return self.field(task_id, "owner")

    def field(self, task_id: str, name: str) -> str | None:
        value = self.client.hget(keys.run(task_id), name)
        return None if value is None else value.decode()


@pytest.mark.parametrize("steps", [40])
def test_any_order_of_turns(
    redis_url: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    # Hundreds of workers are created here, each with several stores. The scripts are read once.
    monkeypatch.setattr(scripting, "_read", cache(scripting._read))
    monkeypatch.setattr("worker.leases.MAX_BEAT_SECONDS", 0.0)
    service = type("Service", (Service,), {"url": redis_url, "client": redis_client})
    run_state_machine_as_test(
        service,
        settings=settings(
            max_examples=25,
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
        ),
    )
