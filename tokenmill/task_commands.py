"""`tokenmill submit`, `status` and `cancel`: a running service, seen from a shell.

Law: what was asked for goes to standard output and nothing else does, so that it can be piped.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import click

from tokenmill.client import Client
from tokenmill.config import BY_NAME, Part
from tokenmill.service_commands import resolved, setting_flags, state_of
from worker.protocol.messages import FinishedEvent

_json_flag = click.option("--json", "as_json", is_flag=True, help="print the task as JSON")


class NotCompleted(Exception):
    """The task ended, but not well."""


@click.command()
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="send the prompt as a user's message, in the model's chat format")
@click.option("--stream", is_flag=True, help="print the text as it comes")
@click.option("--wait", is_flag=True, help="print the text when the task has ended")
@click.option("--max-tokens", type=int, help="longest answer, in tokens")
@click.option("--temperature", type=float, help="0 always takes the likeliest token")
@click.option("--top-p", type=float, help="sample from the likeliest tokens that make up this share")
@click.option("--top-k", type=int, help="sample from so many of the likeliest tokens")
@click.option("--min-p", type=float, help="drop tokens below this share of the likeliest one's probability")
@click.option("--seed", type=int, help="the same seed gives the same answer")
@click.option("--stop", multiple=True, help="end before this text; may be given several times")
@click.option("--priority", type=int, help="0 to 4, lower goes first  [default: 2]")
@click.option("--model", help="the served model's public name, to be sure of it")
@_json_flag
@setting_flags(Part.CLIENT)
def submit(
    prompt: str | None,
    chat: bool,
    stream: bool,
    wait: bool,
    as_json: bool,
    config_file: str | None,
    url: str | None,
    **fields: Any,
) -> None:
    """Submit a task; print its id, or with --wait or --stream its text.

    The PROMPT is read from standard input if it is not given or is "-".

    \b
    Examples:
      tokenmill submit --stream --chat "What is the capital of France?"
      tokenmill submit --wait --max-tokens 20 --temperature 0 "Once upon a time"
      cat article.txt | tokenmill submit
    """
    if stream and (wait or as_json):
        raise click.UsageError("--stream goes with neither --wait nor --json")
    client = _client(url, config_file)
    task = client.submit(_body(_read_prompt(prompt), chat, fields))
    if stream:
        _print_stream(client, str(task["id"]))
    elif wait:
        task = client.wait(str(task["id"]))
        click.echo(_json(task) if as_json else _text(task))
        _require_completed(task)
    else:
        click.echo(_json(task) if as_json else task["id"])


@click.command()
@click.argument("task_id", metavar="ID")
@click.option("--wait", is_flag=True, help="wait until the task has ended")
@_json_flag
@setting_flags(Part.CLIENT)
def status(task_id: str, wait: bool, as_json: bool, config_file: str | None, url: str | None) -> None:
    """Show a task: its state, place in the queue, and the text so far.

    \b
    Examples:
      tokenmill status 0192f0c1a2b3...
      tokenmill status --wait --json 0192f0c1a2b3...
    """
    client = _client(url, config_file)
    task = client.wait(task_id) if wait else client.task(task_id)
    click.echo(_json(task) if as_json else _description(task))
    if wait:
        _require_completed(task)


@click.command()
@click.argument("task_id", metavar="ID")
@_json_flag
@setting_flags(Part.CLIENT)
def cancel(task_id: str, as_json: bool, config_file: str | None, url: str | None) -> None:
    """Cancel a task, waiting or running. One that has ended stays as it is.

    \b
    Examples:
      tokenmill cancel 0192f0c1a2b3...
    """
    task = _client(url, config_file).cancel(task_id)
    click.echo(_json(task) if as_json else task.get("status"))


def _client(url: str | None, config_file: str | None) -> Client:
    """For the address that is set, else that of the service that runs in this directory, else the default."""
    settings = resolved({"url": url}, config_file)
    host, port = (settings.get(name, BY_NAME[name].default) for name in ("host", "port"))
    address = settings.get("url") or state_of(settings).address("api-url")
    return Client(url=address or f"http://{host}:{port}")


def _read_prompt(given: str | None) -> str:
    if given not in (None, "-"):
        return str(given)
    if given is None and sys.stdin.isatty():
        raise click.UsageError('give a prompt, or "-" to type it on standard input')
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not {error.encoding} text") from None


def _body(prompt: str, chat: bool, fields: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in fields.items() if value is not None and value != ()}
    if chat:
        return {"messages": [{"role": "user", "content": prompt}], **given}
    return {"prompt": prompt, **given}


def _print_stream(client: Client, task_id: str) -> None:
    """The text as it comes. Left by Ctrl-C, the task goes on, and its id is told."""
    end: FinishedEvent | None = None
    try:
        for event in client.events(task_id):
            click.echo(event.text, nl=False)
            if isinstance(event, FinishedEvent):
                end = event
    except KeyboardInterrupt:
        click.echo(f"\nthe task goes on: tokenmill status {task_id}", err=True)
        raise
    click.echo()
    if end:
        _require_ended_well(end.finish_reason, end.error)


def _require_completed(task: Mapping[str, Any]) -> None:
    """Raises `NotCompleted`."""
    reason = "stop" if task.get("status") == "completed" else str(task.get("status"))
    _require_ended_well(reason, task.get("error"))


def _require_ended_well(reason: str, error: Mapping[str, Any] | None) -> None:
    if error:
        raise NotCompleted(f"the task failed: {error.get('message')} ({error.get('code')})")
    if reason not in ("stop", "length"):
        raise NotCompleted(f"the task ended as {reason}")


def _text(task: Mapping[str, Any]) -> str:
    return "\n\n".join(str(output.get("text", "")) for output in task.get("outputs") or ())


def _json(task: Mapping[str, Any]) -> str:
    return json.dumps(task, ensure_ascii=False, indent=2)


def _description(task: Mapping[str, Any]) -> str:
    """What is known of the task, a line each, and its text so far."""
    rows = "\n".join(f"{click.style(f'{name:<12}', bold=True)} {value}" for name, value in _rows(task))
    return f"{rows}\n\n{_text(task)}".rstrip()


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
