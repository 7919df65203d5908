"""Translates torch's device errors into the engine's: a lost device, or a lack of memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.errors import DeviceLost


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise `DeviceLost` for an accelerator's failure and `MemoryError` for a failed allocation.

    Other exceptions pass unchanged.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
    except torch.AcceleratorError as error:
        raise DeviceLost(f"the device does not respond any more: {error}") from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # the message of torch's CPU allocator
            raise MemoryError(str(error)) from error
        raise
