"""Builds the Lua scripts from their files: flags, key names, shared parts, then the script itself.

Key names come from `keys` and `rq_keys`, so that each is written down once. Knows no task.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

from worker.protocol import keys, rq_keys
from worker.protocol.naming import PRIORITIES

_ORDER = ("clock", "sound", "deadlines", "lines", "turns", "sums", "order")
_ENDING = (*_ORDER, "served", "outbox", "ending", "crashes")
_PARTS = {
    "submit": _ORDER,
    "claim": _ENDING,
    "publish": _ENDING,
    "renew": _ENDING,
    "hand_back": _ENDING,
    "cancel": _ENDING,
    "reap": (*_ENDING, "readers"),
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
    "workers": ("clock",),
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
    "reap": "allow-oom",
    "drop_worker": "allow-oom",
    "audit": "allow-oom",
    "audit_model": "allow-oom",
    "leave": "allow-oom",
    "outbox_take": "allow-oom",
    "outbox_renew": "allow-oom",
    "outbox_done": "allow-oom",
    "outbox_retry": "allow-oom",
}

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
    def set(self, name: str, value: str, /) -> Any: ...
    def xrange(self, name: str, /, min: str = ..., *, count: int = ...) -> Any: ...


def register(client: RedisClient) -> dict[str, Script]:
    """All scripts by name. Nothing is sent: each goes to the server when it is first called."""
    return {name: client.register_script(source(name)) for name in _PARTS}


@cache
def source(name: str) -> str:
    """The whole text of a script. The first line needs Redis 7 or Valkey."""
    flags = _FLAGS.get(name)
    head = f"#!lua flags={flags}" if flags else "#!lua"
    return "\n".join([head, _key_names(), *map(_read, (*_PARTS[name], name))])


def _read(name: str) -> str:
    return (files("worker.protocol") / "scripts" / f"{name}.lua").read_text("utf-8")


def _key_names() -> str:
    names = {name: key("") for name, key in _PREFIXES.items()}
    names["rq_worker"], names["rq_worker_executions"] = rq_keys.worker_executions("\0").split("\0")
    names |= {"leases": keys.LEASES, "workers": keys.WORKERS, "control": keys.CONTROL}
    names |= {"outbox": keys.OUTBOX, "outbox_due": keys.OUTBOX_DUE, "watched": keys.WATCHED}
    names |= {"damaged": keys.DAMAGED}
    names |= {"rq_queues": rq_keys.QUEUES, "max_results": str(rq_keys.MAX_RESULTS)}
    names |= {"num_classes": str(len(PRIORITIES))}
    return "local K = {" + ", ".join(f"{name} = '{value}'" for name, value in names.items()) + "}"
