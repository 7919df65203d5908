"""An intake in one thread with a real Redis, whose prepared tasks and writes can be inspected."""

import threading

import redis

from tests.worker.workshop import new_metrics, served_model
from tokenmill.protocol.claim_order import ClaimOrder
from tokenmill.protocol.store.task_store import TaskStore
from worker.inbox import Inbox, PreparedTask
from worker.intake import Intake, PrefetchLimit
from worker.isolation import IsolatedRetries
from worker.loop import Load
from worker.ownership import OwnedTasks
from worker.preparation import ServedModel
from worker.publisher import Publisher


class Impatient(threading.Event):
    """Never waits: a test in one thread has nothing to wait for."""

    def wait(self, timeout: float | None = None) -> bool:
        return True


class Gate:
    """An intake whose prepared tasks and writes can be inspected."""

    def __init__(self, client: "redis.Redis", model: ServedModel | None = None, slots: int = 8) -> None:
        self.client = client
        self.load = Load()
        self.is_stalled = False
        self.now = 0.0
        wake = Impatient()
        self.owned_tasks = OwnedTasks(wake)
        self.inbox = Inbox()
        store = TaskStore(client)
        self.metrics = new_metrics()
        self.publisher = Publisher(
            store,
            self.owned_tasks,
            new_metrics(),
            on_lost=lambda _: None,
            on_cancelled=lambda _: None,
            on_progress=lambda ownership: self.trials.finish(ownership),
        )
        self.trials = IsolatedRetries(self.inbox, wake, lambda: self.now)
        self.intake = Intake(
            store,
            model or served_model(),
            PrefetchLimit(max_num_seqs=slots, max_num_prefill_seqs=4),
            self.owned_tasks,
            self.inbox,
            self.publisher,
            self.trials,
            self.metrics,
            worker_name="w",
            lease_seconds=60,
            order=ClaimOrder(),
            load=lambda: self.load,
            is_stalled=lambda: self.is_stalled,
            wake=wake,
        )

    def turn(self) -> list[PreparedTask]:
        self.intake.turn()
        return [message for message in self.inbox.take(0) if isinstance(message, PreparedTask)]

    def hand_back(self) -> None:
        TaskStore(self.client).hand_back(self.owned_tasks.owners())
