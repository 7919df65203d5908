"""The prefix cache: an index of full KV blocks by their tokens, so that a common prefix is computed once.

Invariants: a hash collision is no hit, because a block is found only if its tokens, its parent and its salt
are equal too.

A block is verified once a row of finite logits that depends on it has been sampled. A chunk that samples
nothing is published when it is written, and may hold non-finite values. So unverified blocks leave the index
when the request that published them ends.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from engine.sequence import Sequence

ROOT = b""
"""The parent of the first block."""


class CachedBlock(NamedTuple):
    """The contents of a cached block. `tokens`: as int64. `publisher`: id of the request that wrote it."""

    digest: bytes
    parent: bytes
    tokens: bytes
    salt: bytes
    publisher: str


def block_digest(parent: bytes, tokens: bytes, salt: bytes) -> bytes:
    """The hash of a full block: SHA-256 over the digest of its parent, its tokens, and the salt."""
    return hashlib.sha256(parent + tokens + salt).digest()


class PrefixCache:
    """An index of written blocks by chained block hashes, as in vLLM."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pack = struct.Struct(f"{block_size}q").pack
        self._block_of: dict[bytes, int] = {}
        self._cached: dict[int, CachedBlock] = {}
        # Unverified blocks by publisher.
        self._unverified: dict[str, set[int]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._cached

    def __len__(self) -> int:
        return len(self._cached)

    @property
    def blocks(self) -> Mapping[int, CachedBlock]:
        """The cached blocks by number."""
        return self._cached

    @property
    def num_unverified(self) -> int:
        """Unverified blocks in the index."""
        return sum(map(len, self._unverified.values()))

    def find(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest cached prefix of `sequence`, in order.

        The last token is never part of it: sampling needs the logits of at least one computed row.
        """
        found: list[int] = []
        parent = ROOT
        for number in range((sequence.num_tokens - 1) // self._block_size):
            tokens = self._tokens(sequence, number)
            digest = _digest(sequence, number, parent, tokens)
            block = self._block_of.get(digest)
            if block is None or self._cached[block][:4] != (digest, parent, tokens, sequence.cache_salt):
                break
            found.append(block)
            parent = digest
        return found

    def publish(self, sequence: Sequence, first: int, end: int) -> None:
        """Add blocks `first` to `end - 1` of `sequence`, which are full and written, to the index.

        The blocks before `first` were found here, or published already.
        """
        block_of, cached = self._block_of, self._cached
        parent = sequence.block_digests[first - 1] if first else ROOT
        for number in range(first, end):
            tokens = self._tokens(sequence, number)
            digest = _digest(sequence, number, parent, tokens)
            block = sequence.block_table[number]
            # Of two equal blocks the first one stays in the index.
            if digest not in block_of and block not in cached:
                block_of[digest] = block
                cached[block] = CachedBlock(digest, parent, tokens, sequence.cache_salt, sequence.request_id)
                if not sequence.is_verified:
                    self._unverified.setdefault(sequence.request_id, set()).add(block)
            parent = digest

    def verify(self, blocks: Iterable[int]) -> None:
        """Mark `blocks` as verified."""
        if not self._unverified:
            return
        for block in blocks:
            if cached := self._cached.get(block):
                self._remove_unverified(block, cached)

    def unverified_of(self, request_id: str) -> list[int]:
        """The unverified blocks that a request published."""
        return list(self._unverified.get(request_id, ()))

    def remove(self, block: int) -> None:
        """Remove a block whose values are overwritten or must not be reused. Does nothing if it is not
        cached.
        """
        if cached := self._cached.pop(block, None):
            del self._block_of[cached.digest]
            self._remove_unverified(block, cached)

    def published_by(self, request_id: str) -> list[int]:
        return [block for block, cached in self._cached.items() if cached.publisher == request_id]

    def _remove_unverified(self, block: int, cached: CachedBlock) -> None:
        if blocks := self._unverified.get(cached.publisher):
            blocks.discard(block)
            if not blocks:
                del self._unverified[cached.publisher]

    def _tokens(self, sequence: Sequence, number: int) -> bytes:
        first = number * self._block_size
        return self._pack(*sequence.token_ids[first : first + self._block_size])


def _digest(sequence: Sequence, number: int, parent: bytes, tokens: bytes) -> bytes:
    """The digest of block `number`, computed once and kept in the sequence."""
    digests = sequence.block_digests
    if number == len(digests):
        digests.append(block_digest(parent, tokens, sequence.cache_salt))
    return digests[number]
