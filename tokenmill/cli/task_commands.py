"""`tokenmill submit`, `status` and `cancel`: clients of a running service.

Only results go to standard output, so that it can be piped. `submit` prints the id of its task to standard
error first, so that the id is known if anything fails later.
"""

import sys
from collections.abc import Mapping
from typing import Any

import click

from tokenmill.cli.request_flags import request_flags, to_body
from tokenmill.cli.service_commands import load_settings, setting_flags, state_of
from tokenmill.cli.text_streams import read_standard_input, to_json, write_stderr, write_stdout
from tokenmill.client.http import Client
from tokenmill.client.texts import StreamedTexts, texts
from tokenmill.protocol.messages import FinishedEvent
from tokenmill.settings.declarations import ClientCommandSettings, ClientSettings
from tokenmill.settings.errors import SettingError

_json_flag = click.option("--json", "as_json", is_flag=True, help="print the task as JSON")


class NotCompleted(Exception):
    """The task ended, but did not complete."""


@click.command()
@click.argument("prompt", required=False)
@click.option("--stream", is_flag=True, help="print the text while it is generated")
@click.option("--wait", is_flag=True, help="wait until the task has ended and print its text")
@request_flags
@_json_flag
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
    client = _client(url, api_key, config_file)
    task = client.submit(to_body(_read_prompt(prompt), flags))
    write_stderr(f"task {task['id']}")
    if stream:
        _print_stream(client, str(task["id"]), flags.get("n") or 1)
    elif wait:
        task = client.wait(str(task["id"]))
        write_stdout(to_json(task) if as_json else texts(task))
        _check_completed(task)
    else:
        write_stdout(to_json(task) if as_json else str(task["id"]))


def _check_id(_context: click.Context, _parameter: click.Parameter, task_id: str) -> str:
    """Refuse an empty id, as from an unset shell variable, and one with a slash: both change the path."""
    if not task_id.strip() or "/" in task_id:
        raise click.UsageError(f"{task_id!r} is not the id of a task")
    return task_id


@click.command()
@click.argument("task_id", metavar="ID", callback=_check_id)
@click.option("--wait", is_flag=True, help="wait until the task has ended")
@_json_flag
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
    client = _client(url, api_key, config_file)
    task = client.wait(task_id) if wait else client.task(task_id)
    write_stdout(to_json(task) if as_json else _describe(task))
    if wait:
        _check_completed(task)


@click.command()
@click.argument("task_id", metavar="ID", callback=_check_id)
@_json_flag
@setting_flags(ClientSettings)
def cancel(
    task_id: str, as_json: bool, config_file: str | None, url: str | None, api_key: str | None
) -> None:
    """Cancel a waiting or running task. A task that has ended is not changed.

    \b
    Examples:
      tokenmill cancel 0192f0c1a2b3...
    """
    task = _client(url, api_key, config_file).cancel(task_id)
    write_stdout(to_json(task) if as_json else str(task.get("status")))


def _client(url: str | None, api_key: str | None, config_file: str | None) -> Client:
    """A client of the configured address, else of the service that runs in this directory."""
    settings = load_settings(ClientCommandSettings, {"url": url, "api_key": api_key}, config_file)
    address = settings.url or state_of(settings).address("api-url")
    try:
        return Client(url=address or f"http://{settings.host}:{settings.port}", api_key=settings.api_key)
    except ValueError as error:
        raise SettingError(str(error)) from None


def _read_prompt(argument: str | None) -> str:
    if argument not in (None, "-"):
        return str(argument)
    if argument is None and sys.stdin is not None and sys.stdin.isatty():
        raise click.UsageError('give a prompt, or "-" to type it on standard input')
    return read_standard_input()


def _print_stream(client: Client, task_id: str, num_outputs: int) -> None:
    """Print the texts while they are generated. If interrupted, the task continues; print its id again."""
    streamed = StreamedTexts(num_outputs)
    ends: list[FinishedEvent] = []
    try:
        for event in client.events(task_id):
            for piece in streamed.add(event):
                write_stdout(piece, end="")
            if isinstance(event, FinishedEvent):
                ends.append(event)
    except (KeyboardInterrupt, BrokenPipeError):
        write_stderr(f"\nthe task continues: tokenmill status {task_id}")
        raise
    write_stdout("")
    for end in ends:
        _check_end(end.finish_reason, end.error)


def _check_completed(task: Mapping[str, Any]) -> None:
    """Raises `NotCompleted`."""
    reason = "stop" if task.get("status") == "completed" else str(task.get("status"))
    _check_end(reason, task.get("error"))


def _check_end(reason: str, error: Mapping[str, Any] | None) -> None:
    """Raises `NotCompleted`."""
    if error:
        raise NotCompleted(f"the task failed: {error.get('message')} ({error.get('code')})")
    if reason not in ("stop", "length"):
        raise NotCompleted(f"the task ended as {reason}")


def _describe(task: Mapping[str, Any]) -> str:
    """A table of the task's fields, and its text so far."""
    rows = "\n".join(f"{click.style(f'{name:<12}', bold=True)} {value}" for name, value in _rows(task))
    return f"{rows}\n\n{texts(task)}".rstrip()


def _rows(task: Mapping[str, Any]) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [(name, task.get(name)) for name in ("id", "status", "model")]
    if queue := task.get("queue"):
        rows += [(name, queue[name]) for name in queue if queue[name] is not None]
    usage, timings = task.get("usage") or {}, task.get("timings") or {}
    if usage:
        rows.append(("tokens", f"{usage.get('prompt_tokens')} + {usage.get('completion_tokens')}"))
    rows += [(name, f"{seconds:.3f} s") for name, seconds in timings.items() if seconds is not None]
    if error := task.get("error"):
        rows.append(("error", f"{error.get('message')} ({error.get('code')})"))
    return [(name.removesuffix("_seconds").replace("_", " "), value) for name, value in rows]
