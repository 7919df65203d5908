"""Runs each part in a process of its own, for a limited time.

A part that damages its device or process does not affect the next one; its result states what happened.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

LAST_CHARACTERS = 1500
"""Characters of an exception's message in a reason."""
LEAST_SECONDS = 5.0
"""Minimum time left to start a part."""
PRELOADED = ["torch", "transformers", "engine.execution.build"]
"""Imported once by a server process that uses no device, from which the parts are forked."""

_CONTEXT = get_context("forkserver")


class Absent(Exception):
    """The machine or the program lacks what the part measures."""


class Options(NamedTuple):
    """`device`: "cuda" or "cpu". `quick`: small sizes that only show that a part runs. `cache`: a directory
    for models and compiled files. `copy_rate`: bytes per second that a copy reads and writes; None: not
    measured."""

    device: str
    quick: bool
    cache: str
    copy_rate: float | None = None


class Part(NamedTuple):
    """`run` returns figures and may raise; its process imports it by name. `seconds`: time limit."""

    name: str
    run: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...]
    seconds: float


def preload() -> None:
    """Wait for the imports, which do not count as a part's time."""
    _CONTEXT.set_forkserver_preload(PRELOADED)
    process = _CONTEXT.Process(target=time.monotonic)
    process.start()
    process.join()


def run_all(parts: list[Part], options: Options, deadline: float) -> Iterator[dict[str, Any]]:
    """The results in order. `deadline`: of `time.monotonic`; later parts are skipped."""
    for part in parts:
        left = deadline - time.monotonic()
        begun = time.monotonic()
        if left < LEAST_SECONDS:
            result: dict[str, Any] = {"status": "skipped", "reason": "no time was left"}
        else:
            result = run_part(part, options, min(left, part.seconds))
        if "bytes_per_second" in result.get("figures", {}):
            options = options._replace(copy_rate=result["figures"]["bytes_per_second"])
        yield {"part": part.name, "seconds": round(time.monotonic() - begun, 2), **result}


def run_part(part: Part, options: Options, seconds: float) -> dict[str, Any]:
    """`status`: ok, absent, failed or timeout; with `figures` or the `reason`."""
    here, there = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_run, args=(there, part, options))
    process.start()
    there.close()
    try:
        if not here.poll(seconds):
            return {"status": "timeout", "reason": f"it took more than {seconds:.0f} s"}
        result: dict[str, Any] = here.recv()
    except EOFError:
        process.join()
        return {"status": "failed", "reason": f"its process ended with {process.exitcode}"}
    else:
        return result
    finally:
        process.kill()
        process.join()
        here.close()


def _run(answer: Connection, part: Part, options: Options) -> None:
    try:
        result = {"status": "ok", "figures": part.run(options, *part.arguments)}
    except Absent as reason:
        result = {"status": "absent", "reason": str(reason)}
    except BaseException:  # noqa: BLE001 - also SystemExit: a part must not end the others
        result = {"status": "failed", "reason": traceback.format_exc()[-LAST_CHARACTERS:]}
    answer.send(result)
