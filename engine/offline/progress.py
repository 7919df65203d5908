"""Shows the progress of a list of prompts on a terminal."""

import time
from typing import Any

from tqdm import tqdm

_REFRESH_SECONDS = 0.2


class Progress:
    """A progress bar of finished prompts, with the tokens per second since the start."""

    def __init__(self, num_prompts: int, *, is_shown: bool) -> None:
        self._bar: Any = tqdm(total=num_prompts, unit=" prompts", disable=not is_shown, dynamic_ncols=True)
        self._started = self._refreshed = time.monotonic()
        self._num_tokens = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, num_finished: int, num_tokens: int) -> None:
        """Add what one step finished and generated."""
        self._num_tokens += num_tokens
        now = time.monotonic()
        if now - self._refreshed >= _REFRESH_SECONDS:
            self._refreshed = now
            self._bar.set_postfix_str(f"{self._num_tokens / (now - self._started):.0f} tokens/s")
        self._bar.update(num_finished)
