"""`tokenmill top`: queue, workers and tasks, refreshed in the terminal."""

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenmill.cli.connection import client_of
from tokenmill.cli.console import terminal
from tokenmill.cli.service_commands import setting_flags
from tokenmill.client.errors import Broken, ServiceFailed, TooManyRequests, Unreachable
from tokenmill.client.sync_client import Client
from tokenmill.settings.declarations import ClientSettings

RECENT = 15
_PASSING = (Broken, ServiceFailed, TooManyRequests, Unreachable)


@click.command()
@click.option("--once", is_flag=True, help="print the state once; the default without a terminal")
@click.option("--interval", type=click.FloatRange(min=0.2), default=1.0, help="seconds between refreshes")
@setting_flags(ClientSettings)
# Each option is a parameter: click passes them by name.
def top(once: bool, interval: float, config_file: str | None, url: str | None, api_key: str | None) -> None:
    """Show the queue, the workers and your newest tasks. Ctrl-C leaves.

    \b
    Examples:
      tokenmill top
      tokenmill top --once
    """
    with client_of(url, api_key, config_file) as client:
        console = terminal()
        if once or not sys.stdout.isatty():
            console.print(_state(client))
            return
        with (
            Live(_state(client), console=console, screen=True, auto_refresh=False) as live,
            suppress(KeyboardInterrupt),
        ):
            for state in _states(client, interval):
                live.update(state, refresh=True)


def _states(client: Client, interval: float) -> Iterator[Group | Text]:
    """An outage is shown and bridged."""
    while True:
        time.sleep(interval)
        try:
            yield _state(client)
        except _PASSING as error:
            yield Text(f"{error}; trying again")


def _state(client: Client) -> Group:
    queue = client.queue()
    oldest = "-" if queue.oldest_seconds is None else f"{queue.oldest_seconds:.1f} s"
    rate = "-" if queue.drain_tokens_per_second is None else f"{queue.drain_tokens_per_second:.0f}"
    head = Text(
        f"{queue.model}: {queue.waiting} waiting ({queue.waiting_tokens} tokens, oldest {oldest}), "
        f"{queue.running} running, {queue.ready_workers} ready workers, {rate} tokens/s"
    )
    workers = Table(
        "worker", "state", "running", "waiting", "slots", "detail", title="Workers", title_justify="left"
    )
    for one in client.workers():
        workers.add_row(
            one.name, one.state, str(one.running), str(one.waiting), str(one.max_num_seqs), one.detail
        )
    tasks = Table(
        "task", "status", "tokens", "first token", "total", title="Your newest tasks", title_justify="left"
    )
    for task in islice(client.list(limit=RECENT), RECENT):
        usage, timings = task.usage, task.timings
        tokens = f"{usage.prompt_tokens} + {usage.completion_tokens}" if usage else "-"
        tasks.add_row(
            task.id, task.status, tokens, _seconds(timings.ttft_seconds), _seconds(timings.total_seconds)
        )
    return Group(head, workers, tasks)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
