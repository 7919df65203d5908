"""A loop with a scripted engine, without threads or Redis."""

import threading
from typing import Any

from engine.config import EngineConfig
from engine.engine import RequestPosition
from engine.outputs import SequenceOutput, StepOutput, StepReport, WaitingReason
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.worker.fakes import new_metrics
from tokenmill.protocol.messages import TaskError
from worker.inbox import Inbox, PreparedTask, Quiesce, RetryIsolated
from worker.loop import Loop
from worker.ownership import OwnedTasks, Ownership
from worker.watchdog import Observers, Watchdog

A, B = Ownership("a", "o1"), Ownership("b", "o2")


class ScriptedEngine:
    """Runs requests until they are cancelled or discarded."""

    config = EngineConfig(max_model_len=10, num_kv_blocks=10)

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.live: list[str] = []
        self.add_error: Exception | None = None
        self.fault: Exception | None = None
        self.num_waiting = 0
        self.is_compiling = False
        self.records_lanes = False

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    @property
    def num_running(self) -> int:
        return len(self.live)

    def add(self, request: EngineRequest) -> None:
        if self.add_error:
            raise self.add_error
        self.calls.append(("add", request.request_id))
        self.live.append(request.request_id)

    def cancel(self, request_id: str) -> bool:
        self.calls.append(("cancel", request_id))
        return self._drop(request_id)

    def discard(self, request_id: str) -> bool:
        self.calls.append(("discard", request_id))
        return self._drop(request_id)

    def _drop(self, request_id: str) -> bool:
        found = request_id in self.live
        self.live = [one for one in self.live if one != request_id]
        return found

    def has_request(self, request_id: str) -> bool:
        return request_id in self.live

    def step(self, isolate_request_id: str | None = None) -> StepOutput:
        if self.fault:
            raise self.fault
        stepped = [one for one in self.live if isolate_request_id in (None, one)]
        self.calls.append(("step", ",".join(stepped)))
        outputs = tuple(SequenceOutput(request_id=one, token_id=1) for one in stepped)
        return StepOutput(outputs=outputs, started=tuple(stepped), report=StepReport(step=len(self.calls)))

    def drain(self) -> None:
        self.calls.append(("drain", ""))

    def request_positions(self) -> list[RequestPosition]:
        one = RequestPosition(
            request_id="w", requests_ahead=0, tokens_ahead=3, reason=WaitingReason.TOKEN_BUDGET
        )
        return [one] * self.num_waiting


class OutputSink:
    def __init__(self) -> None:
        self.is_full = False
        self.steps: list[StepOutput] = []
        self.positions: list[list[RequestPosition]] = []
        self.failed: dict[str, TaskError] = {}
        self.num_waits = 0

    def put(self, output: StepOutput) -> None:
        self.steps.append(output)

    def put_positions(self, positions: list[RequestPosition]) -> None:
        self.positions.append(positions)

    def fail(self, request_id: str, error: TaskError) -> None:
        self.failed[request_id] = error

    def wait_for_room(self, seconds: float) -> None:
        self.num_waits += 1


class Bench:
    """A loop and the parts it uses."""

    def __init__(self, *observers: Any) -> None:
        self.now = 0.0
        self.armed: list[float] = []
        self.metrics = new_metrics()
        self.engine, self.sink, self.inbox = ScriptedEngine(), OutputSink(), Inbox()
        self.wake = threading.Event()
        self.owned_tasks = OwnedTasks(self.wake)
        self.watchdog = Watchdog(60.0, self.clock, self.metrics, arm=self.armed.append)
        self.loop = Loop(
            self.engine,
            self.inbox,
            self.sink,
            self.owned_tasks,
            observers=Observers(observers, self.metrics),
            watchdog=self.watchdog,
            clock=self.clock,
            wake=self.wake,
        )

    def clock(self) -> float:
        return self.now

    def arrive(self, ownership: Ownership, prompt_field: str = "prompt") -> None:
        self.owned_tasks.add(ownership)
        self.inbox.put(prepared_task(ownership, prompt_field))

    def quiesce(self, ownership: Ownership) -> threading.Event:
        self.owned_tasks.add(ownership)
        heard = threading.Event()
        self.inbox.put(Quiesce(ownership, heard))
        return heard

    def retry(self, ownership: Ownership) -> None:
        self.inbox.put(RetryIsolated(ownership, lambda: prepared_task(ownership)))

    @property
    def stepped(self) -> list[str]:
        return [who for what, who in self.engine.calls if what == "step"]


def prepared_task(ownership: Ownership, prompt_field: str = "prompt") -> PreparedTask:
    request = EngineRequest(ownership.request_id, [1], SamplingParams(), arrival_time=1.0)
    return PreparedTask(ownership, request, prompt_field=prompt_field)
