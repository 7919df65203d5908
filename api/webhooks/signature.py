"""Signs webhooks as Standard Webhooks 1.0 (standardwebhooks.com) defines it.

The id, the time of the try and the body are signed together, so a receiver detects a changed or replayed one.
"""

import base64
import hashlib
import hmac
from collections.abc import Sequence


def headers(keys: Sequence[bytes], message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The three headers of one try. Every key signs, so that receivers can migrate from one to the next.

    `message_id`: the same for each try of one message. `timestamp`: time of this try, in seconds since the
    epoch.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    digests = (hmac.new(key, signed, hashlib.sha256).digest() for key in keys)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests),
    }
