"""Claims tasks and prepares them for the engine, as many as can start soon. Other workers take the rest.

Invariants: a claimed task reaches the loop or ends with a reason, and one bad request fails alone. Prompts
are tokenized here, so that the loop never waits for it. The exception is a suspect, which the loop prepares.
"""

import json
from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from engine.config import EngineConfig
from tokenmill.protocol import naming
from tokenmill.protocol.claim_order import ClaimOrder
from tokenmill.protocol.records import Claimed
from tokenmill.protocol.store.task_store import TaskStore
from worker.context import WorkerContext
from worker.errors import RequestRefused, internal_error
from worker.inbox import PreparedTask
from worker.loop import Load
from worker.preparation import Preparation, ownership_of
from worker.stream import LogprobsWriter, Stream
from worker.task_trace import TaskTrace

_log = structlog.get_logger(__name__)

POLL_SECONDS = 1.0
"""The queue is polled at this interval, since a wake-up message can be lost with its connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchLimit:
    """How many tasks a worker claims: its free slots, and a few tasks that are ready for the next free slot.

    The tasks that have not started stay below what one step can start: a shortage of KV blocks shows as tasks
    that do not start while slots are free. A task with several outputs counts as one until the scheduler has
    them.
    """

    max_num_seqs: int
    max_num_prefill_seqs: int

    @property
    def look_ahead(self) -> int:
        return max(1, self.max_num_seqs // 8)

    def room(self, num_owned: int, load: Load) -> int:
        num_seqs = max(num_owned, load.num_running + load.num_waiting)
        slots = self.max_num_seqs - num_seqs
        starts = self.max_num_prefill_seqs - (num_seqs - load.num_running)
        return min(slots, starts) + self.look_ahead


class LoadSource(Protocol):
    """`load`: what the loop's scheduler holds now."""

    load: Load


