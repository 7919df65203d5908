"""Two workers with all of their parts, in any order of turns, and whoever dies or is cut off between two
calls: each task ends once, with the tokens of a request that nothing happened to.

The parts of a real worker take their turns by hand here, so that any of them may stand still for as long as
it takes the others to do anything. A call of a script may be lost on its way, or its reply on the way back.
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
from tests.worker.intake_gate import NeverWaits
from tests.worker.workshop import (
    SLUG,
    build_engine,
    new_metrics,
    served_model,
    submit,
    tokens_of,
    undisturbed,
)
from tokenmill.protocol import keys, rq_keys
from tokenmill.protocol.messages import FinishedEvent
from tokenmill.protocol.store import scripting
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.processes import Timing
from worker.batch_worker import BatchWorker
from worker.connections import connect
from worker.context import WorkerContext
from worker.intake import Intake
from worker.leases import Leases
from worker.loop import Load, Loop
from worker.publisher import Publisher

LEASE_SECONDS = 10.0
MANY_ROUNDS = 300
MISHAPS = (None, None, None, "unsent", "unheard", "dies before", "dies after")
"""What happens to the first script call of a turn."""


class Died(BaseException):
    """As SIGKILL: nothing of the worker runs any more."""


class Wire:
    """A worker's way to Redis. `mishap`: what happens to its next script call."""

    def __init__(self, url: str) -> None:
        self.mishap: str | None = None
        self._url = url
        self._clients: list[Any] = []

    def connect(self, name: str) -> Any:
        client = connect(self._url, name)
        send = client.execute_command

        def execute(*args: Any, **options: Any) -> Any:
            mishap = self._take_mishap() if args[0] == "EVALSHA" else None
            _strike(mishap, "unsent", "dies before")
            reply = send(*args, **options)
            _strike(mishap, "unheard", "dies after")
            return reply

        client.execute_command = execute
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _take_mishap(self) -> str | None:
        mishap, self.mishap = self.mishap, None
        return mishap


def _strike(mishap: str | None, lost: str, dead: str) -> None:
    if mishap == lost:
        raise redis.ConnectionError("the connection broke")
    if mishap == dead:
        raise Died


class Hand:
    """A worker whose parts take their turns when told, and never wait."""

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
        """One turn of that thread; none where it would only wait. Raises RedisError, `Died`."""
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
    """What was asked for. `cancelled`: somebody asked for its end."""

    prompt: list[int]
    num_tokens: int
    cancelled: bool = False


