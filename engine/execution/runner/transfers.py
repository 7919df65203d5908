"""Copies the arrays of a step to the device in one transfer that the host does not wait for."""

from dataclasses import replace

import torch

from engine.execution.machine.async_copy import host_buffer
from engine.execution.runner.inputs import StepInputs

ALIGNMENT = 16
"""In integers of 8 bytes. Kernels are compiled for aligned addresses, and once more for others."""


def aligned(count: int) -> int:
    """`count` integers, rounded up to the alignment."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def move(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy int64 tensors of the host to `device`; returns aligned views of one tensor there."""
    sizes = [aligned(tensor.numel()) for tensor in tensors]
    buffer = host_buffer((sum(sizes),), device)
    for part, tensor in zip(torch.split(buffer, sizes), tensors, strict=True):
        part[: tensor.numel()] = tensor.flatten()
    parts = torch.split(buffer.to(device, non_blocking=True), sizes)
    return [part[: one.numel()].view(one.shape) for part, one in zip(parts, tensors, strict=True)]


def move_inputs(inputs: StepInputs, device: torch.device) -> StepInputs:
    """The step with its arrays on `device`. The batch also stays on the host, where backends plan with it."""
    if device.type == "cpu":
        return inputs
    own = [inputs.token_ids, inputs.positions, inputs.logits_rows]
    moved = move([*own, *inputs.batch.tensors], device)
    token_ids, positions, logits_rows = moved[:3]
    batch = replace(inputs.batch, moved=inputs.batch.with_tensors(moved[3:]))
    return replace(inputs, token_ids=token_ids, positions=positions, logits_rows=logits_rows, batch=batch)
