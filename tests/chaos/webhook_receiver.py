"""A receiver of webhooks that can fail, and records what it accepted.

It checks signatures by the Standard Webhooks specification, without code of the service. The ledger checks
that each webhook arrived.
"""

import base64
import hmac
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tokenmill.protocol import keys

KEY = b"chaos-chaos-chaos-chaos-chaos-32"
"""The service's signing key."""
SECRET = f"whsec_{base64.b64encode(KEY).decode()}"
GROUP, CONSUMER = "deliverers", "api"
"""Names in the scripts of the outbox."""
LONG_SILENT_MS = 600_000


class Receiver:
    """Replies 204 unless it `is_failing`.

    `received`: task -> the statuses of its webhooks. `complaints`: unexpected webhooks.
    """

    def __init__(self) -> None:
        self.is_failing = False
        self.num_refused = 0
        self.received: dict[str, list[str]] = {}
        self.complaints: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/ended"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, headers: Mapping[str, str], body: bytes) -> int:
        """Handle one call. Returns the status of the reply."""
        if self.is_failing:
            self.num_refused += 1
            return 503
        if not is_signed(headers, body):
            self.complaints.append(f"a webhook with a wrong signature: {dict(headers)}")
            return 400
        event = json.loads(body)
        task_id, status = event["data"]["id"], event["data"]["status"]
        if (event["type"], headers["webhook-id"]) != (f"task.{status}", f"msg_{task_id}"):
            self.complaints.append(f"a webhook of {task_id}, {status}, came as {dict(headers)}")
        self.received.setdefault(task_id, []).append(status)
        return 204

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self.send_response(receiver.take(self.headers, body))  # type: ignore[arg-type]
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        return Handler


def is_signed(headers: Mapping[str, str], body: bytes) -> bool:
    text = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = "v1," + base64.b64encode(hmac.digest(KEY, text, "sha256")).decode()
    return expected in headers["webhook-signature"].split()


def make_webhooks_due(client: Any) -> None:
    """Make all waiting webhooks due, and all deliveries in progress count as abandoned."""
    for task_id in client.zrange(keys.OUTBOX_DUE, 0, -1):
        client.zadd(keys.OUTBOX_DUE, {task_id: 1}, xx=True)
    if not client.exists(keys.OUTBOX):
        return
    for entry in client.xpending_range(keys.OUTBOX, GROUP, "-", "+", 1000):
        client.xclaim(
            keys.OUTBOX, GROUP, CONSUMER, 0, [entry["message_id"]], idle=LONG_SILENT_MS, justid=True
        )
