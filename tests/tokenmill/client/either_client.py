"""`Client`, and `AsyncClient` behind the same blocking methods, with a clock that only sleeping moves."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

from tokenmill.client.async_client import AsyncClient
from tokenmill.client.sync_client import Client


class Clock:
    """`slept`: the pauses so far, in seconds. `on_pause` is called at each."""

    def __init__(self, on_pause: Callable[[], None] = lambda: None) -> None:
        self.slept: list[float] = []
        self._on_pause = on_pause

    def __call__(self) -> float:
        return sum(self.slept)

    def sleep(self, seconds: float) -> None:
        self._on_pause()
        self.slept.append(seconds)

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


def sync_client(clock: Clock | None, *arguments: Any, **options: Any) -> Any:
    class Timed(Client):
        _clock = staticmethod(clock or time.monotonic)
        _sleep = staticmethod(clock.sleep if clock else time.sleep)

    return Timed(*arguments, **options)


class Blocking:
    """Calls the methods of an `AsyncClient`, or of a task that it returned, in an event loop of its own."""

    def __init__(self, runner: asyncio.Runner, target: Any) -> None:
        self._runner = runner
        self._target = target

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._target, name)
        if name in ("batches", "files"):
            return Blocking(self._runner, member)
        if not callable(member) or name == "to_json":
            return member
        return lambda *arguments, **options: self._finish(member(*arguments, **options))

    def __repr__(self) -> str:
        return repr(self._target)

    def _finish(self, called: Any) -> Any:
        if isinstance(called, AsyncGenerator):
            return self._items(called)
        return self._wrap(self._runner.run(called))

    def _wrap(self, value: Any) -> Any:
        is_task = hasattr(value, "refresh")
        return Blocking(self._runner, value) if is_task else value

    def _items(self, generator: AsyncGenerator[Any, None]) -> Generator[Any, None, None]:
        try:
            while True:
                try:
                    yield self._wrap(self._runner.run(generator.__anext__()))
                except StopAsyncIteration:
                    return
        finally:
            self._runner.run(generator.aclose())


class BlockingClient(Blocking):
    """An `AsyncClient` with blocking methods."""

    def __init__(self, clock: Clock | None, *arguments: Any, **options: Any) -> None:
        class Timed(AsyncClient):
            _clock = staticmethod(clock or time.monotonic)
            _sleep = staticmethod(clock.sleep_async if clock else asyncio.sleep)

        super().__init__(asyncio.Runner(), Timed(*arguments, **options))

    def __enter__(self) -> "BlockingClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._target.close())
        self._runner.close()
