"""A host with a wrong clock: `time.time()` is ahead by `CLOCK_SKEW_SECONDS`.

Python imports this file at startup if its directory is on `PYTHONPATH`.
"""

import os
import time

_right_time = time.time
_skew_seconds = float(os.environ["CLOCK_SKEW_SECONDS"])
time.time = lambda: _right_time() + _skew_seconds