class Intake:
    """`turn` belongs to one thread."""

    def __init__(
        self, store: TaskStore, context: WorkerContext, config: EngineConfig, loop: LoadSource
    ) -> None:
        self._store = store
        self._context = context
        self._loop = loop
        self._prefetch_limit = PrefetchLimit(
            max_num_seqs=config.max_num_seqs, max_num_prefill_seqs=config.prefill_seqs_limit
        )
        self._order = ClaimOrder(
            ageing_seconds=config.ageing_seconds,
            max_waiting_seconds=config.max_waiting_seconds,
            fair_sharing=context.fair_sharing,
        )
        self._preparation = Preparation(context.model)
        self._logprobs = LogprobsWriter(context.model.tokenizer.token_bytes)
        # Claimed tasks that are not prepared yet.
        self._claimed: deque[Claimed] = deque()
        # Task -> owner of claims whose arrival here is not recorded yet.
        self._unconfirmed: dict[str, str] = {}

    def turn(self) -> None:
        """Claim once, prepare what was claimed, and begin the next isolated retry.

        Waits for a wake-up unless more can be done at once. Raises `RedisError`; tasks claimed before that
        are prepared in the next turn.
        """
        self._context.wake.clear()
        self._prepare_claimed()
        can_continue = self._claim()
        self._prepare_claimed()
        if suspect := self._context.isolation.next_suspect():
            can_continue = self._retry_isolated(suspect)
        if not can_continue:
            self._context.wake.wait(POLL_SECONDS)

    def _claim(self) -> bool:
        """Claim as many tasks as there is room for. Returns whether the queue may hold more."""
        # A stalled loop starts nothing, and an isolated retry must be the only task in progress.
        if self._context.isolation.is_pending or self._context.watchdog.is_stalled:
            return False
        room = self._prefetch_limit.room(len(self._context.owned_tasks), self._loop.load)
        if room <= 0:
            return False
        claimed = self._store.claim(
            self._context.model.slug,
            worker=self._context.name,
            max_tasks=room,
            lease_seconds=self._context.timing.lease_seconds,
            order=self._order,
        )
        self._own(claimed)
        return len(claimed) == room

    def _own(self, claimed: list[Claimed]) -> None:
        """Register the tasks before any of them is prepared: from here on their leases are renewed."""
        now = self._context.clock()
        claimed = [replace(task, claimed_at=now) for task in claimed]
        for task in claimed:
            if earlier := self._context.owned_tasks.find(task.task_id):
                # An attempt of this worker whose loss was not noticed.
                self._context.drop_lost(earlier)
            self._context.owned_tasks.add(ownership_of(task))
        self._claimed.extend(claimed)
        self._unconfirmed |= {task.task_id: task.owner for task in claimed if not task.suspect}
        if claimed:
            self._context.metrics.claimed(len(claimed))

    def _prepare_claimed(self) -> None:
        self._confirm()
        while self._claimed:
            task = self._claimed[0]
            # Only this worker appends to the log now. A cancel may too, and refuses this worker's writes.
            entries = self._store.log_entries(task.task_id, task.num_entries)
            self._claimed.popleft()
            task = replace(task, entries=entries)
            if task.suspect:
                self._context.isolation.add(task)
            elif prepared := self._prepare(task):
                self._context.inbox.put(prepared)

    def _confirm(self) -> None:
        """Record that the claims arrived. From then on the death of this worker counts against them."""
        if not self._unconfirmed:
            return
        renewed = self._store.renew(self._unconfirmed, self._context.timing.lease_seconds)
        self._unconfirmed = {}
        # The next renewal of the leases drops these in the other parts of the worker.
        gone = renewed.lost | renewed.cancelled
        self._claimed = deque(task for task in self._claimed if task.task_id not in gone)

    def _retry_isolated(self, suspect: Claimed) -> bool:
        """Quiesce the loop, record that the suspect runs alone, and start it.

        Returns whether to continue at once: true until the retry has started.
        """
        isolation, ownership = self._context.isolation, ownership_of(suspect)
        if not isolation.quiesce(ownership, POLL_SECONDS):
            return True
        owners = self._context.owned_tasks.owners()
        phases = self._context.phases(owners)
        renewed = self._store.renew(owners, self._context.timing.lease_seconds, phases)
        if suspect.task_id in renewed.lost | renewed.cancelled:
            # The next renewal of the leases drops it in the other parts; the loop need not wait for that.
            isolation.finish(ownership)
            return True
        _log.warning("task runs alone, because a worker may have died of it", task=suspect.task_id)
        self._context.metrics.suspected(1)
        return not isolation.begin(ownership, lambda seconds: self._prepare(_later(suspect, seconds)))

    def _prepare(self, task: Claimed) -> PreparedTask | None:
        """Return the task for the loop. None if it ends here, with an error or by its log."""
        try:
            prepared = self._preparation.prepare(task)
        except RequestRefused as refusal:
            error = refusal.error
        except BaseException:  # noqa: BLE001 - a panic in a tokenizer written in Rust is not an Exception
            _log.exception("task cannot be prepared", task=task.task_id)
            error = internal_error()
        else:
            return self._open_stream(task, prepared)
        stream = self._new_stream(task, len(task.prompt_token_ids or ()))
        if not stream.has_ended:
            stream.fail(error)
        self._context.outputs.open(stream)
        return None

    def _open_stream(self, task: Claimed, prepared: PreparedTask) -> PreparedTask | None:
        """Open the stream before the loop has the task. Returns None if the log has the end already."""
        stream = self._new_stream(task, len(prepared.request.prompt_token_ids))
        if task.prompt_token_ids is None:
            stream.record(
                {
                    "prompt_ids": json.dumps(prepared.request.prompt_token_ids),
                    "prompt_tokens": str(len(prepared.request.prompt_token_ids)),
                    "fingerprint": self._context.model.fingerprint,
                    "sampling_defaults": prepared.sampling_defaults,
                    "output_limit": prepared.output_limit.to_json() if prepared.output_limit else "",
                }
            )
        self._context.outputs.open(stream)
        return None if stream.has_ended else prepared

    def _new_stream(self, task: Claimed, num_prompt_tokens: int) -> Stream:
        return Stream(
            ownership_of(task),
            entries=task.entries,
            trace=TaskTrace.of(task),
            num_prompt_tokens=num_prompt_tokens,
            num_outputs=task.num_outputs,
            num_cached_tokens=task.cached_tokens,
            logprobs=self._logprobs,
            tenant=naming.tenant_of(task.queue),
        )


def _later(task: Claimed, seconds: float) -> Claimed:
    """The task `seconds` after its claim."""
    return replace(task, waited_seconds=task.waited_seconds + seconds, claimed_at=task.claimed_at + seconds)
