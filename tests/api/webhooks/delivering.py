"""A signing key, a clock and a check of signatures for the tests of webhooks."""

import base64
import hashlib
import hmac
import json
from typing import Any, cast

import redis

from tests.api.webhooks.receiver import Call
from tokenmill.protocol import keys

KEY = b"k" * 32
SECRET = f"whsec_{base64.b64encode(KEY).decode()}"


class Clock:
    """Seconds since the epoch. Deliveries are scheduled and signed by it."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def waits(self) -> list[float]:
        """Seconds until the next try of each waiting webhook."""
        seconds, microseconds = self.client.time()
        due = cast(Any, self.client.zrange(keys.OUTBOX_DUE, 0, -1, withscores=True))
        return [score - seconds - microseconds / 1e6 for _, score in due]

    def turn(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds
        for task_id in self.client.zrange(keys.OUTBOX_DUE, 0, -1):
            self.client.zincrby(keys.OUTBOX_DUE, -seconds, cast(bytes, task_id))


def verified(call: Call) -> Any:
    """The event of a delivery, after checking its signature as a receiver does."""
    signed = f"{call.headers['webhook-id']}.{call.headers['webhook-timestamp']}.".encode() + call.body
    expected = base64.b64encode(hmac.digest(KEY, signed, hashlib.sha256)).decode()
    assert call.headers["webhook-signature"] == f"v1,{expected}"
    assert call.headers["content-type"] == "application/json"
    return json.loads(call.body)
