"""Counts tokens that an attempt had published when another attempt took the request over.

The count is a lower bound: running requests are polled a few times a second, and tokens published after the
last poll of an attempt do not count. Errors of Redis are ignored.
"""

import threading
from typing import Any

import redis

from tokenmill.protocol import keys

POLL_SECONDS = 0.1


class Takeovers:
    """Polls each request from `follow` until its end."""

    def __init__(self, url: str) -> None:
        self.num_tokens = 0
        self.num_takeovers = 0
        self._url = url
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[int, int]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="takeovers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def follow(self, task_id: str) -> None:
        with self._lock:
            self._seen.setdefault(task_id, (0, 0))

    def is_token_at_risk(self) -> bool:
        """Whether a request that runs had published tokens at its last poll."""
        with self._lock:
            return any(attempt and length for attempt, length in self._seen.values())

    def _run(self) -> None:
        with redis.Redis.from_url(self._url) as client:
            while not self._over.wait(POLL_SECONDS):
                try:
                    self._poll(client)
                except redis.RedisError:
                    continue

    def _poll(self, client: Any) -> None:
        with self._lock:
            seen = dict(self._seen)
        with client.pipeline(transaction=True) as pipeline:
            for task_id in seen:
                pipeline.hmget(keys.run(task_id), "attempt", "terminal")
                pipeline.xlen(keys.log(task_id))
            replies = pipeline.execute()
        for task_id, (attempt, terminal), length in zip(seen, replies[::2], replies[1::2], strict=True):
            self._update(task_id, seen[task_id], int(attempt or 0), length, is_over=terminal is not None)

    def _update(
        self, task_id: str, before: tuple[int, int], attempt: int, length: int, *, is_over: bool
    ) -> None:
        old_attempt, old_length = before
        if old_attempt and attempt > old_attempt and old_length:
            self.num_takeovers += 1
            self.num_tokens += old_length
        with self._lock:
            if is_over:
                del self._seen[task_id]
            else:
                self._seen[task_id] = (attempt, length)
