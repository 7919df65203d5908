"""Takes back and ends what no worker will: each duty is a script of its own, and each record is treated
alone.

A record that cannot be treated is reported and set aside for a minute; neither the other records nor the
other duties wait for it. Knows no policy: when to reap is decided by the callers.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from tokenmill.protocol import rq_keys
from tokenmill.protocol.records import Reaped, ReapFailure
from tokenmill.protocol.store import script_errors
from tokenmill.protocol.store.scripting import Scripts

logger = logging.getLogger(__name__)

_TREATED_AT_ONCE = 100
"""Records that one script treats at most: Redis serves no other client meanwhile."""

_IN_SCRIPT = "@user_script"
"""Part of the error of a script that had begun."""

_Result = dict[str, Iterable[bytes]]
"""Field of `Reaped` -> ids; `failures`: record and reason in turn."""


class Reaping:
    """`scripts`: those of one client. Raises its connection errors, after which calling it again is safe."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    def reap(
        self,
        slug: str,
        *,
        max_task_seconds: float,
        take_back: bool = True,
        failed_seconds_ago: float | None = None,
    ) -> Reaped:
        """Put back what has a lapsed lease, of any model; end what waits longer than `max_task_seconds` or
        than its own limits allow, or is to blame for the deaths of several workers.

        Also ends what was cancelled or deleted with RQ's own tools, drops expired ids from RQ's registries,
        and finds claims and workers without a valid lease. Each duty treats a hundred records at most.
        `take_back`: without it no lease counts as lapsed. `failed_seconds_ago`: when Redis last failed the
        caller, if it has since the last call: what lapsed meanwhile is nobody's crash.
        """
        duties: dict[str, Callable[[], _Result]] = {
            "leases": lambda: self._leases(take_back, failed_seconds_ago),
            "unread": lambda: self._named("reap_unread", ("cancelled", "failures"), _TREATED_AT_ONCE),
            "moved": lambda: self._named(
                "reap_moved", ("cancelled", "lost", "failures"), slug, _TREATED_AT_ONCE
            ),
            "overdue": lambda: self._named(
                "reap_overdue",
                ("timed_out", "failures"),
                slug,
                round(max_task_seconds * 1e6),
                rq_keys.RESULT_FAILED,
                _TREATED_AT_ONCE,
                *script_errors.NAMED,
            ),
            "registries": lambda: {"failures": self._scripts.run("reap_registries", slug)},
            "strays": lambda: self._named("reap_strays", ("lost", "failures"), slug, _TREATED_AT_ONCE),
        }
        total: dict[str, list[Any]] = {one.name: [] for one in fields(Reaped)}
        for duty, call in duties.items():
            for name, items in self._isolated(duty, call).items():
                total[name] += failures_of(duty, items) if name == "failures" else decoded(items)
        # Two duties may meet the rests of one task.
        return Reaped(**{name: tuple(dict.fromkeys(items)) for name, items in total.items()})

    def _isolated(self, duty: str, call: Callable[[], _Result]) -> _Result:
        """What `call` returns. An error within the script is a failure of this duty alone."""
        try:
            return call()
        except Exception as error:
            # Errors of the connection, and of the state of the server, do not name a script.
            if _IN_SCRIPT not in str(error):
                raise
            return {"failures": (duty.encode(), str(error).encode())}

    def _leases(self, take_back: bool, failed_seconds_ago: float | None) -> _Result:
        failed = "" if failed_seconds_ago is None else failed_seconds_ago
        limit = _TREATED_AT_ONCE if take_back else 0
        names = ("returned", "cancelled", "poisoned", "lost", "failures")
        # Never repeated: where it came too late, Redis was away or its clock was set, and leases mean
        # nothing.
        return self._named(
            "reap_leases", names, limit, failed, *script_errors.POISON, rq_keys.RESULT_FAILED, repeat=False
        )

    def _named(self, script: str, names: Sequence[str], *arguments: Any, repeat: bool = True) -> _Result:
        return dict(zip(names, self._scripts.run(script, *arguments, repeat=repeat), strict=True))


def failures_of(duty: str, items: Iterable[bytes]) -> Iterator[ReapFailure]:
    """`items`: record and reason in turn."""
    texts = iter(decoded(items))
    return (ReapFailure(duty, record, reason) for record, reason in zip(texts, texts, strict=True))


def log_failures(what: str, items: Iterable[bytes]) -> None:
    """One line for each record that a script could not treat."""
    for failure in failures_of(what, items):
        logger.error("%s: %s: %s", failure.record, what, failure.reason)


def decoded(ids: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(task_id.decode(errors="replace") for task_id in ids)
