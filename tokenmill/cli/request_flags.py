"""The command-line flags of a request, and the body that they form.

Only flags that are set are sent. The service checks the values and names the field.
"""

from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TypeVar

import click

from tokenmill.cli.text_streams import read_file

_Command = TypeVar("_Command", bound=Callable[..., Any])

_CONSTRAINTS = {"json_schema": "json", "regex": "regex", "choice": "choice"}
"""Flag -> field of `structured_outputs`."""
_OPTIONS = (
    click.option("--chat", is_flag=True, help="send the prompt as a user message of a chat"),
    click.option("--max-tokens", type=int, help="maximum number of output tokens"),
    click.option("--min-tokens", type=int, help="minimum number of output tokens"),
    click.option("-n", "--n", type=int, help="number of outputs for the prompt"),
    click.option("--temperature", type=float, help="0 always chooses the most likely token"),
    click.option(
        "--top-p", type=float, help="sample from the most likely tokens that reach this probability"
    ),
    click.option("--top-k", type=int, help="sample from this many of the most likely tokens"),
    click.option("--min-p", type=float, help="drop tokens below this share of the top token's probability"),
    click.option("--presence-penalty", type=float, help="penalty for tokens already in the output"),
    click.option("--frequency-penalty", type=float, help="the same, for each time they occur"),
    click.option(
        "--repetition-penalty", type=float, help="above 1: penalty for tokens in the prompt or the output"
    ),
    click.option("--seed", type=int, help="the same seed produces the same output"),
    click.option("--stop", multiple=True, help="end the output before this text; repeatable"),
    click.option("--json-schema", type=click.File("rb"), help="file with a JSON schema for the output"),
    click.option("--regex", help="regular expression that the whole output matches"),
    click.option("--choice", multiple=True, help="an allowed output; repeatable"),
    click.option("--priority", type=int, help="0 to 4, lower runs first  [default: 2]"),
    click.option("--timeout", "timeout_seconds", type=float, help="end the task after this many seconds"),
    click.option(
        "--queue-timeout", "queue_timeout_seconds", type=float, help="the same if it has not started by then"
    ),
    click.option(
        "--ttft-timeout", "ttft_timeout_seconds", type=float, help="the same if it has no token by then"
    ),
    click.option("--model", help="refuse to run on another model than this one (its public name)"),
)


def request_flags(command: _Command) -> _Command:
    """Add the flags of a request to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def to_body(prompt: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The body of POST /v1/tasks. Raises `click.UsageError`."""
    fields = {name: value for name, value in flags.items() if value is not None and value != ()}
    chat = fields.pop("chat", False)
    body = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    constraints = {name: fields.pop(flag) for flag, name in _CONSTRAINTS.items() if flag in fields}
    if len(constraints) > 1:
        raise click.UsageError("use only one of --json-schema, --regex and --choice")
    if constraints:
        fields["structured_outputs"] = {name: _plain(value) for name, value in constraints.items()}
    return {**body, **fields}


def _plain(value: str | tuple[str, ...] | BinaryIO) -> str | list[str]:
    if isinstance(value, str):
        return value
    return list(value) if isinstance(value, tuple) else read_file(value)
