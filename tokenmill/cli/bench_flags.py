"""The command-line flags of `tokenmill bench`."""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from tokenmill.bench.backends import BACKENDS
from tokenmill.bench.figures import METRICS
from tokenmill.bench.prompts import Lengths

_Command = TypeVar("_Command", bound=Callable[..., Any])
DEFAULT_CONCURRENCY, DEFAULT_REQUESTS = 16, 100


class _LengthsType(click.ParamType[Lengths]):
    name = "N|MIN-MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        if isinstance(value, Lengths):
            return value
        found = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", str(value))
        lengths = Lengths(int(found[1]), int(found[2] or found[1])) if found else Lengths(0, 0)
        if not 1 <= lengths.minimum <= lengths.maximum:
            self.fail(f"{value!r} is not a number from 1, or a range such as 16-256", param, ctx)
        return lengths


class _SloType(click.ParamType[tuple[str, float]]):
    name = "NAME:MILLISECONDS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float]:
        name, _, limit = str(value).partition(":")
        if name not in METRICS or not re.fullmatch(r"[0-9]+([.][0-9]+)?", limit):
            self.fail(
                f"{value!r} is not one of {', '.join(METRICS)} with milliseconds, as ttft:500", param, ctx
            )
        return name, float(limit) / 1000


class _BodyType(click.ParamType[dict[str, Any]]):
    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        try:
            fields = json.loads(value)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            self.fail("not a JSON object", param, ctx)
        return fields


_POSITIVE = click.FloatRange(min=0, min_open=True)
_OPTIONS = (
    click.option(
        "--backend", type=click.Choice(list(BACKENDS)), default="tokenmill", show_default=True,
        help="tokenmill: /v1/tasks and events; openai: /v1/completions; openai-chat: /v1/chat/completions",
    ),
    click.option("--model", help="model to ask for  [default: the first of /v1/models]"),
    click.option("--rate", type=_POSITIVE, metavar="R", help="requests per second, a Poisson process"),
    click.option(
        "--concurrency", type=click.IntRange(min=1), metavar="N",
        help=f"requests at a time  [default: {DEFAULT_CONCURRENCY}; with --rate no limit]",
    ),
    click.option(
        "--requests", "num_requests", type=click.IntRange(min=1), metavar="N",
        help=f"how many requests  [default: {DEFAULT_REQUESTS}; with --duration no limit]",
    ),
    click.option("--duration", type=_POSITIVE, metavar="S", help="start no request after so many seconds"),
    click.option(
        "--warm-up", type=click.IntRange(min=0), default=0, metavar="N",
        help="send so many requests first, which do not count",
    ),
    click.option(
        "--input-len", type=_LengthsType(), default="128", show_default=True,
        help="words of a synthetic prompt, about one token each",
    ),
    click.option(
        "--output-len", type=_LengthsType(), default="128", show_default=True,
        help="output tokens; with --prompts the maximum where a line has none",
    ),
    click.option(
        "--prompts", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
        help='lines of text, or of JSON with "prompt" or "messages"',
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="of prompts, lengths and moments"),
    click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True),
    click.option(
        "--ignore-eos/--no-ignore-eos", default=None,
        help="generate to the full length  [default: with synthetic prompts]",
    ),
    click.option("--body", type=_BodyType(), default="{}", help="further fields of each request"),
    click.option(
        "--goodput", type=_SloType(), multiple=True,
        help=f"count requests that take at most this; repeatable. Names: {', '.join(METRICS)}",
    ),
    click.option(
        "--request-timeout", type=_POSITIVE, default=600.0, show_default=True, metavar="S",
        help="a request fails after so many seconds",
    ),
    click.option("--json", "json_file", metavar="FILE", help="write the figures; - prints them"),
    click.option("--html", "html_file", metavar="FILE", help="write a page with figures and plots"),
)  # fmt: skip


def bench_flags(command: _Command) -> _Command:
    """Add the flags of a load to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
