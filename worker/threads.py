"""Starts the worker's threads and stops them in order. Each thread has its own Redis client."""

import time
from collections.abc import Callable

import structlog

from worker.context import WorkerContext
from worker.intake import Intake
from worker.leases import Leases
from worker.listener import Listener
from worker.loop import Loop, SteppingEngine
from worker.publisher import Publisher
from worker.registration import Registration
from worker.service import Service
from worker.watchdog import Observers

_log = structlog.get_logger(__name__)

RETRY_SECONDS = 0.5


class WorkerThreads:
    """Five threads: loop, publisher, leases, listener, intake."""

    def __init__(self, engine: SteppingEngine, context: WorkerContext) -> None:
        self._context = context
        clients = {
            name: context.connect(name) for name in ("main", "publisher", "intake", "leases", "listener")
        }
        stores = {name: context.new_store(client) for name, client in clients.items()}
        self._clients = clients
        self._store = stores["main"]
        self.loop = _new_loop(engine, context)
        self.publisher = Publisher(stores["publisher"], context, clients["publisher"])
        self.registration = Registration(context, engine.config.max_num_seqs, self.loop, self.publisher)
        self.intake = Intake(stores["intake"], context, engine.config, self.loop)
        self.leases = Leases(stores["leases"], context, self.registration)
        self.listener = Listener(clients["listener"], stores["listener"], context)
        turns: dict[str, Callable[[], None]] = {
            "loop": self.loop.turn,
            "publisher": self.publisher.turn,
            "leases": self.leases.turn,
            "listener": self.listener.turn,
            "intake": self.intake.turn,
        }
        self.services = {
            name: Service(name, turn, context, clients.get(name)) for name, turn in turns.items()
        }
        # The loop itself ticks the watchdog.
        context.watchdog.watch([self.services[name] for name in turns if name != "loop"])

    def start(self) -> None:
        for service in self.services.values():
            service.start()

    def stop_claiming(self) -> None:
        self.services["intake"].stop()
        self._context.isolation.close()
        self._context.wake.set()

    @property
    def has_work(self) -> bool:
        """Whether a task is owned that may still end, or a claim in progress may add one."""
        num_startable = len(self._context.owned_tasks) - self._context.isolation.num_waiting
        return num_startable > 0 or not self.services["intake"].join(0)

    def stop_stepping(self, seconds: float, *, claim_seconds: float) -> None:
        """Wait up to `seconds` for the current step and, meanwhile, up to `claim_seconds` for a claim.

        Results of a step that takes longer are not stored. Tasks of a claim that takes longer return to the
        queue when their leases lapse.
        """
        deadline = self._context.clock() + seconds
        self.stop_claiming()
        self.services["loop"].stop()
        self.services["intake"].join(claim_seconds)
        if not self.services["loop"].join(deadline - self._context.clock()):
            _log.warning("stopping without waiting for the current step")

    def flush(self, seconds: float) -> None:
        """Stop the publisher and store what it still holds, as far as Redis accepts it within `seconds`."""
        deadline = self._context.clock() + seconds
        self.services["publisher"].stop()
        if self.services["publisher"].join(seconds):
            while not self.publisher.is_drained and self._context.clock() < deadline:
                self._try(self.publisher.turn)

    def hand_back(self, seconds: float, *, crashed: bool) -> None:
        """Return owned tasks to the front of their queues. If Redis is away, their leases lapse instead.

        `crashed`: one of the tasks may have caused this worker to end.
        """
        owners = self._context.owned_tasks.owners()
        deadline = self._context.clock() + seconds
        if crashed:
            # A later renewal would show the owners alive and undo the record of the crash.
            self.services["leases"].stop()
            self.services["leases"].join(seconds)

        def hand_back_once() -> None:
            self._context.metrics.handed_back(self._store.hand_back(owners, crashed=crashed))

        while owners and self._context.clock() < deadline:
            if self._try(hand_back_once):
                _log.info("unfinished tasks returned to the queue", count=len(owners))
                return

    def stop(self, seconds: float) -> None:
        """Stop the other threads. All are daemons, so one that takes longer is abandoned."""
        for name in ("leases", "listener"):
            self.services[name].stop()
        self.services["leases"].join(seconds)
        # `hand_back` and `flush` used these in the main thread. The other threads close their own clients.
        self._clients["main"].close()
        if self.services["publisher"].join(0):
            self._clients["publisher"].close()

    def _try(self, call: Callable[[], object]) -> bool:
        """Return whether `call` succeeded. No error may keep a stopping worker from its next step."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - see above
            self._context.metrics.redis_error("shutdown")
            _log.warning("a step of the shutdown failed", error=f"{type(error).__name__}: {error}")
            time.sleep(RETRY_SECONDS)
            return False
        return True


def _new_loop(engine: SteppingEngine, context: WorkerContext) -> Loop:
    return Loop(
        engine,
        context.inbox,
        context.outputs,
        context.owned_tasks,
        observers=Observers(context.observers, context.metrics),
        watchdog=context.watchdog,
        clock=context.clock,
        wake=context.wake,
        wants_lanes=context.steps.wants_lanes,
    )
