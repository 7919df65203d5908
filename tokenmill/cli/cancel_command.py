"""`tokenmill cancel`: one task, or all that wait or run."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from tokenmill.cli.connection import check_id, client_of, json_flag
from tokenmill.cli.service_commands import setting_flags
from tokenmill.cli.task_filters import filter_flags, to_filters
from tokenmill.cli.text_streams import to_json, write_stderr, write_stdout
from tokenmill.client.errors import NotFound
from tokenmill.client.parameters import Status, TaskFilters
from tokenmill.client.sync_client import Client, Task, TaskSummary
from tokenmill.settings.declarations import ClientSettings

_ACTIVE: tuple[Status, ...] = ("queued", "in_progress")
_THREADS = 4


@click.command()
@click.argument("task_id", metavar="ID", required=False)
@click.option("--all", "every", is_flag=True, help="cancel every waiting and running task of this API key")
@filter_flags
@click.option("--yes", is_flag=True, help="do not ask for confirmation")
@json_flag
@setting_flags(ClientSettings)
# Each option is a parameter: click passes them by name.
def cancel(
    task_id: str | None,
    every: bool,
    yes: bool,
    as_json: bool,
    config_file: str | None,
    url: str | None,
    api_key: str | None,
    **flags: Any,
) -> None:
    """Cancel a waiting or running task, or with --all every one. A task that has ended is not changed.

    The filters narrow --all. The output so far is kept.

    \b
    Examples:
      tokenmill cancel 0192f0c1a2b3...
      tokenmill cancel --all
      tokenmill cancel --all --status queued --metadata user=ann --yes
    """
    filters = to_filters(**flags)
    if every == (task_id is not None):
        raise click.UsageError("give the id of a task, or --all")
    if filters and not every:
        raise click.UsageError("filters need --all")
    if filters.get("status", "queued") not in _ACTIVE:
        raise click.UsageError("only a task that is queued or in_progress can be cancelled")
    with client_of(url, api_key, config_file) as client:
        if task_id is not None:
            task = client.cancel(check_id(task_id))
            write_stdout(to_json(task.to_json()) if as_json else task.status)
            return
        _cancel_all(client, filters, yes=yes, as_json=as_json)


def _cancel_all(client: Client, filters: TaskFilters, *, yes: bool, as_json: bool) -> None:
    """Prints the ids of the cancelled tasks as they are cancelled, or at the end all of them as JSON."""
    tasks = list(_active(client, filters))
    if tasks and not yes:
        _confirm(f"cancel {len(tasks)} task{'s' if len(tasks) > 1 else ''}?")
    cancelled: list[Task] = []
    with ThreadPoolExecutor(_THREADS) as threads:
        for task in filter(None, threads.map(_cancelled, tasks)):
            cancelled.append(task)
            if not as_json:
                write_stdout(task.id)
    if as_json:
        write_stdout(to_json([task.to_json() for task in cancelled]))
    write_stderr(f"{len(cancelled)} cancelled, {len(tasks) - len(cancelled)} had ended")


def _active(client: Client, filters: TaskFilters) -> Iterator[TaskSummary]:
    """Waiting tasks first: while they exist, none of them takes the place of a running one."""
    seen: set[str] = set()
    for status in _ACTIVE:
        if filters.get("status") in (None, status):
            selected: TaskFilters = {**filters, "status": status}
            # A task may start between the two lists.
            new = [task for task in client.list(**selected) if task.id not in seen]
            seen.update(task.id for task in new)
            yield from new


def _cancelled(task: TaskSummary) -> Task | None:
    """The task, or None if it had ended."""
    try:
        ended = task.cancel()
    except NotFound:
        return None
    return ended if ended.status == "cancelled" else None


def _confirm(question: str) -> None:
    """Raises `click.UsageError` without a terminal, and `click.Abort` if the answer is no."""
    if not is_terminal():
        raise click.UsageError(f"{question} Without a terminal to ask, add --yes")
    click.confirm(question, abort=True, err=True)


def is_terminal() -> bool:
    """Whether a person can answer."""
    return sys.stdin is not None and sys.stdin.isatty()
