"""One run of a batch: from where it stands to its end, or until it is returned.

Invariants: a runner may be killed at any moment. The next one starts from what is recorded: the phase of the
batch, the lines that are done, and the segments with their results. It submits the other lines again, under
the same task ids, so it finds their tasks where these exist. At most a window of tasks is in Redis.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from api.batches.input_lines import Line, LineError, Validation, parse_line, read_lines
from api.batches.line_calls import LineTasks, line_tasks, problem_result, result_of, unanswered
from api.batches.results import ResultBuffer, join
from api.file_storage import FileStorage
from api.problems import Problem
from api.request_checks import check_request
from api.schemas.requests import TaskBody
from api.shutdown import Shutdown
from api.submission import Submitter
from api.tool_calls.formats import DEFAULT_FORMAT
from tokenmill.protocol.batch_records import Batch, FileRecord, Segment
from tokenmill.protocol.records import ModelCard
from tokenmill.protocol.store.batch_store import LEASE_SECONDS, BatchLost, BatchStore, Progress, is_done
from tokenmill.protocol.store.file_index import FileIndex
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

MIN_WINDOW = 32
WINDOW_SECONDS = 10.0
"""How long the size of the window is kept before the workers are counted again."""
RENEW_SECONDS = LEASE_SECONDS / 5
SLICE_SECONDS = 60.0
"""A batch is returned after this time if others wait for a runner."""
POLL_SECONDS = 0.1
REACH_LINES = 1024
_TOO_MANY_REQUESTS = 429
_EXPIRED = "This request could not be executed before the completion window expired."


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchParts:
    """What a run needs."""

    settings: ApiSettings
    batches: BatchStore
    files: FileIndex
    storage: FileStorage
    tasks: TaskStore
    submitter: Submitter
    shutdown: Shutdown


class Returned(Exception):
    """The batch is given back: others wait, or the process ends."""


class BatchRun:
    """A batch that this runner has taken as `owner`."""

    def __init__(self, parts: BatchParts, batch: Batch, owner: str) -> None:
        self._parts = parts
        self._batch = batch
        self._request = batch.request
        self._owner = owner
        self._started = time.monotonic()
        self._renewed = self._started
        self._is_cancelled = "cancelling_at" in batch.times
        self._reach = batch.reach
        self._window = Window(parts)
        self._retry_at = 0.0
        self._num_waiting = 0

    def run(self) -> None:
        """Raises `Returned` if the batch has not ended, `BatchLost`, errors of Redis, and `OSError`."""
        try:
            status = self._batch.status
            if status == "validating":
                status = self._validate()
            if status == "in_progress":
                status = self._execute()
            if status == "finalizing":
                self._finalize()
        except FileNotFoundError:
            self._fail([LineError(code="file_not_found", message="Stored content of the batch is missing.")])

    # Recording.

    def _update(self, progress: Progress) -> None:
        updated = self._parts.batches.update(self._request.id, self._owner, progress)
        self._is_cancelled = updated.is_cancelled
        self._num_waiting = updated.num_waiting
        self._renewed = time.monotonic()

    def _renew(self) -> None:
        """Renew the lease if it is time. Raises `Returned` if this process ends."""
        if time.monotonic() - self._renewed >= RENEW_SECONDS:
            self._update(Progress())

    def _record(self) -> None:
        """Record the results that were collected. Their tasks are no longer needed then."""
        if self._buffer.is_empty:
            return
        self._update(self._buffer.store())
        for task_id in self._buffer.clear():
            self._parts.tasks.erase(task_id)

    # Validation.

    def _validate(self) -> str:
        """Check the whole input. Returns the next status, or ends the batch as failed."""
        validation = Validation(self._request.endpoint, self._parts.settings.public_model)
        try:
            for line in self._lines():
                validation.add(line)
                if validation.is_over:
                    break
                self._renew()
                if self._is_cancelled:
                    return self._enter("finalizing", outcome="cancelled")
        except LineError as error:
            validation.errors.append(error)
        validation.finish()
        if validation.errors:
            return self._fail(validation.errors)
        return self._enter("in_progress", total=validation.total)

    def _fail(self, errors: Sequence[LineError]) -> str:
        self._finish("failed", errors=json.dumps([error.to_json() for error in errors]))
        return "failed"

    def _enter(self, status: str, **fields: str | int) -> str:
        now = time.time()
        self._update(Progress(fields={"status": status, f"{status}_at": now, **fields}))
        return status

    def _lines(self) -> Iterator[Line]:
        with self._parts.storage.open(self._request.input_file_id) as file:
            yield from read_lines(file, self._parts.settings.max_body_bytes)

    # Execution.

    def _execute(self) -> str:
        """Run the lines that are not done. Returns the next status."""
        batches = self._parts.batches
        self._done = batches.done_lines(self._request.id)
        self._buffer = ResultBuffer(
            self._parts.storage, self._request.id, len(batches.segments(self._request.id))
        )
        self._card = self._parts.tasks.model_card(self._parts.settings.slug)
        self._in_flight: dict[int, LineTasks] = {}
        lines = self._pending_lines()
        self._next: LineTasks | None = None
        outcome = "completed"
        while not self._is_over():
            exhausted = not self._fill(lines)
            collected = self._collect()
            if self._buffer.is_due:
                self._record()
            self._renew()
            if exhausted and not self._in_flight:
                break
            self._give_way()
            if not collected:
                time.sleep(POLL_SECONDS)
        else:
            outcome = "cancelled" if self._is_cancelled else "expired"
            self._abandon(outcome)
        self._record()
        return self._enter("finalizing", outcome=outcome)

    def _is_over(self) -> bool:
        return self._is_cancelled or time.time() >= self._request.expires_at

    def _give_way(self) -> None:
        """Raises `Returned` if this process ends, or if others have waited long enough."""
        is_due = self._num_waiting and time.monotonic() - self._started >= SLICE_SECONDS
        if self._parts.shutdown.requested or is_due:
            self._record()
            raise Returned

    def _pending_lines(self) -> Iterator[Line]:
        return (line for line in self._lines() if not is_done(self._done, line.number))

    def _fill(self, lines: Iterator[Line]) -> bool:
        """Submit lines until the window or the queue is full. Returns whether there are more."""
        while self._num_tasks() < self._window.size() and not self._buffer.is_due:
            if self._next is None:
                line = next(lines, None)
                if line is None:
                    return False
                self._next = self._read(line)
            if self._next is None:
                # A line that its endpoint refuses has its result already.
                continue
            if not self._submit(self._next):
                return True
            self._in_flight[self._next.number] = self._next
            self._next = None
            self._renew()
        return True

    def _num_tasks(self) -> int:
        return sum(len(line.task_ids) for line in self._in_flight.values())

    def _read(self, line: Line) -> LineTasks | None:
        """The tasks of a line; None for one that is refused, whose result is then added."""
        call = parse_line(line, self._request.endpoint)
        try:
            tasks = line_tasks(
                self._request.id, line.number, call.custom_id, self._request.endpoint, call.body
            )
            for task in tasks.tasks:
                self._card = self._check(task)
        except Problem as problem:
            self._buffer.add(problem_result(line.number, call.custom_id, (), problem))
            return None
        return tasks

    def _check(self, task: TaskBody) -> ModelCard | None:
        return check_request(task, self._parts.settings, self._parts.tasks)

    def _submit(self, line: LineTasks) -> bool:
        """Submit the tasks of a line. False: the queue is full."""
        if time.monotonic() < self._retry_at:
            return False
        if line.number >= self._reach:
            self._reach = line.number + REACH_LINES
            self._update(Progress(fields={"reach": self._reach}))
        tenant = self._request.tenant_name
        try:
            for task, task_id in zip(line.tasks, line.task_ids, strict=True):
                self._parts.submitter.submit_in_background(task, task_id, tenant, self._card)
        except Problem as problem:
            if problem.status != _TOO_MANY_REQUESTS:
                raise
            self._retry_at = time.monotonic() + min(1.0, problem.retry_after or 1.0)
            return False
        return True

    def _collect(self) -> int:
        """Add the results of lines that have ended. Returns their number."""
        num_collected = 0
        for line, ends in self._ends(list(self._in_flight.values())):
            if "lost" in ends:
                # Its tasks have expired, or Redis lost them: submitted again, under the same ids.
                self._submit(line)
            elif all(ends):
                num_collected += self._add_result(line)
        return num_collected

    def _ends(self, lines: list[LineTasks]) -> Iterator[tuple[LineTasks, list[str]]]:
        ends = iter(self._parts.batches.ends([task_id for line in lines for task_id in line.task_ids]))
        for line in lines:
            yield line, [next(ends) for _ in line.task_ids]

    def _add_result(self, line: LineTasks) -> bool:
        tasks = self._parts.tasks
        readings = [reading for task_id in line.task_ids if (reading := tasks.read(task_id))]
        if len(readings) < len(line.task_ids):
            # Expired in this moment.
            return False
        self._card = self._card or tasks.model_card(self._parts.settings.slug)
        tool_format = self._card.tool_format if self._card else DEFAULT_FORMAT
        self._buffer.add(result_of(line, readings, tasks.request, tool_format))
        self._in_flight.pop(line.number, None)
        return True

    # The end.

    def _abandon(self, outcome: str) -> None:
        """Keep the results of tasks that have ended, cancel the others, and say which lines expired."""
        self._record()
        self._done = self._parts.batches.done_lines(self._request.id)
        for line in self._pending_lines():
            if line.number < self._reach:
                self._keep_or_cancel(line)
            elif outcome == "cancelled":
                break
            if outcome == "expired" and line.number not in self._buffer:
                call = parse_line(line, self._request.endpoint)
                self._buffer.add(unanswered(line.number, call.custom_id, "batch_expired", _EXPIRED))
            if self._buffer.is_due:
                self._record()
            self._renew()

    def _keep_or_cancel(self, line: Line) -> None:
        tasks = self._read(line)
        if tasks is None:
            return
        ((_, ends),) = self._ends([tasks])
        if all(end in ("completed", "failed") for end in ends) and self._add_result(tasks):
            return
        for task_id, end in zip(tasks.task_ids, ends, strict=True):
            if not end:
                self._parts.tasks.cancel(task_id)

    def _finalize(self) -> None:
        """Join the segments to files and end the batch."""
        batches, batch_id = self._parts.batches, self._request.id
        segments = batches.segments(batch_id)
        batch = batches.get(batch_id)
        if batch is None or batch.outcome is None:
            raise BatchLost
        files = {
            f"{kind}_file_id": self._publish(batch, kind, [one for one in segments if one.kind == kind])
            for kind in ("output", "error")
        }
        self._finish(batch.outcome, **files)
        for segment in segments:
            self._parts.storage.delete(segment.name)

    def _publish(self, batch: Batch, kind: str, segments: list[Segment]) -> str:
        """Store a file of results. Returns its id, or "" if there are none."""
        if not segments:
            return ""
        created_at = batch.times["finalizing_at"]
        file_id = _result_file_id(self._request.id, kind, created_at)
        size = join(self._parts.storage, segments, file_id, self._renew)
        self._parts.files.put(
            FileRecord(
                id=file_id,
                tenant=self._request.tenant,
                purpose="batch_output",
                filename=f"{self._request.id}_{kind}.jsonl",
                size=size,
                created_at=created_at,
                expires_at=created_at + self._request.output_seconds,
            )
        )
        return file_id

    def _finish(self, status: str, **fields: str) -> None:
        kept = max(self._parts.settings.files_retention_seconds, self._request.output_seconds)
        values = {"status": status, f"{status}_at": time.time(), **fields}
        self._parts.batches.finish(self._request.id, self._owner, kept, values)


class Window:
    """How many tasks of a batch may be queued or running."""

    def __init__(self, parts: BatchParts) -> None:
        self._parts = parts
        self._size = 0
        self._counted = 0.0

    def size(self) -> int:
        settings = self._parts.settings
        if settings.batch_window:
            return settings.batch_window
        now = time.monotonic()
        if not self._size or now - self._counted >= WINDOW_SECONDS:
            workers = [one for one in self._parts.tasks.workers() if one.slug == settings.slug]
            self._size = max(MIN_WINDOW, 2 * sum(worker.max_num_seqs for worker in workers))
            self._counted = now
        return self._size


def _result_file_id(batch_id: str, kind: str, created_at: float) -> str:
    """The id of a file of results: the same for each attempt to write it."""
    digest = hashlib.sha256(f"{batch_id}/{kind}".encode()).hexdigest()[:20]
    return f"file-{int(created_at * 1000):012x}{digest}"
