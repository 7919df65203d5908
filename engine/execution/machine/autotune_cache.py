"""Choices that were measured on this machine, kept in the cache directory for the next start.

Law: a choice is handed out only to whoever asks with the very same facts, all of which stand in its file, and
only for a while: the machine may have been busy when it was measured. What is too old, damaged or not ours
counts as nothing and is written anew. One file for each choice, renamed when whole, so processes that write
at once do no harm to each other. A directory that cannot be written is no error. Knows not what is chosen.

All is forgotten by deleting the directory.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.execution.machine.atomic_files import written_atomically

logger = logging.getLogger(__name__)

KEPT_SECONDS = 30 * 86_400.0
"""Of a choice that was measured while nothing disturbed."""
DISTURBED_SECONDS = 86_400.0
"""Of one that was measured while other programs took the processors: the next day tries again."""

Facts = Mapping[str, str | int | Sequence[str] | Sequence[int] | None]
"""All that a choice depends on, by names for people."""


class AutotuneCache:
    """Those in `directory`, each of which depends on `surroundings` besides its own facts.

    `now`: seconds since the epoch.
    """

    def __init__(self, directory: Path, surroundings: Facts, now: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._surroundings = surroundings
        self._now = now

    def find(self, facts: Facts) -> tuple[str, ...] | None:
        """The names that were kept with these facts; None: nothing that still holds."""
        known = self._text_of(facts)
        try:
            kept = json.loads(self._path_of(known).read_text())
            if kept["facts"] != json.loads(known):
                return None
            # One from the future was written by a clock that was wrong.
            if not 0 <= self._now() - kept["chosen_at"] < kept["holds_seconds"]:
                return None
            return tuple(str(name) for name in kept["choice"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def keep(self, facts: Facts, choice: Sequence[str], *, is_disturbed: bool = False) -> None:
        """Remember `choice`, in place of what was there."""
        known = self._text_of(facts)
        content = {
            "choice": list(choice),
            "chosen_at": self._now(),
            "holds_seconds": DISTURBED_SECONDS if is_disturbed else KEPT_SECONDS,
            "facts": json.loads(known),
        }
        try:
            with written_atomically(self._path_of(known)) as unfinished:
                unfinished.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            logger.info("what was measured is not remembered: %s", error)

    def _text_of(self, facts: Facts) -> str:
        return json.dumps({**self._surroundings, **facts}, sort_keys=True)

    def _path_of(self, known: str) -> Path:
        return self._directory / f"{hashlib.sha256(known.encode()).hexdigest()[:16]}.json"
