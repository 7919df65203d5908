"""The worker's threads, and who of them tells whom what. Each has a client of its own.

Law: threads speak through queues, events and values; a task that is lost or cancelled is dropped everywhere,
by one function. Decides nothing about when to start or to stop.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from monitoring.worker import WorkerMetrics
from tokenmill.process.redis_outages import OutageLog
from tokenmill.protocol.claim_order import ClaimOrder
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.processes import Timing
from worker.connections import Connect
from worker.inbox import Cancel, Discard, Inbox
from worker.intake import Intake, PrefetchLimit
from worker.isolation import IsolatedRetries
from worker.leases import Leases
from worker.listener import Listener
from worker.loop import Loop, SteppingEngine
from worker.ownership import OwnedTasks, Ownership
from worker.preparation import ServedModel
from worker.publisher import Publisher
from worker.service import Service
from worker.watchdog import Observer, Observers, Watchdog, arm_watchdog

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
TROUBLE_SECONDS = 10.0
"""A thread that does its work has done some of it in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a worker is given from outside: where Redis is, what time it is, who looks on.

    `connect` makes a Redis client for a thread. `fair_sharing`: claims are shared fairly between tenants.
    `clock`: seconds that never go back. `arm`: ends the process unless called again within so many seconds.
    """

    connect: Connect
    metrics: WorkerMetrics
    timing: Timing = field(default_factory=Timing)
    fair_sharing: bool = True
    observers: Sequence[Observer] = ()
    clock: Callable[[], float] = time.monotonic
    arm: Callable[[float], None] = arm_watchdog


class WorkerThreads:
    """Five threads: loop, intake, publisher, leases, listener.

    `announce` is called at each beat of the leases; `on_shutdown` when RQ's command to stop comes;
    `on_failure` with the name and the exception of a thread that ended without being told to.
    """

    def __init__(
        self,
        engine: SteppingEngine,
        model: ServedModel,
        given: WorkerContext,
        *,
        worker_name: str,
        announce: Callable[[], None],
        on_shutdown: Callable[[], None],
        on_failure: Callable[[str, BaseException], None],
    ) -> None:
        self._context = given
        self._model = model
        self._worker_name = worker_name
        self._on_failure = on_failure
        self._wake = threading.Event()
        self._outages = OutageLog(logger, "worker", given.clock)
        self._inbox = Inbox()
        self._store = self._store_of(given.connect("main"))
        self.owned_tasks = OwnedTasks(self._wake)
        self.trials = IsolatedRetries(self._inbox, self._wake, given.clock)
        self.watchdog = Watchdog(
            given.timing.stall_seconds,
            given.clock,
            on_tick=given.metrics.tick,
            is_hanging=lambda: any(one.hangs(given.timing.stall_seconds) for one in self._services),
            arm=given.arm,
        )
        publishing, claiming, leasing = (given.connect(name) for name in ("publisher", "intake", "leases"))
        listening = given.connect("listener")
        self.publisher = Publisher(
            self._store_of(publishing),
            self.owned_tasks,
            given.metrics,
            on_lost=self._lose,
            on_cancelled=self._cancel,
            on_progress=self.trials.finish,
        )
        self.loop = self._make_loop(engine)
        self._publisher_service = self._serve("publisher", self.publisher.turn, publishing)
        self._loop_service = self._serve("loop", self.loop.turn, None)
        self._intake_service = self._serve("intake", self._make_intake(engine, claiming).turn, claiming)
        self._leases_service = self._serve("leases", self._make_leases(leasing, announce).turn, leasing)
        self._listener_service = self._serve(
            "listener", self._make_listener(listening, on_shutdown).turn, listening
        )

        # The loop has ticks for that.
        self._services = (
            self._leases_service,
            self._publisher_service,
            self._listener_service,
            self._intake_service,
        )

    def start(self) -> None:
        for service in (self._loop_service, *self._services):
            service.start()

    @property
    def trouble(self) -> str:
        """Which threads have got nothing done for a while; "" where all is well."""
        names = [service.name for service in self._services if service.fails(TROUBLE_SECONDS)]
        return f"nothing comes of: {', '.join(names)}" if names else ""

    def stop_claiming(self) -> None:
        self._intake_service.stop()
        self.trials.close()
        self._wake.set()

    @property
    def has_work(self) -> bool:
        """Something is held that may end, or a claim under way may bring something."""
        return len(self.owned_tasks) > self.trials.num_waiting or not self._intake_service.join(0)

    def stop_stepping(self, seconds: float, *, claim_seconds: float) -> None:
        """Wait so long for the step and the claim under way, at one time. Of a later step nothing is stored;
        what a later claim takes comes back when its lease lapses.
        """
        began = self._context.clock()
        self.stop_claiming()
        self._loop_service.stop()
        self._intake_service.join(claim_seconds)
        if not self._loop_service.join(began + seconds - self._context.clock()):
            logger.warning("the step under way is not waited for")

    def flush(self, seconds: float) -> None:
        """Store what was said, as far as Redis takes it in time, and stop the publisher."""
        self._publisher_service.stop()
        deadline = self._context.clock() + seconds
        if self._publisher_service.join(seconds):
            while not self.publisher.is_drained and self._context.clock() < deadline:
                self._try(self.publisher.turn)

    def hand_back(self, seconds: float, *, crashed: bool) -> None:
        """Put what is still held to the front of its queues. Without Redis, leases lapse instead.

        `crashed`: what is held may be to blame for the end of this worker.
        """
        owners = self.owned_tasks.owners()
        deadline = self._context.clock() + seconds
        if crashed:
            # A beat after it would say that these owners live, and take the crash back.
            self._leases_service.stop()
            self._leases_service.join(seconds)

        def put_back() -> None:
            self._context.metrics.handed_back(self._store.hand_back(owners, crashed=crashed))

        while owners and self._context.clock() < deadline:
            if self._try(put_back):
                logger.info("handed back: %d unfinished requests", len(owners))
                return

    def stop(self, seconds: float) -> None:
        """Everything else. The threads are daemons: one that hangs for longer is left behind."""
        for service in (self._leases_service, self._listener_service):
            service.stop()
        self._leases_service.join(seconds)

    def _lose(self, ownership: Ownership) -> None:
        """Another has it now, or nobody. If it was cancelled before, that has dropped it already."""
        if self.owned_tasks.drop(ownership):
            self._context.metrics.lost(1)
            self._inbox.put(Discard(ownership))
        self.publisher.forget(ownership.request_id)
        self.trials.finish(ownership)

    def _cancel(self, ownership: Ownership) -> None:
        """Its end is told already. The engine tells the end once more, for the numbers."""
        self.owned_tasks.drop(ownership)
        self._inbox.put(Cancel(ownership))
        self.publisher.forget(ownership.request_id)
        self.trials.finish(ownership)

    def _try(self, call: Callable[[], object]) -> bool:
        """Whether it worked. While the worker stops, nothing may keep it from the next thing to do."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - see above
            self._context.metrics.redis_error("shutdown")
            logger.warning("while the worker stops: %s: %s", type(error).__name__, error)
            time.sleep(RETRY_SECONDS)
            return False
        return True

    def _store_of(self, client: Any) -> TaskStore:
        return TaskStore(client, retention_seconds=self._context.timing.retention_seconds)

    def _serve(self, name: str, turn: Callable[[], None], client: Any) -> Service:
        return Service(
            name,
            turn,
            client=client,
            on_redis_error=self._context.metrics.redis_error,
            on_failure=self._on_failure,
            clock=self._context.clock,
            outages=self._outages,
        )

    def _make_loop(self, engine: SteppingEngine) -> Loop:
        return Loop(
            engine,
            self._inbox,
            self.publisher,
            self.owned_tasks,
            observers=Observers(self._context.observers, self._context.metrics.observer_error),
            watchdog=self.watchdog,
            clock=self._context.clock,
            wake=self._wake,
        )

    def _make_intake(self, engine: SteppingEngine, client: Any) -> Intake:
        config = engine.config
        return Intake(
            self._store_of(client),
            self._model,
            PrefetchLimit(max_num_seqs=config.max_num_seqs, max_num_prefill_seqs=config.prefill_seqs_limit),
            self.owned_tasks,
            self._inbox,
            self.publisher,
            self.trials,
            self._context.metrics,
            worker_name=self._worker_name,
            lease_seconds=self._context.timing.lease_seconds,
            order=ClaimOrder(
                ageing_seconds=config.ageing_seconds,
                max_waiting_seconds=config.max_waiting_seconds,
                fair_sharing=self._context.fair_sharing,
            ),
            load=lambda: self.loop.load,
            is_stalled=lambda: self.watchdog.is_stalled,
            wake=self._wake,
        )

    def _make_leases(self, client: Any, announce: Callable[[], None]) -> Leases:
        return Leases(
            self._store_of(client),
            self.owned_tasks,
            self.watchdog,
            self._context.metrics,
            slug=self._model.slug,
            lease_seconds=self._context.timing.lease_seconds,
            max_task_seconds=self._context.timing.max_task_seconds,
            announce=announce,
            on_lost=self._lose,
            on_cancelled=self._cancel,
            phases=lambda owners: self.trials.phases(owners, self.publisher.idle_ids),
            clock=self._context.clock,
            wait=time.sleep,
        )

    def _make_listener(self, client: Any, on_shutdown: Callable[[], None]) -> Listener:
        return Listener(
            client,
            self._store_of(client),
            self.owned_tasks,
            slug=self._model.slug,
            worker_name=self._worker_name,
            wake=self._wake,
            on_cancel=self._cancel,
            on_shutdown=on_shutdown,
        )
