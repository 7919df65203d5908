"""Claims tasks and makes requests of them: as many as can soon be started; other workers have the rest.

Law: what is claimed reaches the loop, or ends with a reason; one bad request fails alone. Tokenizing happens
here, so that the loop never waits for it; but a suspect is tried alone, and prepared by the loop. Knows no
engine but its limits.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from monitoring.worker import WorkerMetrics
from tokenmill.protocol.claim_order import ClaimOrder
from tokenmill.protocol.records import Claimed
from tokenmill.protocol.store.task_store import TaskStore
from worker.errors import RequestRefused, internal_error
from worker.inbox import Discard, Inbox, PreparedTask
from worker.isolation import IsolatedRetries
from worker.logprobs import LogprobsWriter
from worker.loop import Load
from worker.ownership import OwnedTasks, Ownership
from worker.preparation import Preparation, ServedModel, ownership_of
from worker.publisher import Publisher
from worker.stream import Stream

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""A wake message can be lost with its connection: look at the queue so often in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchLimit:
    """How many tasks a worker takes.

    `max_num_seqs` slots, and a few tasks more that are ready when one comes free. Those on their way to a
    slot stay below what one step can start: a full pool shows there, before the slots are gone. A task with
    several outputs counts as one until they are in the scheduler.
    """

    max_num_seqs: int
    max_num_prefill_seqs: int

    @property
    def look_ahead(self) -> int:
        return max(1, self.max_num_seqs // 8)

    def room(self, num_held: int, load: Load) -> int:
        num_seqs = max(num_held, load.num_running + load.num_waiting)
        slots = self.max_num_seqs - num_seqs
        starts = self.max_num_prefill_seqs - (num_seqs - load.num_running)
        return min(slots, starts) + self.look_ahead


class Intake:
    """`turn` belongs to one thread.

    `order`: how claims are ordered. `load` is asked for what the loop has at the moment, `is_stalled` whether
    it hangs.
    """

    def __init__(
        self,
        store: TaskStore,
        model: ServedModel,
        prefetch_limit: PrefetchLimit,
        owned_tasks: OwnedTasks,
        inbox: Inbox,
        publisher: Publisher,
        trials: IsolatedRetries,
        metrics: WorkerMetrics,
        *,
        worker_name: str,
        lease_seconds: float,
        order: ClaimOrder,
        load: Callable[[], Load],
        is_stalled: Callable[[], bool],
        wake: threading.Event,
    ) -> None:
        self._store = store
        self._model = model
        self._preparation = Preparation(model)
        self._logprobs = LogprobsWriter(model.tokenizer.token_bytes)
        self._prefetch_limit = prefetch_limit
        self._owned_tasks = owned_tasks
        self._inbox = inbox
        self._publisher = publisher
        self._isolated_retries = trials
        self._metrics = metrics
        self._worker_name = worker_name
        self._lease_seconds = lease_seconds
        self._order = order
        self._load = load
        self._wake = wake
        self._is_stalled = is_stalled
        self._claimed: deque[Claimed] = deque()
        # Claims of which Redis does not know yet that their reply has arrived.
        self._unconfirmed: dict[str, str] = {}

    def turn(self) -> None:
        """Claim once, and let a suspect be tried; wait for a reason to claim again unless there may be more.

        Raises `RedisError`; what was claimed before that is admitted in the next turn.
        """
        self._wake.clear()
        self._admit_claimed()
        may_be_more = not self._isolated_retries.is_pending and self._take_some()
        if not self._isolated_retries.is_on and (suspect := self._isolated_retries.next()):
            may_be_more = self._try(suspect)
        if not may_be_more:
            self._wake.wait(POLL_SECONDS)

    def _take_some(self) -> bool:
        """Whether there may be more that could be taken at once. A loop that hangs steps nothing more."""
        if self._is_stalled():
            return False
        room = self._prefetch_limit.room(len(self._owned_tasks), self._load())
        num_claimed = self._claim(room) if room > 0 else 0
        self._admit_claimed()
        return 0 < room == num_claimed

    def _claim(self, room: int) -> int:
        claimed = self._store.claim(
            self._model.slug,
            worker=self._worker_name,
            max_tasks=room,
            lease_seconds=self._lease_seconds,
            order=self._order,
        )
        # All at once, before the first is tokenized: from here on their leases are renewed.
        for task in claimed:
            if old := self._owned_tasks.take(ownership_of(task)):
                self._drop(old)
        self._claimed.extend(claimed)
        self._unconfirmed |= {task.task_id: task.owner for task in claimed if not task.suspect}
        if claimed:
            self._metrics.claimed(len(claimed))
        return len(claimed)

    def _drop(self, old: Ownership) -> None:
        """An earlier attempt of ours at a task that came back before we noticed that it was lost."""
        self._metrics.lost(1)
        self._isolated_retries.finish(old)
        self._inbox.put(Discard(old))
        self._publisher.forget(old.request_id)

    def _try(self, suspect: Claimed) -> bool:
        """Record that it runs alone, once the loop is silent, and let it; False: the trial goes on now."""
        ownership = ownership_of(suspect)
        if not self._isolated_retries.quiesce(ownership, POLL_SECONDS):
            return True
        owners = self._owned_tasks.owners()
        phases = self._isolated_retries.phases(owners, self._publisher.idle_ids)
        renewed = self._store.renew(owners, self._lease_seconds, phases)
        if suspect.task_id in renewed.lost | renewed.cancelled:
            # The next beat of the leases tells it to all; nobody waits for that.
            self._isolated_retries.finish(ownership)
            return True
        logger.warning("%s: tried alone, a worker may have died of it", suspect.task_id)
        self._metrics.suspected(1)
        return not self._isolated_retries.begin(
            ownership, lambda seconds: self._prepare(_later(suspect, seconds))
        )

    def _confirm(self) -> None:
        """Before any of them is touched: from here on the death of this worker may count against them."""
        if not self._unconfirmed:
            return
        renewed = self._store.renew(self._unconfirmed, self._lease_seconds)
        self._unconfirmed = {}
        # The next beat of the leases reports them to all parts of the worker.
        gone = renewed.lost | renewed.cancelled
        self._claimed = deque(task for task in self._claimed if task.task_id not in gone)

    def _admit_claimed(self) -> None:
        self._confirm()
        while self._claimed:
            task = self._claimed[0]
            # Since the claim only we write to it, but for a cancel, whose end our own writes will meet.
            entries = self._store.log_entries(task.task_id, task.num_entries)
            self._claimed.popleft()
            task = replace(task, entries=entries)
            if task.suspect:
                self._isolated_retries.add(task)
            else:
                self._admit(task)

    def _admit(self, task: Claimed) -> None:
        if prepared := self._prepare(task):
            self._inbox.put(prepared)

    def _prepare(self, task: Claimed) -> PreparedTask | None:
        """Bring one claimed task on its way: what the loop is to be given, or None if it came to its end."""
        try:
            prepared = self._preparation.prepare(task)
        except RequestRefused as refusal:
            error = refusal.error
        except BaseException:  # a tokenizer's panic in Rust is no Exception
            logger.exception("%s: could not be prepared", task.task_id)
            error = internal_error()
        else:
            return self._opened(task, prepared)
        stream = self._stream(task, len(task.prompt_token_ids or ()))
        if not stream.has_ended:
            stream.fail(error)
        self._publisher.open(stream)
        return None

    def _opened(self, task: Claimed, prepared: PreparedTask) -> PreparedTask | None:
        """The stream first: the loop's outputs need it."""
        facts = {
            "prompt_ids": json.dumps(prepared.request.prompt_token_ids),
            "prompt_tokens": str(len(prepared.request.prompt_token_ids)),
            "fingerprint": self._model.fingerprint,
            "sampling_defaults": prepared.sampling_defaults,
            "output_limit": prepared.output_limit.to_json() if prepared.output_limit else "",
        }
        stream = self._stream(task, len(prepared.request.prompt_token_ids))
        if task.prompt_token_ids is None:
            stream.note(facts)
        self._publisher.open(stream)
        return None if stream.has_ended else prepared

    def _stream(self, task: Claimed, num_prompt_tokens: int) -> Stream:
        return Stream(
            ownership_of(task),
            entries=task.entries,
            num_prompt_tokens=num_prompt_tokens,
            num_outputs=task.num_outputs,
            num_cached_tokens=task.cached_tokens,
            logprobs=self._logprobs,
        )


def _later(task: Claimed, seconds: float) -> Claimed:
    """So long after its claim."""
    return replace(task, waited_seconds=task.waited_seconds + seconds)
