"""The setting `hold_unusable`: a process with unusable settings or model waits instead of exiting.

A supervisor that restarts every process that exits, as Docker's `unless-stopped` does, would restart it
forever. Docker's `on-failure:N` is no alternative: it gives up on a container after N exits in its lifetime,
and does not start it after a reboot of the host.
"""

import faulthandler
import signal
from collections.abc import Callable, Mapping

VARIABLE = "TOKENMILL_HOLD_UNUSABLE"
# As pydantic reads them: the settings themselves may be unusable.
_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})


def hold_unusable(environ: Mapping[str, str], log: Callable[[str], None]) -> None:
    """If `VARIABLE` is true, wait until a signal ends the process; otherwise return. Main thread only."""
    if environ.get(VARIABLE, "").strip().lower() not in _TRUE:
        return
    log(f"waiting, to prevent a restart loop: change the settings and start again ({VARIABLE})")
    # The deadline for loading the model no longer applies.
    faulthandler.cancel_dump_traceback_later()
    while True:
        signal.pause()
