"""Copies between host and device."""

import pytest
import torch

from engine.execution.machine import async_copy
from engine.execution.machine.async_copy import SampledIds, copy_to_device, host_buffer

CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda")
IDS = torch.tensor([[3, 1], [2, 7]], dtype=torch.int32)


def test_memory_is_pinned_for_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[int, ...], torch.dtype, bool]] = []

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append((shape, dtype, pin_memory))
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    host_buffer((3,), CUDA)
    host_buffer((3, 2), CPU, torch.float32)
    assert asked == [((3,), torch.int64, True), ((3, 2), torch.float32, False)]


def test_nothing_is_copied_on_a_cpu() -> None:
    assert copy_to_device(IDS, CPU) is IDS
    drawn = SampledIds.of(IDS)
    assert drawn.tokens is drawn.copy is IDS
    assert drawn.on_host() == IDS.tolist()


def test_copies_use_a_buffer_of_the_same_shape_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[torch.Tensor] = []

    def remembered(shape: tuple[int, ...], _: torch.device, dtype: torch.dtype) -> torch.Tensor:
        buffers.append(torch.zeros(shape, dtype=dtype))
        return buffers[-1]

    monkeypatch.setattr(async_copy, "host_buffer", remembered)
    there = copy_to_device(IDS, META)
    assert (there.shape, there.dtype, there.device) == (IDS.shape, IDS.dtype, META)
    (buffer,) = buffers
    assert torch.equal(buffer, IDS)
