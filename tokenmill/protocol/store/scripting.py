"""Builds the Lua scripts and calls them.

The text of a script is its flags, the names of keys (from `keys` and `rq_keys`), the shared parts from
`scripts/parts/`, and its own file.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

from tokenmill.protocol import keys, rq_keys
from tokenmill.protocol.naming import PRIORITIES
from tokenmill.protocol.store import script_errors
from tokenmill.protocol.store.server_clock import ServerClock

_BASE_PARTS = ("late_calls", "formats")
QUEUE_PARTS = (
    *_BASE_PARTS,
    "key_types",
    "task_list",
    "deadlines",
    "tenant_shares",
    "queue_index",
    "claim_order",
    "cost_sums",
    "waiting_tasks",
)
_END_PARTS = (*QUEUE_PARTS, "drain_rate", "outbox", "append", "task_end", "lost_tasks", "poison")
_REAPING_PARTS = (*_END_PARTS, "record_checks", "failures")

_WRITES: str | None = None
"""Refused on a replica and when the memory is full."""
_READS = "no-writes"
"""Allowed on a replica and when the memory is full."""
_FREES = "allow-oom"
"""Allowed when the memory is full: it frees memory or preserves tasks."""

_SCRIPTS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    # The file below scripts/: its flags, its parts from scripts/parts/.
    "tasks/submit": (_WRITES, QUEUE_PARTS),
    "tasks/claim": (_WRITES, _END_PARTS),
    "tasks/publish": (_WRITES, (*_END_PARTS, "failures")),
    "tasks/renew": (_FREES, _REAPING_PARTS),
    "tasks/hand_back": (_FREES, _REAPING_PARTS),
    "tasks/cancel": (_FREES, _END_PARTS),
    "tasks/erase": (_FREES, _END_PARTS),
    "tasks/list": (_READS, _BASE_PARTS),
    "tasks/inspect": (_READS, (*QUEUE_PARTS, "drain_rate", "queue_positions")),
    "tasks/queue_stats": (_READS, (*QUEUE_PARTS, "drain_rate")),
    "reaping/lapsed_leases": (_FREES, _REAPING_PARTS),
    "reaping/orphaned_claims": (_FREES, (*_REAPING_PARTS, "worker_records")),
    "reaping/unread_tasks": (_FREES, (*_REAPING_PARTS, "readers")),
    "reaping/rq_changes": (_FREES, _REAPING_PARTS),
    "reaping/overdue_tasks": (_FREES, _REAPING_PARTS),
    "reaping/rq_registries": (_FREES, _REAPING_PARTS),
    "reaping/expired_tasks": (_FREES, _REAPING_PARTS),
    "readers/add": (_WRITES, _BASE_PARTS),
    "readers/remove": (_FREES, (*_END_PARTS, "readers")),
    "outbox/take": (_FREES, (*_BASE_PARTS, "outbox")),
    "outbox/renew": (_FREES, (*_BASE_PARTS, "outbox")),
    "outbox/done": (_FREES, _END_PARTS),
    "outbox/retry": (_FREES, (*_BASE_PARTS, "outbox")),
    "audit/tasks": (_FREES, _END_PARTS),
    "audit/model": (_FREES, QUEUE_PARTS),
    "files/put": (_WRITES, _BASE_PARTS),
    "files/remove": (_FREES, _BASE_PARTS),
    "files/expired": (_READS, _BASE_PARTS),
    "batches/page": (_FREES, _BASE_PARTS),
    "batches/get": (_READS, _BASE_PARTS),
    "batches/create": (_WRITES, _BASE_PARTS),
    "batches/cancel": (_FREES, _BASE_PARTS),
    "batches/take": (_FREES, _BASE_PARTS),
    "batches/update": (_WRITES, _BASE_PARTS),
    "batches/release": (_FREES, _BASE_PARTS),
    "batches/finish": (_FREES, _BASE_PARTS),
    "batches/ends": (_READS, _BASE_PARTS),
    "workers/put_worker": (_WRITES, _BASE_PARTS),
    "workers/drop_worker": (_FREES, _BASE_PARTS),
    "workers/list_workers": (_READS, (*_BASE_PARTS, "worker_records")),
}

NAMES = frozenset(_SCRIPTS)
PART_NAMES = frozenset(part for _, parts in _SCRIPTS.values() for part in parts)

_TOO_LATE = b"TOOLATE"
"""Reply to a call that arrived after its caller had timed out; as an error, its code."""

_WORKER_EXECUTIONS = rq_keys.worker_executions("\0").partition("\0")

CONSTANTS: dict[str, str] = {
    # The table K of the scripts: keys, and prefixes of keys that end with a model, queue, task or worker.
    "leases": keys.LEASES,
    "workers": keys.WORKERS,
    "control": keys.CONTROL,
    "outbox": keys.OUTBOX,
    "outbox_due": keys.OUTBOX_DUE,
    "watched": keys.WATCHED,
    "damaged": keys.DAMAGED,
    "aside": keys.ASIDE,
    "ended": keys.ENDED,
    "tasks": keys.tasks(""),
    "outage": keys.OUTAGE,
    "batches": keys.BATCHES,
    "files_expiring": keys.FILES_EXPIRING,
    "file": keys.file(""),
    "files": keys.files(""),
    "batch": keys.batch(""),
    "batch_lines": keys.batch_lines(""),
    "batch_segments": keys.batch_segments(""),
    "batch_index": keys.batch_index(""),
    "open_batches": keys.open_batches(""),
    "sweep": keys.sweep(""),
    "run": keys.run(""),
    "log": keys.log(""),
    "readers": keys.readers(""),
    "channel": keys.channel(""),
    "queues": keys.queues(""),
    "lines": keys.lines(""),
    "heads": keys.heads(""),
    "unserved": keys.unserved(""),
    "rule": keys.rule(""),
    "shares": keys.shares(""),
    "away": keys.away(""),
    "waiting": keys.waiting(""),
    "tenants": keys.tenants(""),
    "shown": keys.shown(""),
    "clock": keys.clock(""),
    "order": keys.order(""),
    "cost": keys.cost(""),
    "deadlines": keys.deadlines(""),
    "totals": keys.totals(""),
    "pace": keys.pace(""),
    "wake": keys.wake(""),
    "ready": keys.ready(""),
    "worker": keys.worker(""),
    "rq_job": rq_keys.job(""),
    "rq_queue": rq_keys.queue(""),
    "rq_wip": rq_keys.wip(""),
    "rq_finished": rq_keys.finished(""),
    "rq_failed": rq_keys.failed(""),
    "rq_canceled": rq_keys.canceled(""),
    "rq_results": rq_keys.results(""),
    "rq_executions": rq_keys.executions(""),
    "rq_execution": rq_keys.execution(""),
    "rq_queues": rq_keys.QUEUES,
    "rq_worker": _WORKER_EXECUTIONS[0],
    "rq_worker_executions": _WORKER_EXECUTIONS[2],
    "max_results": str(rq_keys.MAX_RESULTS),
    "num_classes": str(len(PRIORITIES)),
}


class RedisClient(Protocol):
    """The commands that the store calls: redis-py's `Redis` with `decode_responses=False`."""

    def register_script(self, script: Any, /) -> Any: ...
    def get(self, name: str, /) -> Any: ...
    def hget(self, name: str, field: str, /) -> Any: ...
    def set(self, name: str, value: str, /, *, nx: bool = ...) -> Any: ...
    def xrange(self, name: str, /, min: str = ..., *, count: int = ...) -> Any: ...
    def xrevrange(self, name: str, /, *, count: int = ...) -> Any: ...
    def exists(self, name: str, /) -> Any: ...
    def time(self) -> Any: ...


