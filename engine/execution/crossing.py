"""Small arrays on their way between host and device, which nobody waits for before they are needed.

Law: nothing here waits for the device but `Drawn.on_host`, and that waits for its own tokens alone, not for
what was launched after them. This file does not know what the arrays mean.
"""

from dataclasses import dataclass

import torch


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host, on `device`. A plain copy to CUDA would wait for all that was launched before.

    The allocator of pinned memory keeps what is copied from it until the copy is done.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens [rows that sample], int64: `tokens` on the device, `copy` on its way to the host."""

    tokens: torch.Tensor
    copy: torch.Tensor
    arrival: torch.cuda.Event | None = None

    @classmethod
    def of(cls, tokens: torch.Tensor) -> "Drawn":
        """Begin to copy `tokens` to the host, behind what makes them."""
        if tokens.device.type == "cpu":
            return cls(tokens, tokens)
        copy = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        copy.copy_(tokens, non_blocking=True)
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch says nothing of it
        arrival.record()
        return cls(tokens, copy, arrival)

    def on_host(self) -> list[int]:
        """Wait for them."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.copy.tolist()
