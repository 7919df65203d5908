"""`tokenmill submit` and `status`: clients of a running service.

Only results go to standard output, so that it can be piped. `submit` prints the id of its task to standard
error first, so that the id is known if anything fails later.
"""

import sys
import uuid
from collections.abc import Mapping
from typing import Any

import click

from tokenmill.cli.connection import client_of, id_argument, json_flag
from tokenmill.cli.request_flags import request_flags, to_body
from tokenmill.cli.service_commands import setting_flags
from tokenmill.cli.task_output import check_completed, print_stream
from tokenmill.cli.text_streams import read_standard_input, to_json, write_stderr, write_stdout
from tokenmill.client.errors import Broken
from tokenmill.client.sync_client import Client, Task
from tokenmill.client.texts import texts
from tokenmill.settings.declarations import ClientSettings


@click.command()
@click.argument("prompt", required=False)
@click.option("--stream", is_flag=True, help="print the text while it is generated")
@click.option("--wait", is_flag=True, help="wait until the task has ended and print its text")
@request_flags
@json_flag
@setting_flags(ClientSettings)
# Each option is a parameter: click passes them by name.
def submit(
    prompt: str | None,
    stream: bool,
    wait: bool,
    as_json: bool,
    config_file: str | None,
    url: str | None,
    api_key: str | None,
    **flags: Any,
) -> None:
    """Submit a task and print its id, or with --wait or --stream its text. The id is also on standard error.

    PROMPT is read from standard input if it is missing or "-".

    \b
    Examples:
      tokenmill submit --stream --chat --temperature 0 "What is the capital of France?"
      tokenmill submit --wait --max-tokens 20 --temperature 0 "Once upon a time"
      tokenmill submit --wait -n 3 --choice red --choice green "The best colour is"
      cat article.txt | tokenmill submit
    """
    if stream and (wait or as_json):
        raise click.UsageError("--stream cannot be combined with --wait or --json")
    with client_of(url, api_key, config_file) as client:
        task = _submit(client, to_body(_read_prompt(prompt), flags))
        write_stderr(f"task {task.id}")
        if stream:
            print_stream(task, flags.get("n") or 1)
        elif wait:
            task = task.wait()
            write_stdout(to_json(task.to_json()) if as_json else texts(task))
            check_completed(task)
        else:
            write_stdout(to_json(task.to_json()) if as_json else task.id)


def _submit(client: Client, body: Mapping[str, Any]) -> Task:
    """A submission without a reply is repeated once. Its key prevents a second task."""
    key = uuid.uuid4().hex
    try:
        return client.submit(idempotency_key=key, **body)
    except Broken:
        return client.submit(idempotency_key=key, **body)


@click.command()
@id_argument
@click.option("--wait", is_flag=True, help="wait until the task has ended")
@json_flag
@setting_flags(ClientSettings)
def status(
    task_id: str, wait: bool, as_json: bool, config_file: str | None, url: str | None, api_key: str | None
) -> None:
    """Show a task: its state, its position in the queue, and its text so far.

    \b
    Examples:
      tokenmill status 0192f0c1a2b3...
      tokenmill status --wait --json 0192f0c1a2b3...
    """
    with client_of(url, api_key, config_file) as client:
        task = client.wait(task_id) if wait else client.get(task_id)
    write_stdout(to_json(task.to_json()) if as_json else _describe(task))
    if wait:
        check_completed(task)


def _read_prompt(argument: str | None) -> str:
    if argument not in (None, "-"):
        return str(argument)
    if argument is None and sys.stdin is not None and sys.stdin.isatty():
        raise click.UsageError('give a prompt, or "-" to type it on standard input')
    return read_standard_input()


def _describe(task: Task) -> str:
    """A table of the task's fields, and its text so far."""
    rows = "\n".join(f"{click.style(f'{name:<12}', bold=True)} {value}" for name, value in _rows(task))
    return f"{rows}\n\n{texts(task)}".rstrip()


def _rows(task: Task) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [("id", task.id), ("status", task.status), ("model", task.model)]
    if task.queue:
        rows += [(name, value) for name, value in task.queue.to_json().items() if value is not None]
    if task.usage:
        rows.append(("tokens", f"{task.usage.prompt_tokens} + {task.usage.completion_tokens}"))
    timings = task.timings.to_json().items()
    rows += [(name, f"{seconds:.3f} s") for name, seconds in timings if seconds is not None]
    if task.error:
        rows.append(("error", f"{task.error.message} ({task.error.code})"))
    return [(name.removesuffix("_seconds").replace("_", " "), value) for name, value in rows]
