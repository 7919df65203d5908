"""How far a list of prompts has come, for whoever waits at a terminal."""

import time
from typing import Any

from tqdm import tqdm

_REFRESH_SECONDS = 0.2
"""A step may take a millisecond; nobody reads faster than this."""


class Progress:
    """A bar of prompts that are done, with the tokens per second so far."""

    def __init__(self, num_prompts: int, *, is_shown: bool) -> None:
        self._bar: Any = tqdm(total=num_prompts, unit=" prompts", disable=not is_shown, dynamic_ncols=True)
        self._started = self._shown = time.monotonic()
        self._num_tokens = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def note(self, num_ended: int, num_tokens: int) -> None:
        """What one step brought."""
        self._num_tokens += num_tokens
        now = time.monotonic()
        if now - self._shown >= _REFRESH_SECONDS:
            self._shown = now
            self._bar.set_postfix_str(f"{self._num_tokens / (now - self._started):.0f} tokens/s")
        self._bar.update(num_ended)
