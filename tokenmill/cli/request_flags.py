"""What a task asks for: flags of the command line, and the body that they come to. Knows no service.

Law: only what was given is sent. Ranges are the service's to check; it names the field.
"""

from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TypeVar

import click

from tokenmill.cli.text_streams import read_file

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--chat", is_flag=True, help="send the prompt as a user's message of a chat"),
    click.option("--max-tokens", type=int, help="longest answer, in tokens"),
    click.option("--min-tokens", type=int, help="shortest answer, in tokens"),
    click.option("-n", "--n", type=int, help="so many answers to one prompt"),
    click.option("--temperature", type=float, help="0 always takes the likeliest token"),
    click.option("--top-p", type=float, help="sample from the likeliest tokens that make up this share"),
    click.option("--top-k", type=int, help="sample from so many of the likeliest tokens"),
    click.option(
        "--min-p", type=float, help="drop tokens below this share of the likeliest one's probability"
    ),
    click.option("--presence-penalty", type=float, help="make tokens that were written less likely"),
    click.option("--frequency-penalty", type=float, help="the same, as often as they were written"),
    click.option("--repetition-penalty", type=float, help="above 1: the same, of the prompt's tokens too"),
    click.option("--seed", type=int, help="the same seed gives the same answer"),
    click.option("--stop", multiple=True, help="end before this text; may be given several times"),
    click.option("--json-schema", type=click.File("rb"), help="file of a JSON schema to keep to"),
    click.option("--regex", help="regular expression that the whole answer matches"),
    click.option("--choice", multiple=True, help="one of these answers; given several times"),
    click.option("--priority", type=int, help="0 to 4, lower goes first  [default: 2]"),
    click.option("--timeout", "timeout_seconds", type=float, help="end after so many seconds"),
    click.option(
        "--queue-timeout", "queue_timeout_seconds", type=float, help="end if not started in so many seconds"
    ),
    click.option(
        "--ttft-timeout", "ttft_timeout_seconds", type=float, help="end without a token in so many seconds"
    ),
    click.option("--model", help="the served model's public name, to be sure of it"),
)


def request_flags(command: _Command) -> _Command:
    """Give a command all flags that make a request."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def to_body(prompt: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The body of POST /v1/tasks. Raises `click.UsageError`."""
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    chat = given.pop("chat", False)
    body = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    constraints = {name: given.pop(flag) for flag, name in _CONSTRAINTS.items() if flag in given}
    if len(constraints) > 1:
        raise click.UsageError("give one of --json-schema, --regex and --choice")
    if constraints:
        given["structured_outputs"] = {name: _plain(value) for name, value in constraints.items()}
    return {**body, **given}


_CONSTRAINTS = {"json_schema": "json", "regex": "regex", "choice": "choice"}


def _plain(value: str | tuple[str, ...] | BinaryIO) -> str | list[str]:
    if isinstance(value, str):
        return value
    return list(value) if isinstance(value, tuple) else read_file(value)
