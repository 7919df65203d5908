"""Builds the Lua scripts from their files: flags, key names, shared parts, then the script itself; and calls
them.

Key names come from `keys` and `rq_keys`, so that each is written down once. Knows no task.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

from tokenmill.protocol import keys, rq_keys
from tokenmill.protocol.naming import PRIORITIES
from tokenmill.protocol.store import script_errors
from tokenmill.protocol.store.server_clock import ServerClock

_ORDER = ("clock", "sound", "deadlines", "lines", "turns", "sums", "order")
_ENDING = (*_ORDER, "served", "outbox", "ending", "vanished", "crashes")
_REAPING = (*_ENDING, "checks", "isolated")
_PARTS = {
    "submit": _ORDER,
    "claim": _ENDING,
    "publish": (*_ENDING, "isolated"),
    "renew": _REAPING,
    "hand_back": _REAPING,
    "cancel": _ENDING,
    "reap_leases": _REAPING,
    "reap_strays": (*_REAPING, "worker_records"),
    "reap_unread": (*_REAPING, "readers"),
    "reap_moved": _REAPING,
    "reap_overdue": _REAPING,
    "reap_registries": _REAPING,
    "read": ("clock",),
    "leave": (*_ENDING, "readers"),
    "outbox_take": ("clock", "outbox"),
    "outbox_renew": ("clock", "outbox"),
    "outbox_done": _ENDING,
    "outbox_retry": ("clock", "outbox"),
    "inspect": (*_ORDER, "served", "standing"),
    "queue_stats": (*_ORDER, "served"),
    "audit": _ENDING,
    "audit_model": _ORDER,
    "put_worker": ("clock",),
    "drop_worker": ("clock",),
    "workers": ("clock", "worker_records"),
}

_FLAGS = {
    # Readers: allowed on a replica and when the memory is full.
    "inspect": "no-writes",
    "queue_stats": "no-writes",
    "workers": "no-writes",
    # These free memory or keep what is there: they must work when it is full.
    "renew": "allow-oom",
    "hand_back": "allow-oom",
    "cancel": "allow-oom",
    "reap_leases": "allow-oom",
    "reap_strays": "allow-oom",
    "reap_unread": "allow-oom",
    "reap_moved": "allow-oom",
    "reap_overdue": "allow-oom",
    "reap_registries": "allow-oom",
    "drop_worker": "allow-oom",
    "audit": "allow-oom",
    "audit_model": "allow-oom",
    "leave": "allow-oom",
    "outbox_take": "allow-oom",
    "outbox_renew": "allow-oom",
    "outbox_done": "allow-oom",
    "outbox_retry": "allow-oom",
}

_TOO_LATE = b"TOOLATE"
"""Reply to a call that arrived when its caller no longer waited for it; as an error, its code."""

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
    """A registered script, as redis-py gives it."""

    def __call__(self, keys: Sequence[str] = ..., args: Sequence[Any] = ...) -> Any: ...


class RedisClient(Protocol):
    """What the store asks of a client: redis-py's `Redis` with `decode_responses=False`."""

    def register_script(self, script: Any, /) -> Any: ...
    def get(self, name: str, /) -> Any: ...
    def hget(self, name: str, field: str, /) -> Any: ...
    def set(self, name: str, value: str, /, *, nx: bool = ...) -> Any: ...
    def xrange(self, name: str, /, min: str = ..., *, count: int = ...) -> Any: ...
    def time(self) -> Any: ...


class Scripts:
    """All scripts, called through `client`. Nothing is sent before the first call.

    A call carries the time until which its caller waits for the reply, so that Redis does not run it later:
    the server reads what it received while it was stopped also after the client has given up. That time is
    the socket timeout of `client`; without one, calls carry none.
    """

    def __init__(self, client: RedisClient, *, retention_seconds: float) -> None:
        self._retention_ms = max(1, round(retention_seconds * 1000))
        self._clock = ServerClock(client)
        self._scripts = {name: client.register_script(source(name)) for name in _PARTS}

    def run(self, name: str, *arguments: Any, repeat: bool = True) -> Any:
        """What the script `name` returns. Raises the client's errors.

        `repeat`: a call that arrived too late is made once more, as the clock of Redis may have been set.
        Without it, and the second time, that is an error of the client with the code TOOLATE.
        """
        reply = self._call(name, arguments, late_is_error=not repeat)
        if repeat and reply == _TOO_LATE:
            self._clock.forget()
            return self.run(name, *arguments, repeat=False)
        return reply

    def _call(self, name: str, arguments: Sequence[Any], *, late_is_error: bool) -> Any:
        until = self._clock.give_up_at()
        head = str(self._retention_ms)
        if until is not None:
            head += f":{until}" + ("!" if late_is_error else "")
        try:
            return self._scripts[name](args=(head, *arguments))
        except Exception:
            # Perhaps another server answers next, with a clock of its own.
            self._clock.forget()
            raise


_LOST = f"local LOST = {{ error_json = '{script_errors.LOST[0]}', exc_string = '{script_errors.LOST[1]}' }}"


@cache
def source(name: str) -> str:
    """The whole text of a script. The first line needs Redis 7 or Valkey."""
    flags = _FLAGS.get(name)
    head = f"#!lua flags={flags}" if flags else "#!lua"
    return "\n".join([head, _key_names(), _LOST, *map(_read, (*_PARTS[name], name))])


def _read(name: str) -> str:
    return (files("tokenmill.protocol.store") / "scripts" / f"{name}.lua").read_text("utf-8")


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
