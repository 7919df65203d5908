"""Takes the arrays of a step to the device in one copy that the host does not wait for.

Law: what arrives is what was packed, each array at an address that vector loads like. This file does not know
what the arrays mean.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from engine.execution.machine.async_copy import host_buffer
from engine.execution.runner.inputs import StepInputs

ALIGNMENT = 16
"""Integers of 8 bytes. A kernel that is compiled for aligned addresses would be compiled again for others."""


def aligned(count: int) -> int:
    """`count` integers and what fills them up."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def pack(tensors: list[torch.Tensor], buffer: torch.Tensor) -> None:
    """Write int64 tensors one after the other into `buffer`, which has `packed_size` integers."""
    at = 0
    for tensor in tensors:
        buffer[at : at + tensor.numel()] = tensor.flatten()
        at += aligned(tensor.numel())


def packed_size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(aligned(tensor.numel()) for tensor in tensors)


def unpack(buffer: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views of what `pack` wrote, in the shapes of `like`."""
    views = []
    at = 0
    for tensor in like:
        views.append(buffer[at : at + tensor.numel()].view(tensor.shape))
        at += aligned(tensor.numel())
    return views


def move(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Int64 tensors of the host on `device`: views of one tensor there."""
    buffer = host_buffer((packed_size(tensors),), device)
    pack(tensors, buffer)
    return unpack(buffer.to(device, non_blocking=True), tensors)


def move_inputs(inputs: StepInputs, device: torch.device) -> StepInputs:
    """The same step with its arrays on `device`. The batch stays on the host too, for those who plan."""
    if device.type == "cpu":
        return inputs
    own = [inputs.token_ids, inputs.positions, inputs.logits_rows]
    moved = move([*own, *inputs.batch.tensors], device)
    token_ids, positions, logits_rows = moved[:3]
    batch = replace(inputs.batch, moved=inputs.batch.with_tensors(moved[3:]))
    return replace(inputs, token_ids=token_ids, positions=positions, logits_rows=logits_rows, batch=batch)
