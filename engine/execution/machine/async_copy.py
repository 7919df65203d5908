"""Small arrays on their way between host and device, which nobody waits for before they are needed.

Law: nothing here waits for the device but `SampledIds.on_host`, and that waits for its own tokens alone, not
for what was launched after them. Pinned memory is asked for here alone. This file does not know what the
arrays mean.
"""

from dataclasses import dataclass

import torch


def host_buffer(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Memory of the host for a copy to or from `device`; pinned for CUDA, so that nobody waits for the copy.

    The allocator of pinned memory gives a buffer to nobody else before the copies from it are done, so a
    buffer may be dropped as soon as its copy is launched.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host, on `device`. A plain copy to CUDA would wait for all that was launched before."""
    if device.type == "cpu":
        return tensor
    buffer = host_buffer(tensor.shape, device, tensor.dtype).copy_(tensor)
    return buffer.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class SampledIds:
    """Tokens [rows that sample], int64: `tokens` on the device, `copy` on its way to the host."""

    tokens: torch.Tensor
    copy: torch.Tensor
    arrival: torch.cuda.Event | None = None

    @classmethod
    def of(cls, tokens: torch.Tensor) -> "SampledIds":
        """Begin to copy `tokens` to the host, behind what makes them."""
        if tokens.device.type == "cpu":
            return cls(tokens, tokens)
        copy = host_buffer(tokens.shape, tokens.device, tokens.dtype)
        copy.copy_(tokens, non_blocking=True)
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch says nothing of it
        arrival.record()
        return cls(tokens, copy, arrival)

    def on_host(self) -> list[int]:
        """Wait for them."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.copy.tolist()
