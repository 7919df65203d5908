"""An HTTP service with scripted answers that records the calls."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Call:
    """A recorded request. Header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """A response: a dict becomes JSON, a list of strings a stream. `breaks`: the connection is cut early."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    breaks: bool = False


class FakeService:
    """Answers calls in the order of `answers`, and with status 500 once there are none."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.answers: list[Answer] = []
        self.url = ""

    def will_answer(self, *answers: Answer) -> None:
        self.answers.extend(answers)


@contextmanager
def running(service: FakeService) -> Iterator[FakeService]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = _parse(self.rfile.read(length)) if length else None
            service.calls.append(
                Call(
                    self.command,
                    self.path,
                    {name.lower(): value for name, value in self.headers.items()},
                    body,
                )
            )
            _send(self, service.answers.pop(0) if service.answers else Answer({}, 500))

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the names that the standard library calls

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _parse(body: bytes) -> Any:
    """JSON, or the bytes of a form."""
    try:
        return json.loads(body)
    except ValueError:
        return body


def _send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    is_stream = isinstance(answer.body, list)
    data = "".join(answer.body).encode() if is_stream else json.dumps(answer.body).encode()
    handler.send_response(answer.status)
    for name, value in answer.headers.items():
        handler.send_header(name, value)
    # A broken answer announces more than it sends.
    handler.send_header("Content-Length", str(len(data) + (100 if answer.breaks else 0)))
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(data)
    handler.close_connection = True


def token(seq: int, text: str, index: int = 0) -> str:
    """A token's frame as the service sends it."""
    data = {"v": 1, "id": "t1", "seq": seq, "index": index, "token": 7, "text": text}
    return f"event: token\nid: {seq}\ndata: {json.dumps(data)}\n\n"


def finished(
    seq: int,
    reason: str = "stop",
    error: dict[str, Any] | None = None,
    text: str = "",
    index: int = 0,
    done: bool = True,
) -> str:
    """The terminal frame, or with `done` false that of one output."""
    data = {
        "v": 1, "id": "t1", "seq": seq, "index": index, "token": None, "text": text, "finish_reason": reason,
        **({"done": True, "usage": None, "error": error} if done else {}),
    }  # fmt: skip
    if error:
        data["error"] = error
    return f"event: {'finished' if done else 'end'}\nid: {seq}\ndata: {json.dumps(data)}\n\n"


def task(status: str, text: str = "", **members: Any) -> dict[str, Any]:
    """A task as the API shows it."""
    return {
        "id": "t1", "object": "task", "status": status, "created_at": 1.5, "model": "tiny", "priority": 2,
        "queue": None, "urls": {"self": "/t1", "events": "/t1/events", "cancel": "/t1/cancel"},
        "outputs": [{"index": 0, "text": text, "token_ids": [], "finish_reason": None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 0},
        "timings": {"queue_seconds": 0.5, "ttft_seconds": None, "total_seconds": None},
        "error": None, **members,
    }  # fmt: skip


def problem(code: str, message: str) -> dict[str, Any]:
    """The body of an error."""
    return {"status": 400, "detail": message, "error": {"type": "x", "code": code, "message": message}}
