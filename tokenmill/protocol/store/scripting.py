"""Builds the Lua scripts and calls them.

The text of a script is its flags, the names of keys (from `keys` and `rq_keys`), the shared parts from
`scripts/parts/`, and its own file.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

from tokenmill.protocol import keys, rq_keys
from tokenmill.protocol.naming import PRIORITIES
from tokenmill.protocol.store import script_errors
from tokenmill.protocol.store.server_clock import ServerClock

_QUEUE = ("clock", "key_types", "deadlines", "queue_index", "claim_order", "cost_sums", "waiting_tasks")
_END = (*_QUEUE, "drain_rate", "outbox", "append", "task_end", "lost_tasks", "poison")
_REAPING = (*_END, "record_checks", "failures")

_WRITES: str | None = None
"""Refused on a replica and when the memory is full."""
_READS = "no-writes"
"""Allowed on a replica and when the memory is full."""
_FREES = "allow-oom"
"""Allowed when the memory is full: it frees memory or preserves tasks."""

_SCRIPTS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    # The file below scripts/: its flags, its parts from scripts/parts/.
    "tasks/submit": (_WRITES, _QUEUE),
    "tasks/claim": (_WRITES, _END),
    "tasks/publish": (_WRITES, (*_END, "failures")),
    "tasks/renew": (_FREES, _REAPING),
    "tasks/hand_back": (_FREES, _REAPING),
    "tasks/cancel": (_FREES, _END),
    "tasks/inspect": (_READS, (*_QUEUE, "drain_rate", "queue_positions")),
    "tasks/queue_stats": (_READS, (*_QUEUE, "drain_rate")),
    "reaping/lapsed_leases": (_FREES, _REAPING),
    "reaping/orphaned_claims": (_FREES, (*_REAPING, "worker_records")),
    "reaping/unread_tasks": (_FREES, (*_REAPING, "readers")),
    "reaping/rq_changes": (_FREES, _REAPING),
    "reaping/overdue_tasks": (_FREES, _REAPING),
    "reaping/rq_registries": (_FREES, _REAPING),
    "readers/add": (_WRITES, ("clock",)),
    "readers/remove": (_FREES, (*_END, "readers")),
    "outbox/take": (_FREES, ("clock", "outbox")),
    "outbox/renew": (_FREES, ("clock", "outbox")),
    "outbox/done": (_FREES, _END),
    "outbox/retry": (_FREES, ("clock", "outbox")),
    "audit/tasks": (_FREES, _END),
    "audit/model": (_FREES, _QUEUE),
    "workers/put_worker": (_WRITES, ("clock",)),
    "workers/drop_worker": (_FREES, ("clock",)),
    "workers/list_workers": (_READS, ("clock", "worker_records")),
}

_TOO_LATE = b"TOOLATE"
"""Reply to a call that arrived after its caller had timed out; as an error, its code."""

_PREFIXES: dict[str, Callable[[str], str]] = {
    "run": keys.run,
    "log": keys.log,
    "readers": keys.readers,
    "channel": keys.channel,
    "queues": keys.queues,
    "lines": keys.lines,
    "heads": keys.heads,
    "unserved": keys.unserved,
    "rule": keys.rule,
    "shares": keys.shares,
    "away": keys.away,
    "waiting": keys.waiting,
    "tenants": keys.tenants,
    "shown": keys.shown,
    "clock": keys.clock,
    "order": keys.order,
    "cost": keys.cost,
    "deadlines": keys.deadlines,
    "totals": keys.totals,
    "pace": keys.pace,
    "wake": keys.wake,
    "ready": keys.ready,
    "worker": keys.worker,
    "rq_job": rq_keys.job,
    "rq_queue": rq_keys.queue,
    "rq_wip": rq_keys.wip,
    "rq_finished": rq_keys.finished,
    "rq_failed": rq_keys.failed,
    "rq_canceled": rq_keys.canceled,
    "rq_results": rq_keys.results,
    "rq_executions": rq_keys.executions,
    "rq_execution": rq_keys.execution,
}


class Script(Protocol):
    """A script registered with redis-py."""

    def __call__(self, keys: Sequence[str] = ..., args: Sequence[Any] = ...) -> Any: ...


class RedisClient(Protocol):
    """The commands that the store calls: redis-py's `Redis` with `decode_responses=False`."""

    def register_script(self, script: Any, /) -> Any: ...
    def get(self, name: str, /) -> Any: ...
    def hget(self, name: str, field: str, /) -> Any: ...
    def set(self, name: str, value: str, /, *, nx: bool = ...) -> Any: ...
    def xrange(self, name: str, /, min: str = ..., *, count: int = ...) -> Any: ...
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


_LOST = f"local LOST = {{ error_json = '{script_errors.LOST[0]}', exc_string = '{script_errors.LOST[1]}' }}"


@cache
def source(name: str) -> str:
    """The whole text of a script. Its first line needs Redis 7 or Valkey."""
    flags, parts = _SCRIPTS[name]
    head = f"#!lua flags={flags}" if flags else "#!lua"
    return "\n".join([head, _key_names(), _LOST, *(_read(f"parts/{part}") for part in parts), _read(name)])


def _read(path: str) -> str:
    return (files("tokenmill.protocol.store") / "scripts" / f"{path}.lua").read_text("utf-8")


def _key_names() -> str:
    names = {name: key("") for name, key in _PREFIXES.items()}
    names["rq_worker"], names["rq_worker_executions"] = rq_keys.worker_executions("\0").split("\0")
    names |= {"leases": keys.LEASES, "workers": keys.WORKERS, "control": keys.CONTROL}
    names |= {"outbox": keys.OUTBOX, "outbox_due": keys.OUTBOX_DUE, "watched": keys.WATCHED}
    names |= {"damaged": keys.DAMAGED}
    names |= {"rq_queues": rq_keys.QUEUES, "max_results": str(rq_keys.MAX_RESULTS)}
    names |= {
        "aside": keys.ASIDE,
        "outage": keys.OUTAGE,
        "sweep": keys.sweep(""),
        "num_classes": str(len(PRIORITIES)),
    }
    return "local K = {" + ", ".join(f"{name} = '{value}'" for name, value in names.items()) + "}"
