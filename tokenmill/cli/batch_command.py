"""`tokenmill batch`: a file of requests, done by the service as one batch, which survives everything here."""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tokenmill.cli.connection import client_of
from tokenmill.cli.console import terminal
from tokenmill.cli.service_commands import setting_flags
from tokenmill.cli.task_output import TaskNotCompleted
from tokenmill.cli.text_streams import CannotWrite, decode_text, write_stderr
from tokenmill.client.batches.sync_batches import Batch
from tokenmill.client.errors import Broken, Unreachable
from tokenmill.client.sync_client import Client
from tokenmill.settings.declarations import ClientSettings

POLL_SECONDS = 1.0
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_INPUT = "tokenmill_input"
"""Metadata of a batch: the digest of its input, by which a second run finds it."""


@click.command()
@click.argument("input_file", metavar="IN.jsonl", type=click.File("rb"))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="where to write the results"
)
@click.option("--max-tokens", type=int, help="for lines that do not set it")
@click.option("--temperature", type=float, help="for lines that do not set it")
@setting_flags(ClientSettings)
# Each option is a parameter: click passes them by name.
def batch(
    input_file: Any,
    output: Path,
    config_file: str | None,
    url: str | None,
    api_key: str | None,
    **defaults: Any,
) -> None:
    """Run all requests of a file and write their results, one line each.

    A line is one of OpenAI's batch format, an object with "prompt" or "messages", or a plain text. The
    service does the work: if this command is interrupted, run it again with the same file, and it continues.
    Results have the format of OpenAI's batch output; `custom_id` is the line's, or its number from 0.

    \b
    Examples:
      tokenmill batch requests.jsonl -o results.jsonl
      tokenmill batch questions.txt -o answers.jsonl --max-tokens 100 --temperature 0
    """
    if output.exists():
        raise click.UsageError(f"{output} exists: remove it, or name another file")
    data = input_file.read()
    lines = list(_lines(decode_text(data, input_file.name)))
    if not lines:
        raise click.UsageError(f"{input_file.name} has no requests")
    digest = hashlib.sha256(data + json.dumps(defaults).encode()).hexdigest()
    with client_of(url, api_key, config_file) as client:
        running = _find(client, digest) or _create(client, lines, digest, defaults)
        write_stderr(f"batch {running.id}")
        done = _wait(client, running)
        failed = _write(done, output)
    if done.status != "completed" or failed:
        raise TaskNotCompleted(
            f"the batch is {done.status}; {failed} of {len(lines)} requests failed: see {output}"
        )


def _lines(text: str) -> Iterator[dict[str, Any]]:
    """Raises `click.UsageError` with the number of the line."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            yield {"prompt": line}
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise click.UsageError(f"line {number} is not JSON: {error}") from None
        if not isinstance(value, dict) or not {"body", "prompt", "messages"} & value.keys():
            raise click.UsageError(f'line {number} has none of "body", "prompt" and "messages"')
        yield value


def _create(client: Client, lines: list[dict[str, Any]], digest: str, defaults: dict[str, Any]) -> Batch:
    """Start the batch, whose endpoint is that of all lines. Raises `click.UsageError` if they differ."""
    endpoints = [_endpoint(line) for line in lines]
    for number, endpoint in enumerate(endpoints, 1):
        if endpoint != endpoints[0]:
            raise click.UsageError(
                f"request {number} is for {endpoint}, the first one for {endpoints[0]}: split the file"
            )
    (model, *_) = client.models()
    set_defaults = {name: value for name, value in defaults.items() if value is not None}
    filled = [_filled(line, {"model": model.id, **set_defaults}) for line in lines]
    return client.batches.create(filled, endpoint=endpoints[0], metadata={_INPUT: digest})


def _endpoint(line: dict[str, Any]) -> str:
    if "body" in line:
        return str(line.get("url", CHAT))
    return CHAT if "messages" in line else TEXT


def _filled(line: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    return {**line, "body": {**defaults, **line["body"]}} if "body" in line else {**defaults, **line}


def _find(client: Client, digest: str) -> Batch | None:
    """The batch of an earlier run with the same input that has not failed."""
    for one in client.batches.list():
        if (one.metadata or {}).get(_INPUT) == digest and one.status not in (
            "failed",
            "cancelled",
            "expired",
        ):
            return one
    return None


def _wait(client: Client, running: Batch) -> Batch:
    """The batch once it has ended. An outage of the service is bridged. Shows progress in a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = terminal(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(running.status, total=None)
        while not running.has_ended:
            time.sleep(POLL_SECONDS)
            try:
                running = client.batches.get(running.id)
            except (Broken, Unreachable) as error:
                progress.update(bar, description=f"{error}; trying again")
                continue
            counts = running.request_counts
            done = counts.completed + counts.failed if counts else 0
            progress.update(
                bar, description=running.status, completed=done, total=counts.total if counts else None
            )
    return running


def _write(done: Batch, output: Path) -> int:
    """Write all results, or nothing. Returns how many are errors."""
    part = output.with_name(f"{output.name}.part")
    failed = 0
    try:
        with part.open("w", encoding="utf-8") as file:
            for result in done.results():
                failed += not result.succeeded
                file.write(json.dumps(result.to_json(), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(output)
    except OSError as error:
        raise CannotWrite(f"{output} cannot be written: {error.strerror}") from None
    for problem in done.errors.data if done.errors else ():
        write_stderr(f"line {problem.line}: {problem.message}" if problem.line else str(problem.message))
    return failed
