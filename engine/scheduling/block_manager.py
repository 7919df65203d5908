"""The block manager: allocates the blocks of the KV cache to sequences, by number.

Invariants: a block is either free or has a reference count above zero. A failed allocation changes nothing. A
free block keeps its contents, and stays in the prefix cache, until it is allocated again.
"""

from collections import OrderedDict

from engine.scheduling.prefix_cache import PrefixCache
from engine.sequence import Sequence


class BlockManager:
    """Allocates `num_kv_blocks` blocks of `block_size` tokens, numbered from 1.

    Block 0 is the null block: padding is written there and never read, and it is not allocated. Sequences
    with a common prefix share its full blocks if `prefix_caching` is on; the outputs of one request always
    do.
    """

    def __init__(self, num_kv_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_kv_blocks = num_kv_blocks
        self.block_size = block_size
        self.prefix_cache = PrefixCache(block_size)
        self._prefix_caching = prefix_caching
        # In order of allocation: uncached blocks, then cached ones, least recently used first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_kv_blocks + 1))
        self._reference_counts = [0] * (num_kv_blocks + 1)
        self._num_cached_blocks = 0
        self._zero_when_free: set[int] = set()
        self._to_zero: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a reference, including cached ones."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks in the prefix cache."""
        return self._num_cached_blocks

    def reference_count(self, block: int) -> int:
        return self._reference_counts[block]

    def num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The cached blocks of the longest prefix of `sequence`. Does not allocate them.

        Empty if the logits of all prompt rows are wanted: tokens found in the cache are not computed.
        """
        if sequence.wants_prompt_logprobs or not self._is_shared(sequence):
            return []
        return self.prefix_cache.find(sequence)

    def can_allocate(self, num_tokens: int, prefix: list[int], *, without: Sequence) -> bool:
        """Whether a new sequence could allocate blocks for `num_tokens` tokens if `without` held none."""
        num_missing = self.num_blocks_of(num_tokens) - len(prefix)
        freed = {block for block in without.block_table if self._reference_counts[block] == 1}
        num_revived = sum(1 for block in prefix if block in freed or not self._reference_counts[block])
        return num_missing + num_revived <= len(self._free) + len(freed)

    def allocate(self, sequence: Sequence, prefix: list[int] | None = None, num_tokens: int = 0) -> bool:
        """Allocate blocks for all known tokens. Returns False, and changes nothing, if too few are free.

        `prefix`: the result of `find_prefix`, for a sequence without blocks. `num_tokens`: allocate for
        this number of tokens if it is larger.
        """
        prefix = prefix or []
        num_tokens = max(num_tokens, sequence.num_tokens)
        num_missing = self.num_blocks_of(num_tokens) - len(sequence.block_table) - len(prefix)
        num_revived = sum(1 for block in prefix if not self._reference_counts[block])
        if num_missing + num_revived > len(self._free):
            return False
        for block in prefix:
            self._add_reference(sequence, block)
            sequence.num_published_blocks += 1
        for _ in range(num_missing):
            block = next(iter(self._free))
            self._add_reference(sequence, block)
            self.prefix_cache.remove(block)
        sequence.block_end = self.num_blocks_of(sequence.num_tokens) * self.block_size
        return True

    def allocate_next(self, sequence: Sequence) -> bool:
        """Allocate the block after that of the newest token. Returns False, and changes nothing, if none is
        free.

        A fast path of `allocate` for decodes.
        """
        if sequence.block_end == len(sequence.block_table) * self.block_size:
            if not self._free:
                return False
            block, _ = self._free.popitem(last=False)
            if block in self.prefix_cache:
                self._num_cached_blocks -= 1
                self.prefix_cache.remove(block)
            self._reference_counts[block] = 1
            sequence.block_table.append(block)
        sequence.block_end += self.block_size
        return True

    def extend(self, sequence: Sequence, num_tokens: int) -> int:
        """Allocate blocks for positions beyond the newest token, as far as uncached blocks are free.

        Returns how many tokens the blocks of the sequence hold, which may be less than `num_tokens`.
        """
        missing = self.num_blocks_of(num_tokens) - len(sequence.block_table)
        for _ in range(min(missing, len(self._free) - self._num_cached_blocks)):
            block, _ = self._free.popitem(last=False)
            self._reference_counts[block] = 1
            sequence.block_table.append(block)
        return len(sequence.block_table) * self.block_size

    def advance(self, sequence: Sequence) -> None:
        """Count one more token of `sequence` as computed, for which it holds a block."""
        if sequence.num_computed_tokens == sequence.block_end:
            self.publish(sequence)
            sequence.block_end += self.block_size
        sequence.num_computed_tokens += 1

    def publish(self, sequence: Sequence) -> None:
        """Add the full blocks of `sequence` to the prefix cache, as far as ended steps have written them."""
        num_published = sequence.num_published_blocks
        num_full = sequence.num_written_tokens // self.block_size
        if num_published < num_full:
            if self._is_shared(sequence):
                self.prefix_cache.publish(sequence, num_published, num_full)
            sequence.num_published_blocks = num_full

    def free(self, sequence: Sequence) -> None:
        """Remove all references of `sequence`."""
        # The tail first, so that it is evicted first: the head of a chain of blocks is the likeliest to be
        # reused, and a tail without its head cannot be found.
        for block in reversed(sequence.block_table):
            self._reference_counts[block] -= 1
            if not self._reference_counts[block]:
                self._free_block(block)
        sequence.block_table.clear()
        sequence.block_end = sequence.num_published_blocks = 0

    def verify(self, sequence: Sequence) -> None:
        """Mark all blocks of `sequence` as verified: a sampled row of finite logits depends on them."""
        sequence.is_verified = True
        self.prefix_cache.verify(sequence.block_table)

    def unpublish_unverified(self, sequence: Sequence) -> None:
        """Remove the unverified blocks of a sequence that ends from the prefix cache.

        They need no zeroing here: an attention backend reads a position only after its sequence wrote it, or
        after it zeroed the block that the sequence began.
        """
        for block in self.prefix_cache.unverified_of(sequence.request_id):
            self._unpublish(block)

    def invalidate(self, sequence: Sequence) -> None:
        """Remove the blocks that a failed sequence wrote from the prefix cache, and have them zeroed.

        They may hold non-finite values, which spread even from masked positions: 0 times NaN is NaN. If the
        sequence was not verified since its admission, the cached blocks that it found may be the cause, and
        are removed too.
        """
        suspects = set(self.prefix_cache.published_by(sequence.request_id))
        if not sequence.is_verified:
            suspects.update(sequence.block_table)
        for block in suspects:
            self._unpublish(block)
        # The rest of its table was written by other requests, and is verified.
        suspects.update(one for one in sequence.block_table if one not in self.prefix_cache)
        for block in suspects:
            (self._zero_when_free if self._reference_counts[block] else self._to_zero).add(block)

    def pop_blocks_to_zero(self) -> tuple[int, ...]:
        """The blocks to zero before they are read; each is returned once."""
        blocks = tuple(sorted(self._to_zero))
        self._to_zero.clear()
        return blocks

    def restore_blocks_to_zero(self, blocks: tuple[int, ...]) -> None:
        """Return `blocks` to the set of `pop_blocks_to_zero`: they have not been zeroed."""
        self._to_zero.update(blocks)

    def _is_shared(self, sequence: Sequence) -> bool:
        return self._prefix_caching or sequence.shares_blocks

    def _add_reference(self, sequence: Sequence, block: int) -> None:
        if not self._reference_counts[block]:
            del self._free[block]
            self._num_cached_blocks -= block in self.prefix_cache
        self._reference_counts[block] += 1
        sequence.block_table.append(block)

    def _unpublish(self, block: int) -> None:
        """Remove a block from the prefix cache. If it is free, it is allocated before cached ones."""
        if block in self.prefix_cache and not self._reference_counts[block]:
            self._num_cached_blocks -= 1
            self._free.move_to_end(block, last=False)
        self.prefix_cache.remove(block)

    def _free_block(self, block: int) -> None:
        if block in self._zero_when_free:
            self._zero_when_free.remove(block)
            self._to_zero.add(block)
        self._free[block] = None
        if block in self.prefix_cache:
            self._num_cached_blocks += 1
        else:
            self._free.move_to_end(block, last=False)
