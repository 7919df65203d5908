"""Webhooks of a running API."""

import base64
import json
import time

from tests.api.conftest import HandWorker, StartServer
from tests.api.webhooks.receiver import answer, receiving


def test_webhooks_are_delivered(start: StartServer, worker: HandWorker) -> None:
    """From the submission to the receiver, by a real process."""
    with receiving() as receiver:
        receiver.will(answer(500))
        key = base64.b64encode(b"k" * 32).decode()
        server = start(TOKENMILL_WEBHOOK_SECRET=f"whsec_{key}", TOKENMILL_WEBHOOK_ALLOW_PRIVATE="true")
        task_id = server.submit(webhook={"url": receiver.url()})
        worker.run("a", "b")
        # The second try is due after five seconds.
        calls = [receiver.next(), receiver.next()]
        assert {call.headers["webhook-id"] for call in calls} == {f"msg_{task_id}"}
        assert json.loads(calls[1].body)["data"]["outputs"][0]["text"] == "ab"
        assert calls[0].body == calls[1].body
        while (
            b'tokenmill_webhook_deliveries_total{outcome="delivered"} 1.0'
            not in server.call("GET", "/metrics")[1]
        ):
            time.sleep(0.02)
        assert not [line for line in server.log if key.encode() in line]
