"""The command-line flags that select tasks, and the filters that they form."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, get_args

import click

from tokenmill.client.parameters import Status, TaskFilters

_Command = TypeVar("_Command", bound=Callable[..., Any])
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _moment(_context: click.Context, _parameter: click.Parameter, ago: str | None) -> float | None:
    """Seconds since the epoch of a moment that is a duration such as 30m ago."""
    if ago is None:
        return None
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", ago)
    if not found:
        raise click.BadParameter(f"{ago!r} is not a duration such as 90s, 30m, 12h or 7d")
    return time.time() - int(found[1]) * _UNITS[found[2]]


def _members(_context: click.Context, _parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    members = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE")
        members[key] = text
    return members


_OPTIONS = (
    click.option("--status", type=click.Choice(get_args(Status)), help="only tasks of this status"),
    click.option("--model", help="only tasks of this model (its public name)"),
    click.option(
        "--metadata", callback=_members, multiple=True, metavar="KEY=VALUE",
        help="only tasks with this member in their metadata; repeatable",
    ),
    click.option("--since", callback=_moment, metavar="AGO", help="only tasks since then, such as 30m"),
    click.option("--until", callback=_moment, metavar="AGO", help="only tasks until then, such as 7d"),
)  # fmt: skip


def filter_flags(command: _Command) -> _Command:
    """Add the flags that select tasks to a command. They form a parameter for `to_filters`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def to_filters(
    *,
    status: str | None,
    model: str | None,
    metadata: Mapping[str, str],
    since: float | None,
    until: float | None,
) -> TaskFilters:
    """The filters that are set."""
    filters: TaskFilters = {}
    if status:
        filters["status"] = cast(Status, status)
    if model:
        filters["model"] = model
    if metadata:
        filters["metadata"] = metadata
    if since is not None:
        filters["created_after"] = since
    if until is not None:
        filters["created_before"] = until
    return filters
