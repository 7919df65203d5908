"""Requeues or ends tasks that no worker will finish, and repairs what RQ's own tools changed.

Each duty is one script, and each script processes its records one by one. A record that fails is reported,
set aside for a minute and then retried; neither other records nor other duties wait for it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from tokenmill.protocol import rq_keys
from tokenmill.protocol.records import Reaped
from tokenmill.protocol.store import script_errors
from tokenmill.protocol.store.replies import texts, to_failures
from tokenmill.protocol.store.scripting import Scripts

MAX_RECORDS = 100
"""Records that one script processes at most: Redis serves no other client meanwhile."""

_IN_SCRIPT = "@user_script"
"""Part of every error that is raised inside a script."""

_Result = dict[str, Iterable[bytes]]
"""Field of `Reaped` -> ids; `failures`: record and reason in turn."""


class Reaping:
    """The duties of the reaper. `scripts`: those of one client."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    def reap(
        self,
        slug: str,
        *,
        max_task_seconds: float,
        reclaim_leases: bool = True,
        failed_seconds_ago: float | None = None,
    ) -> Reaped:
        """Run every duty once, each for at most `MAX_RECORDS` records. Raises the client's connection errors.

        - `leases`: requeue tasks of any model whose lease has lapsed; end those that crashed several workers.
        - `unread`: cancel tasks whose last reader has lapsed.
        - `moved`: apply what RQ's tools did to waiting tasks.
        - `overdue`: end tasks that have waited for `max_task_seconds` or for a limit of their own.
        - `registries`: drop expired ids from RQ's registries.
        - `expired`: remove tasks whose keys have expired from the lists of their tenants.
        - `strays`: find claims and workers without a valid lease.

        `reclaim_leases`: False keeps lapsed leases. `failed_seconds_ago`: how long ago a call of the caller
        to Redis failed, if one has since the last reaping; leases that lapsed in an outage are no crashes.
        """
        total: dict[str, list[Any]] = {one.name: [] for one in fields(Reaped)}
        for duty, call in self._duties(slug, max_task_seconds, reclaim_leases, failed_seconds_ago):
            for name, items in _isolated(duty, call).items():
                total[name] += to_failures(duty, items) if name == "failures" else texts(items)
        # Two duties may find remains of the same task.
        return Reaped(**{name: tuple(dict.fromkeys(items)) for name, items in total.items()})

    def _duties(
        self, slug: str, max_task_seconds: float, reclaim_leases: bool, failed_seconds_ago: float | None
    ) -> Iterator[tuple[str, Callable[[], _Result]]]:
        run = self._run
        max_wait_us = round(max_task_seconds * 1e6)
        overdue = (slug, max_wait_us, rq_keys.RESULT_FAILED, MAX_RECORDS, *script_errors.TIMEOUTS)
        yield "leases", lambda: self._leases(reclaim_leases, failed_seconds_ago)
        yield "unread", lambda: run("unread_tasks", ("cancelled", "failures"), MAX_RECORDS)
        yield "moved", lambda: run("rq_changes", ("cancelled", "lost", "failures"), slug, MAX_RECORDS)
        yield "overdue", lambda: run("overdue_tasks", ("timed_out", "failures"), *overdue)
        yield "registries", lambda: {"failures": self._scripts.run("reaping/rq_registries", slug)}
        yield "expired", lambda: run("expired_tasks", ("failures",), MAX_RECORDS)
        yield "strays", lambda: run("orphaned_claims", ("lost", "failures"), slug, MAX_RECORDS)

    def _leases(self, reclaim_leases: bool, failed_seconds_ago: float | None) -> _Result:
        failed = "" if failed_seconds_ago is None else failed_seconds_ago
        limit = MAX_RECORDS if reclaim_leases else 0
        names = ("returned", "cancelled", "poisoned", "lost", "failures")
        # Not repeated: if the call is late, Redis was away or its clock was set, and lapsed leases mean
        # nothing.
        return self._run(
            "lapsed_leases",
            names,
            limit,
            failed,
            *script_errors.POISON,
            rq_keys.RESULT_FAILED,
            repeat=False,
        )

    def _run(self, script: str, names: Sequence[str], *arguments: Any, repeat: bool = True) -> _Result:
        reply = self._scripts.run(f"reaping/{script}", *arguments, repeat=repeat)
        return dict(zip(names, reply, strict=True))


def _isolated(duty: str, call: Callable[[], _Result]) -> _Result:
    """The result of `call`. An error inside the script is a failure of this duty alone."""
    try:
        return call()
    except Exception as error:
        # Errors of the connection or of the server's state do not name a script.
        if _IN_SCRIPT not in str(error):
            raise
        return {"failures": (duty.encode(), str(error).encode())}
