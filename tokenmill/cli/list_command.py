"""`tokenmill list`: the tasks of this API key."""

import time
from collections.abc import Sequence
from typing import Any

import click

from tokenmill.cli.connection import client_of, json_flag
from tokenmill.cli.service_commands import setting_flags
from tokenmill.cli.task_filters import filter_flags, to_filters
from tokenmill.cli.text_streams import to_json, write_stderr, write_stdout
from tokenmill.client.sync_client import TaskSummary
from tokenmill.settings.declarations import ClientSettings

DEFAULT_LIMIT = 20
_HEADINGS = ("ID", "STATUS", "AGE", "TOKENS", "SECONDS", "MODEL", "NOTE")
_COLOURS = {"completed": "green", "failed": "red", "cancelled": "yellow", "in_progress": "cyan"}


@click.command("list")
@filter_flags
@click.option(
    "--limit", type=click.IntRange(min=1), default=DEFAULT_LIMIT, show_default=True, help="number of tasks"
)
@json_flag
@setting_flags(ClientSettings)
# Each option is a parameter: click passes them by name.
def list_tasks(
    limit: int, as_json: bool, config_file: str | None, url: str | None, api_key: str | None, **flags: Any
) -> None:
    """List tasks, newest first: those that wait or run, and those that have ended and are still kept.

    TOKENS are those of the prompt and of the output, SECONDS from submission to the end.

    \b
    Examples:
      tokenmill list
      tokenmill list --status failed --since 1h
      tokenmill list --metadata user=ann --limit 100 --json
    """
    with client_of(url, api_key, config_file) as client:
        # One more, to see whether there are more.
        tasks = list(client.list(limit=limit + 1, **to_filters(**flags)))
    if as_json:
        write_stdout(to_json([task.to_json() for task in tasks[:limit]]))
    else:
        for line in table(tasks[:limit], time.time()):
            write_stdout(line)
    if len(tasks) > limit:
        write_stderr(f"there are more; --limit {10 * limit} shows up to {10 * limit}")


def table(tasks: Sequence[TaskSummary], now: float) -> list[str]:
    """A line of headings, and one for each task. `now`: seconds since the epoch."""
    rows = [_HEADINGS, *(_row(task, now) for task in tasks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = []
    for number, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        if number:
            cells[1] = click.style(cells[1], fg=_COLOURS.get(row[1]))
        else:
            cells = [click.style(cell, bold=True) for cell in cells]
        lines.append("  ".join(cells).rstrip())
    return lines


def _row(task: TaskSummary, now: float) -> tuple[str, ...]:
    usage, seconds = task.usage, task.timings.total_seconds
    return (
        task.id,
        task.status,
        age(now - task.created_at),
        f"{usage.prompt_tokens}+{usage.completion_tokens}" if usage else "-",
        "-" if seconds is None else f"{seconds:.1f}",
        task.model,
        task.error.code if task.error else "",
    )


def age(seconds: float) -> str:
    """A duration in the largest unit that it reaches."""
    seconds = max(0.0, seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
