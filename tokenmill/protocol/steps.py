"""The entry of one step in a worker's stream of steps: compressed JSON, in one field.

A worker writes every step while a client watches, and one step per second otherwise.
"""

import json
import zlib
from typing import Any

FIELD = b"step"
MAX_ENTRIES = 2000
"""The stream is trimmed to about this length."""
TTL_SECONDS = 600
"""The stream expires after this time without a step."""
WATCHED_SECONDS = 10
"""Lifetime of the mark of a watcher."""


def encode(step: dict[str, Any]) -> bytes:
    """`lanes` of `step`: rows `[task, index, state, tokens, reason, tenant]`. Level 1 halves
    their size.
    """
    return zlib.compress(json.dumps(step, separators=(",", ":")).encode(), 1)


def decode(entry: bytes, tenant: str) -> dict[str, Any]:
    """The step as `tenant` sees it: `task` is None in the lanes of other tenants.

    `tenant`: as in the name of a queue.
    """
    step: dict[str, Any] = json.loads(zlib.decompress(entry))
    step["lanes"] = [
        {
            "task": task if owner == tenant else None,
            "index": index,
            "state": state,
            "tokens": tokens,
            "reason": reason or None,
        }
        for task, index, state, tokens, reason, owner in step["lanes"]
    ]
    return step
