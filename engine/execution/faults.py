"""Says in the engine's words that a device is gone. Knows no other fault: these pass as they are."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.errors import DeviceLost


@contextmanager
def device_faults() -> Iterator[None]:
    """Turn an accelerator's own failure into `DeviceLost`; being out of memory is not one."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLost(f"the device does not answer any more: {error}") from error
