"""Says in the engine's words that a device is gone or short of memory. Other faults pass as they are."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.errors import DeviceLost


@contextmanager
def device_errors() -> Iterator[None]:
    """Turn an accelerator's own failure into `DeviceLost`, and a failed allocation into `MemoryError`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
    except torch.AcceleratorError as error:
        raise DeviceLost(f"the device does not answer any more: {error}") from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # what torch's allocator on the CPU says
            raise MemoryError(str(error)) from error
        raise
