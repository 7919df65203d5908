"""Which full blocks hold the keys and values of which tokens, so that a later request need not compute them.

Law: a hash is an address, not a proof: a block is found only if its own tokens, its parent and its salt are
the ones asked for. This file knows what blocks hold, not who holds blocks.

A block is unverified until a finite row has been sampled from it. Its values may not be finite, since a chunk
that samples nothing is published as it is written; so it leaves the index when its publisher ends.
"""

import hashlib
import struct
from collections.abc import Iterable
from typing import NamedTuple

from engine.sequence import Sequence

ROOT = b""
"""The parent of a first block."""


class CachedBlock(NamedTuple):
    """What a findable block holds: `tokens` as int64. `publisher`: the request that wrote it."""

    digest: bytes
    parent: bytes
    tokens: bytes
    salt: bytes
    publisher: str


def block_digest(parent: bytes, tokens: bytes, salt: bytes) -> bytes:
    """The address of a full block: sha256 over the chain of blocks before it, its tokens, and the salt."""
    return hashlib.sha256(parent + tokens + salt).digest()


class PrefixCache:
    """An index of written blocks by the tokens that lead to them (vLLM's chained block hashes)."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pack = struct.Struct(f"{block_size}q").pack
        self._block_of: dict[bytes, int] = {}
        self._held_by: dict[int, CachedBlock] = {}
        # By publisher: findable blocks from which no finite row has been sampled yet.
        self._unverified: dict[str, set[int]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._held_by

    def __len__(self) -> int:
        return len(self._held_by)

    @property
    def num_unverified(self) -> int:
        """Findable blocks from which no finite row has been sampled yet."""
        return sum(map(len, self._unverified.values()))

    def find(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known beginning of `sequence`, in order.

        At least its last token is left to compute: without a row there would be no logits to sample from.
        """
        found: list[int] = []
        parent = ROOT
        for number in range((sequence.num_tokens - 1) // self._block_size):
            tokens = self._tokens(sequence, number)
            digest = _digest(sequence, number, parent, tokens)
            block = self._block_of.get(digest)
            if block is None or self._held_by[block][:4] != (digest, parent, tokens, sequence.cache_salt):
                break
            found.append(block)
            parent = digest
        return found

    def publish(self, sequence: Sequence, first: int, end: int) -> None:
        """Make blocks `first` to `end - 1` of `sequence` findable: they are full, and written.

        Those before `first` were found here, or published.
        """
        block_of, held_by = self._block_of, self._held_by
        parent = sequence.block_digests[first - 1] if first else ROOT
        for number in range(first, end):
            tokens = self._tokens(sequence, number)
            digest = _digest(sequence, number, parent, tokens)
            block = sequence.block_table[number]
            # The first of two equal blocks stays the one that is found.
            if digest not in block_of and block not in held_by:
                block_of[digest] = block
                held_by[block] = CachedBlock(digest, parent, tokens, sequence.cache_salt, sequence.request_id)
                if not sequence.is_verified:
                    self._unverified.setdefault(sequence.request_id, set()).add(block)
            parent = digest

    def verify(self, blocks: Iterable[int]) -> None:
        """A finite row was sampled from the values of all `blocks`."""
        if not self._unverified:
            return
        for block in blocks:
            if cached := self._held_by.get(block):
                self._settle(block, cached)

    def unverified_of(self, request_id: str) -> list[int]:
        """The findable blocks that a request published and no finite row was sampled from."""
        return list(self._unverified.get(request_id, ()))

    def forget(self, block: int) -> None:
        """Its values are going to be overwritten, or are not to be used again."""
        if cached := self._held_by.pop(block, None):
            del self._block_of[cached.digest]
            self._settle(block, cached)

    def published_by(self, request_id: str) -> list[int]:
        return [block for block, cached in self._held_by.items() if cached.publisher == request_id]

    def _settle(self, block: int, cached: CachedBlock) -> None:
        if blocks := self._unverified.get(cached.publisher):
            blocks.discard(block)
            if not blocks:
                del self._unverified[cached.publisher]

    def _tokens(self, sequence: Sequence, number: int) -> bytes:
        first = number * self._block_size
        return self._pack(*sequence.token_ids[first : first + self._block_size])


def _digest(sequence: Sequence, number: int, parent: bytes, tokens: bytes) -> bytes:
    """Computed once for each block of a sequence, in order, and kept with it."""
    digests = sequence.block_digests
    if number == len(digests):
        digests.append(block_digest(parent, tokens, sequence.cache_salt))
    return digests[number]
