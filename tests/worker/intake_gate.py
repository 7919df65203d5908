"""An intake in one thread, against a real server: its arrivals and publishes can be looked at."""

import threading

import redis

from tests.worker.workshop import new_metrics, served_model
from tokenmill.protocol.claim_order import ClaimOrder
from tokenmill.protocol.store.task_store import TaskStore
from worker.inbox import Arrival, Inbox
from worker.intake import Appetite, Intake
from worker.isolation import Trials
from worker.loop import Load
from worker.ownership import Holdings
from worker.preparation import ServedModel
from worker.publisher import Publisher


class Impatient(threading.Event):
    """Nobody is waited for in a test of one thread."""

    def wait(self, timeout: float | None = None) -> bool:
        return True


class Gate:
    """An intake whose arrivals and publishes can be looked at."""

    def __init__(self, client: "redis.Redis", model: ServedModel | None = None, seats: int = 8) -> None:
        self.client = client
        self.load = Load()
        self.is_stalled = False
        self.now = 0.0
        wake = Impatient()
        self.holdings = Holdings(wake)
        self.inbox = Inbox()
        store = TaskStore(client)
        self.metrics = new_metrics()
        self.publisher = Publisher(
            store,
            self.holdings,
            new_metrics(),
            on_lost=lambda _: None,
            on_cancelled=lambda _: None,
            on_progress=lambda ownership: self.trials.finish(ownership),
        )
        self.trials = Trials(self.inbox, wake, lambda: self.now)
        self.intake = Intake(
            store,
            model or served_model(),
            Appetite(max_num_seqs=seats, max_num_prefill_seqs=4),
            self.holdings,
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

    def turn(self) -> list[Arrival]:
        self.intake.turn()
        return [message for message in self.inbox.take(0) if isinstance(message, Arrival)]

    def hand_back(self) -> None:
        TaskStore(self.client).hand_back(self.holdings.owners())
