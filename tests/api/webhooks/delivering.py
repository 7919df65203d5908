"""What the tests of webhooks share: keys, a clock, and eyes for signatures. For tests only."""

import base64
import hashlib
import hmac
import json

from tokenmill.protocol import keys

KEY = b"k" * 32
SECRET = f"whsec_{base64.b64encode(KEY).decode()}"


class Clock:
    """Seconds since the epoch; tries are put off by it, and signed with it."""

    def __init__(self, client):
        self.client = client
        self.now = 1_800_000_000.0

    def __call__(self):
        return self.now

    def waits(self):
        """Seconds until the next try of each webhook that waits for one."""
        seconds, microseconds = self.client.time()
        due = self.client.zrange(keys.OUTBOX_DUE, 0, -1, withscores=True)
        return [score - seconds - microseconds / 1e6 for _, score in due]

    def turn(self, seconds):
        """So much time passes."""
        self.now += seconds
        for task_id in self.client.zrange(keys.OUTBOX_DUE, 0, -1):
            self.client.zincrby(keys.OUTBOX_DUE, -seconds, task_id)


def verified(call):
    """The event of a delivery whose signature is right, checked as a receiver does."""
    signed = f"{call.headers['webhook-id']}.{call.headers['webhook-timestamp']}.".encode() + call.body
    expected = base64.b64encode(hmac.digest(KEY, signed, hashlib.sha256)).decode()
    assert call.headers["webhook-signature"] == f"v1,{expected}"
    assert call.headers["content-type"] == "application/json"
    return json.loads(call.body)
