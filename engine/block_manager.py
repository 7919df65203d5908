"""Who holds which block of the KV cache. Numbers only: the tensors live with the runner.

Law: a block is free or has at least one holder, never both; a failed allocation changes nothing.
"""

from collections import deque

from engine.sequence import Sequence


class BlockManager:
    """Hands out `num_kv_blocks` blocks of `block_size` tokens, numbered from 1: block 0 is the null block.

    Nobody holds the null block: padding is written there and never read.
    """

    def __init__(self, num_kv_blocks: int, block_size: int) -> None:
        self.num_kv_blocks = num_kv_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(1, num_kv_blocks + 1))
        self._reference_counts = [0] * (num_kv_blocks + 1)
        self._tainted: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def reference_count(self, block: int) -> int:
        return self._reference_counts[block]

    def num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, sequence: Sequence) -> bool:
        """Let `sequence` hold blocks for all its known tokens; False, and no change, if too few are free."""
        num_missing = self.num_blocks_of(sequence.num_tokens) - len(sequence.block_table)
        if num_missing > len(self._free):
            return False
        for _ in range(num_missing):
            block = self._free.popleft()
            self._reference_counts[block] += 1
            sequence.block_table.append(block)
        return True

    def free(self, sequence: Sequence, *, taint: bool = False) -> None:
        """Take back all blocks of `sequence`. `taint`: they may hold values that are not finite."""
        # The tail first: of a chain of blocks the head is the likeliest to be of use again.
        for block in reversed(sequence.block_table):
            self._reference_counts[block] -= 1
            if not self._reference_counts[block]:
                self._free.append(block)
                if taint:
                    self._tainted.add(block)
        sequence.block_table.clear()

    def take_tainted(self) -> tuple[int, ...]:
        """The blocks to set to zero before anything reads them: masked out, 0 times NaN is still NaN."""
        tainted = tuple(sorted(self._tainted))
        self._tainted.clear()
        return tainted
