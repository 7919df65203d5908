"""Asynchronous copies of small arrays between host and device.

Only `SampledIds.on_host` waits for the device, and only for its own copy, not for work launched later.
"""

from dataclasses import dataclass

import torch


def host_buffer(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Host memory for a copy to or from `device`, pinned for CUDA so that the copy is asynchronous.

    The buffer may be dropped once its copy is launched: the pinned allocator reuses it only when the copy is
    complete.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on `device`. A copy from pageable memory would wait for all work launched before."""
    if device.type == "cpu":
        return tensor
    buffer = host_buffer(tensor.shape, device, tensor.dtype).copy_(tensor)
    return buffer.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class SampledIds:
    """Token ids [sampled rows], int64: `tokens` on the device, and their `copy` on its way to the host."""

    tokens: torch.Tensor
    copy: torch.Tensor
    copied: torch.cuda.Event | None = None

    @classmethod
    def of(cls, tokens: torch.Tensor) -> "SampledIds":
        """Start to copy `tokens` to the host."""
        if tokens.device.type == "cpu":
            return cls(tokens, tokens)
        copy = host_buffer(tokens.shape, tokens.device, tokens.dtype)
        copy.copy_(tokens, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        copied.record()
        return cls(tokens, copy, copied)

    def on_host(self) -> list[int]:
        """Wait for the copy and return it."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.copy.tolist()