class Service(RuleBasedStateMachine):
    """Clients and two workers; one that dies is followed by another."""

    url: str
    client: "redis.Redis"

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.store = TaskStore(self.client)
        self.tasks: dict[str, Task] = {}
        self.now = 0.0
        self.hands = [self.new_hand(), self.new_hand()]

    submitted = Bundle("submitted")

    def new_hand(self) -> Hand:
        return Hand(self.url, lambda: self.now)

    @rule(
        target=submitted, number=st.integers(1, 40), num_tokens=st.integers(1, 9), priority=st.integers(1, 3)
    )
    def submit(self, number: int, num_tokens: int, priority: int) -> str:
        sampling = {"max_tokens": num_tokens, "temperature": 0}
        task_id = submit(self.client, prompt_token_ids=(number,), sampling=sampling, priority=priority)
        self.tasks[task_id] = Task([number], num_tokens)
        return task_id

    @rule(which=st.integers(0, 1), part=st.sampled_from(PARTS), mishap=st.sampled_from(MISHAPS))
    def take_turn(self, which: int, part: str, mishap: str | None) -> None:
        hand = self.hands[which]
        others = self.what_is_not_of(hand)
        hand.wire.mishap = mishap
        try:
            hand.turn(part)
        except redis.ConnectionError:
            pass  # the thread goes on with its next turn
        except Died:
            self.replace(which)
        hand.wire.mishap = None
        assert {task_id: self.told(task_id) for task_id in others} == others, "it wrote what it had lost"

    @rule(which=st.integers(0, 1), times=st.integers(1, 4))
    def work(self, which: int, times: int) -> None:
        """Nothing happens for a while, so that tasks also come along."""
        for _ in range(times):
            for part in ("intake", "loop", "publisher"):
                self.take_turn(which, part, None)

    @rule(which=st.integers(0, 1))
    def crash(self, which: int) -> None:
        self.replace(which)

    @rule(which=st.integers(0, 1), mishap=st.sampled_from((None, "dies before", "dies after")))
    def drain(self, which: int, mishap: str | None) -> None:
        """SIGTERM without grace: flushes, hands back, and another comes."""
        hand = self.hands[which]
        others = self.what_is_not_of(hand)
        hand.wire.mishap = mishap
        try:
            hand.worker.shut_down()
        except Died:
            pass
        else:
            held = hand.context.owned_tasks.owners()
            assert not [task_id for task_id, owner in held.items() if self.owner(task_id) == owner]
        assert {task_id: self.told(task_id) for task_id in others} == others, "it wrote what it had lost"
        self.replace(which)

    @rule()
    def lapse(self) -> None:
        """Nobody renews for longer than a lease: all of them have run out."""
        self.now += LEASE_SECONDS
        for task_id in self.client.zrange(keys.LEASES, 0, -1):
            self.client.zadd(keys.LEASES, {task_id: 1})

    @rule(task_id=submitted)
    def cancel(self, task_id: str) -> None:
        """Nobody hears of it: each part must find out by itself."""
        assert self.store.cancel(task_id) in ("cancelled", "completed")
        self.tasks[task_id].cancelled = True

    @invariant()
    def every_log_is_the_beginning_of_the_undisturbed_one(self) -> None:
        for task_id, task in self.tasks.items():
            events = self.store.read_log(task_id)
            tokens = tokens_of(events)
            assert [event.seq for event in events] == list(range(len(events)))
            assert tokens == undisturbed(task.prompt, task.num_tokens)[: len(tokens)]
            ends = [event for event in events if isinstance(event, FinishedEvent)]
            assert ends == events[len(tokens) :], "nothing comes after the end"
            assert len(ends) == (self.field(task_id, "terminal") is not None)

    @invariant()
    def every_task_is_in_one_place(self) -> None:
        for task_id in self.tasks:
            queue = self.field(task_id, "queue")
            places = (
                self.client.zscore(keys.order(str(queue)), task_id) is not None,
                self.owner(task_id) is not None,
                self.field(task_id, "terminal") is not None,
            )
            assert sum(places) == 1, places
            assert (self.client.zscore(keys.LEASES, task_id) is not None) is places[1]

    def teardown(self) -> None:
        """All is calm from here on: everything ends, and nothing is left over, in Redis or in a worker."""
        try:
            self.lapse()
            for _ in range(MANY_ROUNDS):
                for which, part in ((which, part) for which in (0, 1) for part in PARTS):
                    self.take_turn(which, part, None)
                if leftovers.is_quiet(self.client, SLUG) and all(hand.is_idle for hand in self.hands):
                    break
            self.check_the_end()
        finally:
            for hand in self.hands:
                hand.wire.close()

    def check_the_end(self) -> None:
        self.every_log_is_the_beginning_of_the_undisturbed_one()
        for task_id, task in self.tasks.items():
            status = self.field(task_id, "terminal")
            assert status in (("completed", "cancelled") if task.cancelled else ("completed",))
            if status == "completed":
                tokens = tokens_of(self.store.read_log(task_id))
                assert tokens == undisturbed(task.prompt, task.num_tokens)
            assert self.client.xlen(rq_keys.results(task_id)) == (status == "completed")
        assert leftovers.look(self.client, SLUG) == []
        assert all(hand.is_idle for hand in self.hands)

    def what_is_not_of(self, hand: Hand) -> dict[str, tuple[int, str | None]]:
        """Tasks that this worker does not own, whatever it believes, and how far they are."""
        held = hand.context.owned_tasks.owners()
        return {
            task_id: self.told(task_id)
            for task_id in self.tasks
            if (owner := self.owner(task_id)) is None or held.get(task_id) != owner
        }

    def told(self, task_id: str) -> tuple[int, str | None]:
        return self.client.xlen(keys.log(task_id)), self.field(task_id, "terminal")

    def replace(self, which: int) -> None:
        self.hands[which].wire.close()
        self.hands[which] = self.new_hand()

    def owner(self, task_id: str) -> str | None:
        return self.field(task_id, "owner")

    def field(self, task_id: str, name: str) -> str | None:
        value = self.client.hget(keys.run(task_id), name)
        return None if value is None else value.decode()


@pytest.mark.parametrize("steps", [40])
def test_any_order_of_turns(
    redis_url: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    # Hundreds of workers are made here, each with several stores; the texts of the scripts stay the same.
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