class Scripts:
    """All scripts, called through `client`. Nothing is sent before the first call.

    Each call carries the time at which its caller times out, from the socket timeout of `client`. A server
    that was stopped reads pending calls after their callers have given up; the scripts then change nothing.
    Without a socket timeout calls carry no time.
    """

    def __init__(self, client: RedisClient, *, retention_seconds: float) -> None:
        self._retention_ms = max(1, round(retention_seconds * 1000))
        self._clock = ServerClock(client)
        self._scripts = {name: client.register_script(source(name)) for name in _SCRIPTS}

    def run(self, name: str, *arguments: Any, repeat: bool = True) -> Any:
        """Call the script `name`, its path below scripts/. Raises the client's errors.

        `repeat`: a call that arrived too late is repeated once, as Redis's clock may have been set. Otherwise
        it raises the client's error with the code TOOLATE.
        """
        reply = self._call(name, arguments, late_is_error=not repeat)
        if repeat and reply == _TOO_LATE:
            self._clock.forget()
            return self.run(name, *arguments, repeat=False)
        return reply

    def _call(self, name: str, arguments: Sequence[Any], *, late_is_error: bool) -> Any:
        until = self._clock.timeout_at()
        head = str(self._retention_ms)
        if until is not None:
            head += f":{until}" + ("!" if late_is_error else "")
        try:
            return self._scripts[name](args=(head, *arguments))
        except Exception:
            # The next call may reach another server with another clock.
            self._clock.forget()
            raise


@cache
def source(name: str) -> str:
    """The whole text of a script. Its first line needs Redis 7 or Valkey."""
    flags, parts = _SCRIPTS[name]
    return build(parts, _read(name), flags)


def build(parts: Sequence[str], body: str, flags: str | None = None) -> str:
    """A script of the constants, shared parts and `body`."""
    head = f"#!lua flags={flags}" if flags else "#!lua"
    lost = {"error_json": script_errors.LOST[0], "exc_string": script_errors.LOST[1]}
    tables = [_table("K", CONSTANTS), _table("LOST", lost)]
    return "\n".join([head, *tables, *(_read(f"parts/{part}") for part in parts), body])


def _read(path: str) -> str:
    return (files("tokenmill.protocol.store") / "scripts" / f"{path}.lua").read_text("utf-8")


def _table(name: str, values: Mapping[str, str]) -> str:
    fields = ", ".join(f"{field} = '{value}'" for field, value in values.items())
    return f"local {name} = {{ {fields} }}"
