"""Checks what is left in Redis after all tasks have ended: only results and logs that expire.

A key without an expiry must be one of the few that are kept permanently.
"""

import re
from collections.abc import Iterator
from typing import Any

import redis

from tests.chaos.ledger import Problem, fewer_or_more
from tokenmill.protocol import keys
from tokenmill.protocol.messages import TokenEvent
from tokenmill.protocol.store.task_store import TaskStore

PERMANENT = re.compile(
    r"tokenmill:(clock|totals|model|shown|workers|ready|rule|tasks|ended):?.*"
    r"|rq:(queues|workers|finished|failed|canceled).*"
)
"""The number of these keys does not grow with the number of tasks."""
TRANSIENT = re.compile(
    r"tokenmill:(order|cost|queues|lines|heads|unserved|shares|waiting|tenants|leases|damaged).*"
    r"|rq:(queue|wip|execution|executions):.*|rq:worker:.*:executions"
    r"|.*[:_]lock\b.*|.*:intermediate.*|rq:clean_registries:.*"
)
"""Keys that do not exist while no task waits or runs."""


def is_quiet(client: "redis.Redis", slug: str) -> bool:
    """Whether no task waits or runs, by the service's own records."""
    stats = TaskStore(client).queue_stats(slug)
    return not client.zcard(keys.LEASES) and not sum(stats.waiting.values()) and not stats.claimed


def look(client: "redis.Redis", slug: str) -> list[Problem]:
    """Keys that should not exist, and totals that do not add up."""
    names = sorted(key.decode() for key in client.scan_iter(count=1000))
    return [
        *_key_problems(client, names),
        *_task_problems(client, names),
        *_list_problems(client, names),
        *_total_problems(client, slug, names),
    ]


def _key_problems(client: Any, names: list[str]) -> Iterator[Problem]:
    lifetimes = _ask(client, "pttl", names)
    for name, lifetime in zip(names, lifetimes, strict=True):
        if TRANSIENT.fullmatch(name):
            yield Problem("stuck", f"{name} is left over")
        elif lifetime == -1 and not PERMANENT.fullmatch(name):
            yield Problem("stuck", f"{name} is never deleted")


def _task_problems(client: Any, names: list[str]) -> Iterator[Problem]:
    """Includes tasks whose submission was stored but whose reply was lost."""
    runs = [name for name in names if name.startswith(keys.run(""))]
    for name, ended in zip(runs, _ask(client, "hget", runs, "terminal"), strict=True):
        if not ended:
            yield Problem("stuck", f"{name} has not ended")


def _list_problems(client: Any, names: list[str]) -> Iterator[Problem]:
    """The lists of tenants hold the tasks that exist, and those whose keys have just expired."""
    lists = [name for name in names if name.startswith(keys.tasks(""))]
    listed = {member.decode() for name in lists for member in client.zrange(name, 0, -1)}
    leaving = {member.decode().partition(":")[2] for member in client.zrange(keys.ENDED, 0, -1)}
    runs = {name.removeprefix(keys.run("")) for name in names if name.startswith(keys.run(""))}
    for task_id in sorted(runs - listed):
        yield Problem("lost", f"task {task_id} is not listed")
    for task_id in sorted(listed - runs - leaving):
        yield Problem("stuck", f"task {task_id} is listed and does not exist")


def _total_problems(client: Any, slug: str, names: list[str]) -> Iterator[Problem]:
    """Each task is counted once when submitted and once when finished, and each token once."""
    store = TaskStore(client)
    totals = store.queue_stats(slug).totals
    runs = [name.removeprefix(keys.run("")) for name in names if name.startswith(keys.run(""))]
    num_tokens = sum(isinstance(event, TokenEvent) for run in runs for event in store.read_log(run))
    finished = sum(number for name, number in totals.items() if name.startswith("finished:"))
    for what, found, expected in (
        ("tasks submitted", totals.get("submitted", 0), len(runs)),
        ("tasks finished", finished, len(runs)),
        ("tokens", totals.get("completion_tokens", 0), num_tokens),
    ):
        if found != expected:
            text = f"the totals have {found} {what}, there are {expected}"
            yield Problem(fewer_or_more(found, expected), text)


def _ask(client: Any, command: str, names: list[str], *arguments: Any) -> list[Any]:
    """The reply to one command for each key."""
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            getattr(pipeline, command)(name, *arguments)
        return list(pipeline.execute())
