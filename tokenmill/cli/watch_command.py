"""`tokenmill watch`: follows a task that was submitted before."""

import sys

import click

from tokenmill.cli.connection import client_of, id_argument, json_flag
from tokenmill.cli.service_commands import setting_flags
from tokenmill.cli.task_output import check_completed, print_stream
from tokenmill.cli.text_streams import write_stderr
from tokenmill.client.sync_client import Client, Task
from tokenmill.settings.declarations import ClientSettings

POLL_SECONDS = 2.0
"""How often the position in the queue is refreshed."""


@click.command()
@id_argument
@click.option(
    "--after", type=click.IntRange(min=-1), default=-1, metavar="SEQ", help="only what follows this event"
)
@json_flag
@setting_flags(ClientSettings)
# Each option is a parameter: click passes them by name.
def watch(
    task_id: str, after: int, as_json: bool, config_file: str | None, url: str | None, api_key: str | None
) -> None:
    """Follow a task: its position while it waits, then its text so far and as it is generated.

    With --json each event is a line of JSON; --after goes on after the `seq` of the last one. If the command
    is interrupted, the task continues.

    \b
    Examples:
      tokenmill watch 0192f0c1a2b3...
      tokenmill watch --json --after 57 0192f0c1a2b3... | jq .text
    """
    with client_of(url, api_key, config_file) as client:
        task = _started(client, task_id)
        print_stream(task, len(task.outputs), after=after, as_json=as_json)
        done = task.wait()
    write_stderr(_summary(done))
    check_completed(done)


def _started(client: Client, task_id: str) -> Task:
    """The task, once it does not wait. Meanwhile a terminal shows its position."""
    with _StatusLine() as show:
        task = client.get(task_id)
        while task.queue and not task.has_ended and show.is_shown:
            show(_position(task))
            task = client.get(task_id, wait=POLL_SECONDS)
    return task


def _position(task: Task) -> str:
    queue = task.queue
    assert queue is not None
    parts = [f"waiting for {queue.waiting_for}" if queue.waiting_for else "waiting"]
    if queue.position is not None:
        parts.append(f"{queue.position} before it")
    if queue.eta_seconds is not None:
        parts.append(f"about {queue.eta_seconds:.0f} s")
    return ", ".join(parts)


def _summary(task: Task) -> str:
    parts = [task.status]
    if task.usage:
        parts.append(f"{task.usage.prompt_tokens} + {task.usage.completion_tokens} tokens")
    if task.timings.total_seconds is not None:
        parts.append(f"{task.timings.total_seconds:.3f} s")
    return f"task {task.id}: {', '.join(parts)}"


class _StatusLine:
    """A line on standard error that is replaced. `is_shown`: standard error is a terminal."""

    def __init__(self) -> None:
        self.is_shown = is_terminal()
        self._is_written = False

    def __call__(self, text: str) -> None:
        click.echo(f"\r\033[K{text}", nl=False, err=True)
        self._is_written = True

    def __enter__(self) -> "_StatusLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_written:
            click.echo("\r\033[K", nl=False, err=True)


def is_terminal() -> bool:
    """Whether standard error shows a line that is replaced."""
    return sys.stderr is not None and sys.stderr.isatty()
