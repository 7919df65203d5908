"""`tokenmill bench`: a load on Tokenmill or any OpenAI-compatible server, and how long it took to answer."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tokenmill.bench.backends import BACKENDS
from tokenmill.bench.figures import figures
from tokenmill.bench.load import LoadShape, run_load
from tokenmill.bench.outcomes import Load, Outcome
from tokenmill.bench.prompts import Lengths, Request, UnusablePrompts, from_file, synthetic
from tokenmill.cli.bench_flags import DEFAULT_CONCURRENCY, DEFAULT_REQUESTS, bench_flags
from tokenmill.cli.bench_report import write_report
from tokenmill.cli.connection import address_of
from tokenmill.cli.console import terminal
from tokenmill.cli.service_commands import setting_flags
from tokenmill.client.errors import Unreachable
from tokenmill.settings.declarations import ClientSettings


@click.command()
@bench_flags
@setting_flags(ClientSettings)
# Each option is a parameter: click passes them by name.
def bench(config_file: str | None, url: str | None, api_key: str | None, **flags: Any) -> None:
    """Measure a server under load: time to first token, time between tokens, throughput, goodput.

    Sends streaming requests, either at a rate (--rate, a Poisson process) or from a number of clients that
    each send one request after another (--concurrency). Prompts are synthetic, with lengths in words of about
    one token, or come from a file. With the same seed every server gets the same requests at the same times.

    \b
    Examples:
      tokenmill bench
      tokenmill bench --rate 4 --duration 60 --goodput ttft:500 --goodput tpot:50
      tokenmill bench --concurrency 64 --input-len 16-256 --output-len 16-128 --html report.html
      tokenmill bench --backend openai --url http://localhost:8001 --model my-model --json peer.json
      tokenmill bench --backend openai-chat --prompts chats.jsonl
    """
    address, key = address_of(url, api_key, config_file)
    base = address.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    requests = _requests(flags)
    shape = _shape(flags)
    model = flags["model"] or _served_model(base, headers)
    backend = BACKENDS[flags["backend"]](url=base, model=model, fields=_fields(flags))
    with _progress(shape) as advance:
        load = asyncio.run(_interruptible(run_load(shape, backend, requests, advance, headers)))
    measured = figures(load, dict(flags["goodput"]))
    head = {"server": base, "backend": backend.name, "model": model, "load": _describe(shape)}
    write_report(head, measured, load, json_file=flags["json_file"], html_file=flags["html_file"])
    if load.interrupted:
        raise KeyboardInterrupt
    if not measured["requests"]["completed"]:
        raise click.ClickException("no request completed")


def _shape(flags: Mapping[str, Any]) -> LoadShape:
    rate, concurrency, limit = flags["rate"], flags["concurrency"], flags["num_requests"]
    return LoadShape(
        rate=rate,
        concurrency=concurrency or (None if rate else DEFAULT_CONCURRENCY),
        num_requests=limit or (None if flags["duration"] else DEFAULT_REQUESTS),
        seconds=flags["duration"],
        warm_up=flags["warm_up"],
        timeout=flags["request_timeout"],
        seed=flags["seed"],
    )


def _requests(flags: Mapping[str, Any]) -> Iterator[Request]:
    outputs: Lengths = flags["output_len"]
    if flags["prompts"] is None:
        return synthetic(seed=flags["seed"], input_lengths=flags["input_len"], output_lengths=outputs)
    try:
        return from_file(Path(flags["prompts"]), max_tokens=outputs.maximum)
    except UnusablePrompts as error:
        raise click.UsageError(str(error)) from None


def _fields(flags: Mapping[str, Any]) -> dict[str, Any]:
    """What every body gets. Synthetic prompts are answered to the length that was drawn."""
    ignore_eos = flags["prompts"] is None if flags["ignore_eos"] is None else flags["ignore_eos"]
    return {
        "temperature": flags["temperature"],
        **({"ignore_eos": True} if ignore_eos else {}),
        **flags["body"],
    }


def _served_model(base: str, headers: Mapping[str, str]) -> str:
    """The first model that the server lists. Raises `click.ClickException`."""
    try:
        reply = httpx.get(f"{base}/v1/models", headers=headers, timeout=30.0, trust_env=False)
        if reply.status_code in (401, 403):
            raise click.ClickException("the server asks for an API key; give it with --api-key")
        return str(reply.raise_for_status().json()["data"][0]["id"])
    except httpx.TransportError as error:
        raise Unreachable(f"no server answers at {base}; is it running? ({error})") from None
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        raise click.ClickException(
            f"the server at {base} does not list its models under /v1/models; give one with --model"
        ) from None


def _describe(shape: LoadShape) -> str:
    parts = [f"{shape.rate:g} requests/s"] if shape.rate else []
    parts += [f"{shape.concurrency} at a time"] if shape.concurrency else []
    parts += [f"{shape.num_requests} requests"] if shape.num_requests else []
    parts += [f"{shape.seconds:g} s"] if shape.seconds else []
    return ", ".join([*parts, f"seed {shape.seed}"])


async def _interruptible(load: Coroutine[Any, Any, Load]) -> Load:
    """The first Ctrl-C ends the load, and its report is still written; the second ends the command."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(load)

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def _progress(shape: LoadShape) -> Iterator[Callable[[Outcome], None]]:
    """A progress bar on standard error, if that is a terminal."""
    console = terminal(stderr=True)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=shape.num_requests)
        yield lambda _: bar.advance(task)
