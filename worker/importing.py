"""Large libraries are imported without Python's collector of reference cycles looking through them.

Law: the collector goes on afterwards as before, but never again looks at what was there by then. While torch
is imported it runs hundreds of times for nothing, a sixth of the whole time, and later each of its full runs
would hold all threads for some tenths of a second. It concerns a whole process: for a process's own start.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """A context for imports; what they leave behind in cycles, some megabytes, is kept for good."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
