"""Checks whether a Redis server keeps its data: eviction policy, append-only file, last write to disk.

Reads INFO, which managed servers allow, and CONFIG only if INFO does not report the policy.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

Fault = Literal["evicts", "not_persistent", "write_failed", "unknown"]

FAULTS: Mapping[Fault, str] = {
    "evicts": "Redis may evict keys (maxmemory-policy {}): accepted tasks may be lost; set it to noeviction",
    "not_persistent": "Redis has no append-only file: a restart loses accepted tasks; set appendonly yes",
    "write_failed": "Redis failed to write to its disk: it refuses writes until there is room",
    "unknown": "the eviction policy of Redis cannot be read: make sure that it is noeviction",
}
PROBE = "tokenmill:probe"
"""A key that is never created."""


class Server(Protocol):
    """The commands of redis-py's client that are called here."""

    def info(self, section: str, /) -> Any: ...
    def config_get(self, pattern: str, /) -> Any: ...
    def setrange(self, name: str, offset: int, value: str, /) -> Any: ...


def faults(server: Server, is_refusal: Callable[[Exception], bool]) -> dict[Fault, str]:
    """The faults found, each with a message. Raises the client's errors, except for refused commands.

    `is_refusal`: whether an error says that this client may not call a command.
    """
    memory = _ask_or_empty(lambda: server.info("memory"), is_refusal)
    persistence = _ask_or_empty(lambda: server.info("persistence"), is_refusal)
    policy = memory.get("maxmemory_policy")
    if policy is None:
        policy = _text(_ask_or_empty(lambda: server.config_get("maxmemory-policy"), is_refusal))
    found: dict[Fault, str] = {}
    if policy is None:
        found["unknown"] = FAULTS["unknown"]
    elif policy != "noeviction":
        found["evicts"] = FAULTS["evicts"].format(policy)
    if persistence.get("aof_enabled") == 0:
        found["not_persistent"] = FAULTS["not_persistent"]
    if persistence.get("aof_enabled") and persistence.get("aof_last_write_status", "ok") != "ok":
        found["write_failed"] = FAULTS["write_failed"]
    return found


def probe_write(server: Server) -> None:
    """Raises the error that a write would raise now. Changes nothing."""
    server.setrange(PROBE, 0, "")


def _ask_or_empty(ask: Callable[[], Any], is_refusal: Callable[[Exception], bool]) -> Mapping[Any, Any]:
    try:
        answer: Mapping[Any, Any] = ask()
    except Exception as error:
        if not is_refusal(error):
            raise
        return {}
    return answer


def _text(config: Mapping[Any, Any]) -> str | None:
    """The value in a CONFIG GET reply; bytes unless the client decodes replies."""
    value = next(iter(config.values()), None)
    return value.decode() if isinstance(value, bytes) else value
