"""Copies the arrays of a step to the device in one transfer that the host does not wait for."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from engine.execution.machine.async_copy import host_buffer
from engine.execution.runner.inputs import StepInputs

ALIGNMENT = 16
"""In integers of 8 bytes. Kernels are compiled for aligned addresses, and once more for others."""


def aligned(count: int) -> int:
    """`count` integers, rounded up to the alignment."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def pack(tensors: list[torch.Tensor], buffer: torch.Tensor) -> None:
    """Write int64 tensors into `buffer` of `packed_size` integers, each at an aligned offset."""
    offset = 0
    for tensor in tensors:
        buffer[offset : offset + tensor.numel()] = tensor.flatten()
        offset += aligned(tensor.numel())


def packed_size(tensors: Iterable[torch.Tensor]) -> int:
    """Integers that `pack` needs."""
    return sum(aligned(tensor.numel()) for tensor in tensors)


def unpack(buffer: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views of what `pack` wrote, in the shapes of `like`."""
    views = []
    offset = 0
    for tensor in like:
        views.append(buffer[offset : offset + tensor.numel()].view(tensor.shape))
        offset += aligned(tensor.numel())
    return views


def move(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy int64 tensors of the host to `device`; returns views of one tensor there."""
    buffer = host_buffer((packed_size(tensors),), device)
    pack(tensors, buffer)
    return unpack(buffer.to(device, non_blocking=True), tensors)


def move_inputs(inputs: StepInputs, device: torch.device) -> StepInputs:
    """The step with its arrays on `device`. The batch also stays on the host, where backends plan with it."""
    if device.type == "cpu":
        return inputs
    own = [inputs.token_ids, inputs.positions, inputs.logits_rows]
    moved = move([*own, *inputs.batch.tensors], device)
    token_ids, positions, logits_rows = moved[:3]
    batch = replace(inputs.batch, moved=inputs.batch.with_tensors(moved[3:]))
    return replace(inputs, token_ids=token_ids, positions=positions, logits_rows=logits_rows, batch=batch)
