"""When a process that exited is restarted.

Three early exits in a row are a crash loop. Before the service was ready for the first time a crash loop ends
it; afterwards the process is restarted slowly.
"""

from dataclasses import dataclass

EARLY_SECONDS = 30.0
CRASH_LOOP_EXITS = 3
SLOW_SECONDS = 30.0
_FIRST_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """`early_exits`: how often in a row the process exited soon after its start."""

    early_exits: int = 0

    def after_exit(self, uptime: float, *, was_ready: bool) -> "RestartBackoff":
        """`uptime`: of the process, in seconds. `was_ready`: the service has been ready in this run."""
        is_early = uptime < EARLY_SECONDS or not was_ready
        return RestartBackoff(self.early_exits + 1 if is_early else 0)

    @property
    def is_crash_loop(self) -> bool:
        return self.early_exits >= CRASH_LOOP_EXITS

    @property
    def delay(self) -> float:
        """Seconds until the next start."""
        return SLOW_SECONDS if self.is_crash_loop else _FIRST_SECONDS * 2**self.early_exits
