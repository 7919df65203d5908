"""An HTTP server for the tests of the load generator: it answers each request with scripted pieces."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Scripted:
    """A reply: `pieces` are sent one by one. `cut`: the connection ends before the body does."""

    pieces: list[bytes] = field(default_factory=list)
    status: str = "200 OK"
    cut: bool = False


@dataclass
class ScriptedServer:
    """`answer` receives the method, the path, the headers and the body of each request.

    `hold`: no request is answered until so many are open.
    """

    answer: Callable[[str, str, dict[str, str], Any], Scripted]
    url: str = ""
    calls: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    most_open: int = 0
    hold: int = 1
    _open: int = 0
    _held: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        call = (method, path, headers, json.loads(data) if data else None)
        self.calls.append(call)
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        reply = self.answer(*call)
        writer.write(f"HTTP/1.1 {reply.status}\r\n".encode())
        writer.write(b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        if self._open >= self.hold:
            self._held.set()
        await self._held.wait()
        for piece in reply.pieces:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0)
        self._open -= 1
        if not reply.cut:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        writer.close()


@contextmanager
def running(server: ScriptedServer) -> Iterator[ScriptedServer]:
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server.handle, "127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        listening.close()
        loop.run_until_complete(_end_all())
        loop.close()


async def _end_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def data(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def completion(texts: list[str], usage: dict[str, int] | None) -> list[bytes]:
    """The pieces of a streamed text completion."""
    pieces = [data({"choices": [{"index": 0, "text": text, "finish_reason": None}]}) for text in texts]
    pieces.append(data({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
    if usage:
        pieces.append(data({"choices": [], "usage": usage}))
    return [*pieces, data(b"[DONE]")]


def chat(texts: list[str], usage: dict[str, int]) -> list[bytes]:
    """The pieces of a streamed chat completion."""
    deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": text} for text in texts]
    pieces = [data({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}) for delta in deltas]
    pieces.append(data({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
    return [*pieces, data({"choices": [], "usage": usage}), data(b"[DONE]")]
