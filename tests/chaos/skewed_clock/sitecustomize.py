"""A host whose clock is wrong: `time.time()` is `CLOCK_SKEW_SECONDS` ahead.

Python itself imports this file in a process that has its folder on `PYTHONPATH`.
"""

import os
import time

_right_time = time.time
_skew_seconds = float(os.environ["CLOCK_SKEW_SECONDS"])
time.time = lambda: _right_time() + _skew_seconds
