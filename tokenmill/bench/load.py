"""Runs a load: requests at a rate, or a number of clients that each send one request after another."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from random import Random

import httpx

from tokenmill.bench.backends import Backend
from tokenmill.bench.outcomes import Load, Outcome, RequestFailed
from tokenmill.bench.prompts import Request

Progress = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """`rate`: requests per second that arrive as a Poisson process, or None. `concurrency`: requests that
    run at a time; None: no limit, with a rate only. The load starts no request after `num_requests` or after
    `seconds`. `timeout`: seconds of one request.
    """

    concurrency: int | None
    rate: float | None = None
    num_requests: int | None = None
    seconds: float | None = None
    warm_up: int = 0
    timeout: float = 600.0
    seed: int = 0

    def arrivals(self) -> Iterator[float]:
        """The moments at which requests arrive, in seconds; without a rate all at 0."""
        random, moment = Random(f"arrivals {self.seed}"), 0.0  # noqa: S311 - a load, not a secret
        while True:
            yield moment
            if self.rate is not None:
                moment += random.expovariate(self.rate)


async def run_load(
    shape: LoadShape,
    backend: Backend,
    requests: Iterator[Request],
    progress: Progress = lambda _: None,
    headers: dict[str, str] | None = None,
) -> Load:
    """Send the warm-up, which does not count, then the load. If cancelled, return what has ended by then."""
    async with _client(shape, headers or {}) as http:
        warm_up = _Run(backend, http, lambda _: None)
        await warm_up.all(zip(islice(requests, shape.warm_up), shape.arrivals(), strict=False), shape)
        run = _Run(backend, http, progress)
        interrupted = False
        try:
            await run.all(zip(islice(requests, shape.num_requests), shape.arrivals(), strict=False), shape)
        except asyncio.CancelledError:
            interrupted = True
        return run.finished(interrupted)


@asynccontextmanager
async def _client(shape: LoadShape, headers: dict[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    # A proxy of the environment would be measured with the server; compression would hide when a token came.
    async with httpx.AsyncClient(
        timeout=httpx.Timeout(shape.timeout),
        # An idle connection is not used again shortly before the server closes it.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
        headers={"Accept-Encoding": "identity", **headers},
        trust_env=False,
    ) as http:
        yield http


class _Run:
    """One load while it runs."""

    def __init__(self, backend: Backend, http: httpx.AsyncClient, progress: Progress) -> None:
        self._backend, self._http, self._progress = backend, http, progress
        self._outcomes: list[Outcome] = []
        self._began, self._began_cpu = time.perf_counter(), time.process_time()

    def _clock(self) -> float:
        return time.perf_counter() - self._began

    async def all(self, requests: Iterable[tuple[Request, float]], shape: LoadShape) -> None:
        """Start each request at its arrival, with at most `concurrency` at a time."""
        room = asyncio.Semaphore(shape.concurrency) if shape.concurrency else None
        async with asyncio.TaskGroup() as group:
            for request, arrival in requests:
                if room:
                    await room.acquire()
                due = max(arrival, self._clock())
                await asyncio.sleep(max(0.0, arrival - self._clock()))
                if shape.seconds is not None and self._clock() >= shape.seconds:
                    return
                outcome = Outcome(started=self._clock())
                outcome.lag = outcome.started - due
                task = group.create_task(self._one(request, outcome, shape.timeout))
                task.add_done_callback(lambda _: room.release() if room else None)

    async def _one(self, request: Request, outcome: Outcome, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._backend.send(self._http, request, outcome, self._clock)
        except RequestFailed as error:
            outcome.error = (error.kind, str(error))
        except TimeoutError:
            outcome.error = ("timeout", f"no end within {timeout:g} s")
        except httpx.HTTPError as error:
            outcome.error = (type(error).__name__, str(error) or type(error).__name__)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            outcome.error = ("unexpected reply", f"the server's reply cannot be read: {error!r}")
        outcome.ended = self._clock()
        self._outcomes.append(outcome)
        self._progress(outcome)

    def finished(self, interrupted: bool) -> Load:
        begin = min((outcome.started for outcome in self._outcomes), default=0.0)
        end = max((outcome.ended for outcome in self._outcomes), default=0.0)
        ordered = sorted(self._outcomes, key=lambda outcome: outcome.started)
        return Load(ordered, end - begin, time.process_time() - self._began_cpu, interrupted)
