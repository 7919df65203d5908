"""Writes the steps of this worker to a capped stream in Redis, for clients that watch them.

Invariants: the loop only reads a flag. A report that Redis does not take at once is dropped and counted.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import redis

from engine.outputs import StepReport
from monitoring.worker import WorkerMetrics
from tokenmill.protocol import keys, steps

SAMPLE_SECONDS = 1.0
"""Without a watcher, one step is written in this interval."""
CHECK_SECONDS = 1.0
"""Interval at which the mark of a watcher is read."""
PAUSE_SECONDS = 5.0
"""Pause after a failed write, so that a slow Redis delays no further tokens."""
MAX_PENDING = 64

STAGES = ("schedule", "execute", "sample", "detokenize", "update", "total")


class StepStream:
    """`wants_lanes` is called by the loop, the other methods by the publisher. `clock`: monotonic seconds."""

    def __init__(self, name: str, clock: Callable[[], float], metrics: WorkerMetrics) -> None:
        self.is_watched = False
        self._key = keys.steps(name)
        self._watched_key = keys.steps_watched(name)
        self._clock = clock
        self._metrics = metrics
        self._pending: deque[dict[str, Any]] = deque()
        self._next_sample_at = self._next_check_at = self._paused_until = clock()

    def wants_lanes(self) -> bool:
        """Whether the next step is written."""
        if self.is_watched:
            return True
        now = self._clock()
        if now < self._next_sample_at:
            return False
        self._next_sample_at = now + SAMPLE_SECONDS
        return True

    def add(self, report: StepReport, tenant_of: Callable[[str], str]) -> None:
        """Take a report that has lanes. `tenant_of` returns the tenant of a request, or an empty string."""
        if report.lanes is None:
            return
        if len(self._pending) >= MAX_PENDING:
            self._pending.popleft()
            self._metrics.dropped_steps(1)
        self._pending.append(_describe(report, tenant_of))

    def write(self, client: Any) -> None:
        """Write what was taken, in one call. Raises nothing of Redis."""
        now = self._clock()
        is_due = now >= self._next_check_at
        if now < self._paused_until or not (self._pending or is_due):
            return
        pending, self._pending = self._pending, deque()
        try:
            self._send(client, pending, is_due=is_due)
        except redis.RedisError:
            self._paused_until = now + PAUSE_SECONDS
            self.is_watched = False
            self._metrics.dropped_steps(len(pending))

    def _send(self, client: Any, pending: deque[dict[str, Any]], *, is_due: bool) -> None:
        with client.pipeline(transaction=False) as pipe:
            if is_due:
                pipe.exists(self._watched_key)
            for step in pending:
                fields = {steps.FIELD: steps.encode(step)}
                pipe.xadd(self._key, fields, maxlen=steps.MAX_ENTRIES, approximate=True)
            if pending:
                pipe.expire(self._key, steps.TTL_SECONDS)
            replies = pipe.execute()
        if is_due:
            self._next_check_at = self._clock() + CHECK_SECONDS
            self.is_watched = bool(replies[0])


def _describe(report: StepReport, tenant_of: Callable[[str], str]) -> dict[str, Any]:
    return {
        "step": report.step,
        "at": round(time.time(), 6),
        "budget": {
            "tokens": report.max_num_batched_tokens,
            "used": report.num_prefill_tokens + report.num_decode_tokens,
            "seqs": report.num_prefill_seqs + report.num_decode_seqs,
            "max_seqs": report.max_num_seqs,
        },
        "kv": {
            "used": report.num_kv_blocks - report.num_free_kv_blocks,
            "cached": report.num_cached_kv_blocks,
            "total": report.num_kv_blocks,
        },
        "seconds": {stage: round(getattr(report, f"{stage}_seconds"), 6) for stage in STAGES},
        "bound_by": report.bound_by,
        "running": report.num_running,
        "waiting": report.num_waiting,
        "waiting_reasons": dict(report.waiting_reasons),
        "lanes": [
            (
                lane.request_id.rpartition(":")[0],
                lane.output_index,
                lane.state,
                lane.num_tokens,
                lane.reason,
                tenant_of(lane.request_id),
            )
            for lane in report.lanes or ()
        ],
    }
