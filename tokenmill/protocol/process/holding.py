"""What a process does whose settings or model cannot be used: it ends, or it stays and waits to be replaced.

A supervisor that starts again whatever ends, as Docker's `unless-stopped`, would start it for ever. Docker's
`on-failure:N` gives up a worker that crashed N times in its life, and starts none after a reboot of the host.
"""

import faulthandler
import signal
from collections.abc import Callable, Mapping

VARIABLE = "TOKENMILL_HOLD_UNUSABLE"
_YES = frozenset({"1", "true", "yes", "on"})


def hold_if_asked(environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Return at once, or where `VARIABLE` is set never: a signal ends the process. For the main thread."""
    if environ.get(VARIABLE, "").strip().lower() not in _YES:
        return
    say(f"held, and not started again: change the settings and start it anew ({VARIABLE})")
    # The deadline of loading is over with it.
    faulthandler.cancel_dump_traceback_later()
    while True:
        signal.pause()
