"""Who holds which block of the KV cache. Numbers only: the tensors live with the runner.

Law: a block is free or has holders, never both; a failed allocation changes nothing; a free block keeps what
it holds, and stays findable, until somebody needs the room.
"""

from collections import OrderedDict

from engine.scheduling.prefix_cache import PrefixCache
from engine.sequence import Sequence


class BlockManager:
    """Hands out `num_kv_blocks` blocks of `block_size` tokens, numbered from 1: block 0 is the null block.

    Nobody holds the null block: padding is written there and never read. Blocks with the same beginning of
    a text are shared between sequences where `prefix_caching` is on, and always between the outputs of one
    request.
    """

    def __init__(self, num_kv_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_kv_blocks = num_kv_blocks
        self.block_size = block_size
        self.prefix_cache = PrefixCache(block_size)
        self._prefix_caching = prefix_caching
        # In the order in which they are given away: what holds nothing, then the least recently used.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_kv_blocks + 1))
        self._reference_counts = [0] * (num_kv_blocks + 1)
        self._num_cached_blocks = 0
        self._zero_when_free: set[int] = set()
        self._to_zero: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, those that can be found again among them."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that can be found again."""
        return self._num_cached_blocks

    def reference_count(self, block: int) -> int:
        return self._reference_counts[block]

    def num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold a beginning of `sequence` already; nothing is held by asking.

        None where the rows of the prompt itself are wanted: what is not computed has no logits.
        """
        if sequence.wants_prompt_logprobs or not self._is_shared(sequence):
            return []
        return self.prefix_cache.find(sequence)

    def can_allocate(self, num_tokens: int, prefix: list[int], *, without: Sequence) -> bool:
        """Whether a new sequence would get blocks for so many tokens if `without` held none."""
        num_missing = self.num_blocks_of(num_tokens) - len(prefix)
        gone = {block for block in without.block_table if self._reference_counts[block] == 1}
        num_taken = sum(1 for block in prefix if block in gone or not self._reference_counts[block])
        return num_missing + num_taken <= len(self._free) + len(gone)

    def allocate(self, sequence: Sequence, prefix: list[int] | None = None, num_tokens: int = 0) -> bool:
        """Let `sequence` hold blocks for all its known tokens; False, and no change, if too few are free.

        `prefix`: what `find_prefix` found, for a sequence that holds nothing yet. `num_tokens`: hold blocks
        for so many tokens, if that is more.
        """
        prefix = prefix or []
        num_tokens = max(num_tokens, sequence.num_tokens)
        num_missing = self.num_blocks_of(num_tokens) - len(sequence.block_table) - len(prefix)
        num_taken = sum(1 for block in prefix if not self._reference_counts[block])
        if num_missing + num_taken > len(self._free):
            return False
        for block in prefix:
            self._hold(sequence, block)
            sequence.num_published_blocks += 1
        for _ in range(num_missing):
            block = next(iter(self._free))
            self._hold(sequence, block)
            self.prefix_cache.forget(block)
        sequence.block_end = self.num_blocks_of(sequence.num_tokens) * self.block_size
        return True

    def allocate_next(self, sequence: Sequence) -> bool:
        """Let a sequence hold the block after that of its newest token; False, no change, if none is free.

        What `allocate` does, where that is all that is needed, at a fraction of the cost.
        """
        if sequence.block_end == len(sequence.block_table) * self.block_size:
            if not self._free:
                return False
            block, _ = self._free.popitem(last=False)
            if block in self.prefix_cache:
                self._num_cached_blocks -= 1
                self.prefix_cache.forget(block)
            self._reference_counts[block] = 1
            sequence.block_table.append(block)
        sequence.block_end += self.block_size
        return True

    def publish(self, sequence: Sequence) -> None:
        """Make findable what steps that have ended wrote of `sequence`."""
        num_published, num_full = (
            sequence.num_published_blocks,
            sequence.num_written_tokens // self.block_size,
        )
        if num_published < num_full:
            if self._is_shared(sequence):
                self.prefix_cache.publish(sequence, num_published, num_full)
            sequence.num_published_blocks = num_full

    def free(self, sequence: Sequence) -> None:
        """Take back all blocks of `sequence`."""
        # The tail first: of a chain of blocks the head is the likeliest to be of use again, and a tail whose
        # head is gone could not be found.
        for block in reversed(sequence.block_table):
            self._reference_counts[block] -= 1
            if not self._reference_counts[block]:
                self._give_back(block)
        sequence.block_table.clear()
        sequence.block_end = 0

    def verify(self, sequence: Sequence) -> None:
        """A finite row of `sequence` was sampled, from the values of all blocks that it holds."""
        sequence.is_verified = True
        self.prefix_cache.verify(sequence.block_table)

    def forget_unverified(self, sequence: Sequence) -> None:
        """`sequence` ends: no block stays findable that its request wrote and no finite row was sampled from.

        Nothing is zeroed: the next sequence that holds such a block writes each position or zeroes the
        block before it is read.
        """
        for block in self.prefix_cache.unverified_of(sequence.request_id):
            self._withdraw(block)

    def invalidate(self, sequence: Sequence) -> None:
        """`sequence` fails: what it wrote may not be finite, and even masked out, 0 times NaN is NaN.

        If no finite row was sampled since it was admitted, the blocks that it found may be the cause,
        whichever request wrote them. None of these stays findable, so they fail no request after it.
        """
        suspects = set(self.prefix_cache.published_by(sequence.request_id))
        if not sequence.is_verified:
            suspects.update(sequence.block_table)
        for block in suspects:
            self._withdraw(block)
        # What stays findable in its table was written by another, and a finite row was sampled from it.
        suspects.update(one for one in sequence.block_table if one not in self.prefix_cache)
        for block in suspects:
            (self._zero_when_free if self._reference_counts[block] else self._to_zero).add(block)

    def take_blocks_to_zero(self) -> tuple[int, ...]:
        """The blocks to set to zero before anything reads them."""
        blocks = tuple(sorted(self._to_zero))
        self._to_zero.clear()
        return blocks

    def zero_later(self, blocks: tuple[int, ...]) -> None:
        """Nobody has set these to zero."""
        self._to_zero.update(blocks)

    def _is_shared(self, sequence: Sequence) -> bool:
        return self._prefix_caching or sequence.shares_blocks

    def _hold(self, sequence: Sequence, block: int) -> None:
        if not self._reference_counts[block]:
            del self._free[block]
            self._num_cached_blocks -= block in self.prefix_cache
        self._reference_counts[block] += 1
        sequence.block_table.append(block)

    def _withdraw(self, block: int) -> None:
        """Not findable any more; if it is free, it is given away before those that are."""
        if block in self.prefix_cache and not self._reference_counts[block]:
            self._num_cached_blocks -= 1
            self._free.move_to_end(block, last=False)
        self.prefix_cache.forget(block)

    def _give_back(self, block: int) -> None:
        if block in self._zero_when_free:
            self._zero_when_free.remove(block)
            self._to_zero.add(block)
        self._free[block] = None
        if block in self.prefix_cache:
            self._num_cached_blocks += 1
        else:
            self._free.move_to_end(block, last=False)
