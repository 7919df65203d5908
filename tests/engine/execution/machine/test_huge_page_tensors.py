"""Tensors in huge pages: contents, lifetime, and the flags of their mappings."""

import mmap
from pathlib import Path

import pytest
import torch

from engine.execution.machine.memory import ALIGNMENT, CHUNK, PAGE, HugePageAllocator, huge_page_zeros

DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


def mapping_of(tensor: torch.Tensor) -> str:
    """The flags of the mapping that a tensor begins in."""
    found = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if "-" in word and not word.endswith(":"):
            begin, end = (int(part, 16) for part in word.split("-"))
            found = "in" if begin <= tensor.data_ptr() < end else ""
        elif found and word == "VmFlags:":
            return line
    raise AssertionError("a tensor lies in no mapping")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 1000, PAGE, 3 * PAGE + 7])
def test_a_tensor_is_zero_and_can_be_written(numel: int, dtype: torch.dtype) -> None:
    tensor = huge_page_zeros(numel, dtype)
    assert tensor.shape == (numel,)
    assert tensor.dtype == dtype
    assert not tensor.any()
    tensor.fill_(3)
    assert bool((tensor == 3).all())


def test_large_tensors_begin_with_a_page_and_huge_pages_are_asked_for() -> None:
    tensor = huge_page_zeros(2 * PAGE, torch.float32)
    assert tensor.data_ptr() % PAGE == 0
    has_them = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert (" hg" in mapping_of(tensor)) == has_them
    # Shared memory has huge pages only where an administrator wants them.
    assert " sh" not in mapping_of(tensor)


def test_a_large_tensor_begins_at_the_offset() -> None:
    for offset in (0, 5 * ALIGNMENT, PAGE - ALIGNMENT):
        tensor = huge_page_zeros(PAGE, torch.float32, offset=offset)
        assert tensor.data_ptr() % PAGE == offset
        assert bool((tensor.fill_(3) == 3).all())


def test_a_tensor_is_aligned_within_its_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does not align mappings to this many bytes."""
    monkeypatch.setattr("engine.execution.machine.memory.PAGE", 1 << 28)
    assert huge_page_zeros(1 << 28, torch.uint8).data_ptr() % (1 << 28) == 0


def test_a_view_keeps_the_memory_alive() -> None:
    view = huge_page_zeros(PAGE, torch.float32).fill_(7)[5:9]
    others = [huge_page_zeros(PAGE, torch.float32).fill_(1) for _ in range(4)]
    assert view.tolist() == [7.0] * 4
    assert len(others) == 4


def test_small_pages_are_used_if_the_kernel_refuses_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("engine.execution.machine.memory.mmap.mmap", Refusing)
    tensor = huge_page_zeros(2 * PAGE, torch.float32)
    assert " hg" not in mapping_of(tensor)
    assert float(tensor.fill_(1).sum()) == 2 * PAGE


def test_small_pages_are_used_on_systems_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("engine.execution.machine.memory.mmap.MADV_HUGEPAGE")
    assert float(huge_page_zeros(PAGE, torch.float32).fill_(1).sum()) == PAGE


def test_allocations_are_disjoint_and_aligned() -> None:
    """Small and large allocations, more than a chunk in total."""
    pages = HugePageAllocator()
    sizes = [1, 100, PAGE // 4, 7, CHUNK // 8, CHUNK // 16, CHUNK // 4, 3, *[PAGE] * 9]
    pieces = [pages.zeros(size, dtype) for size in sizes for dtype in DTYPES]
    for value, piece in enumerate(pieces):
        assert piece.data_ptr() % ALIGNMENT == 0
        assert not piece.any()
        piece.fill_(value)
    assert [piece.numel() for piece in pieces] == [size for size in sizes for _ in DTYPES]
    for value, piece in enumerate(pieces):
        assert bool((piece == value).all())


def test_small_allocations_share_a_chunk() -> None:
    pages = HugePageAllocator()
    first, second = pages.zeros(1000, torch.float32), pages.zeros(1000, torch.float32)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
