"""Memory for weights and KV pools, which are read from end to end in each step: in pages of 2 MB where Linux
has them.

Law: it is memory like any other, only with fewer pages, so that the processor looks up fewer addresses. Where
there are no such pages it comes in small ones. What is never written takes none.
"""

import mmap
from contextlib import suppress

import torch

PAGE = 1 << 21
ALIGNMENT = 64
"""Bytes: of a cache line."""
CHUNK = 1 << 26
"""Bytes that are asked for at once, of which many small tensors are cut."""


def huge_empty(num_numbers: int, dtype: torch.dtype, *, behind: int = 0) -> torch.Tensor:
    """A tensor [num_numbers] of its own pages; its content is 0.

    `behind`: bytes of the first page that come before it. The system makes a page when it is first written,
    which takes its time; tensors that are filled side by side do not all need a new one at once if they
    begin at different places of a page.
    """
    num_bytes = num_numbers * dtype.itemsize
    if num_bytes < PAGE:
        return torch.zeros(num_numbers, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel that was built without them refuses.
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -whole.data_ptr() % PAGE + behind
    return whole[begin : begin + num_bytes].view(dtype)


class HugePages:
    """Cuts tensors of huge pages; one page is shared by those that stand side by side. For one thread."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, num_numbers: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor [num_numbers] that nobody else has; its content is 0. It keeps its chunk alive."""
        num_bytes = num_numbers * dtype.itemsize
        taken = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if taken > CHUNK // 4:
            return huge_empty(num_numbers, dtype)
        if taken > len(self._rest):
            self._rest = huge_empty(CHUNK, torch.uint8)
        piece, self._rest = self._rest[:num_bytes], self._rest[taken:]
        return piece.view(dtype)
