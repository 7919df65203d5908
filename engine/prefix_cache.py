"""Which full blocks hold the keys and values of which tokens, so that a later request need not compute them.

Law: a hash is an address, not a proof: a block is found only if its own tokens, its parent and its salt are
the ones asked for. This file knows what blocks hold, not who holds blocks.
"""

import hashlib
from array import array
from dataclasses import dataclass

from engine.sequence import Sequence

ROOT = b""
"""The parent of a first block."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """What a findable block holds. `publisher`: the request whose forward passes wrote it."""

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    salt: bytes
    publisher: str


def block_digest(parent: bytes, token_ids: list[int], salt: bytes) -> bytes:
    """The address of a full block: sha256 over the chain of blocks before it, its tokens, and the salt."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes() + salt).digest()


class PrefixCache:
    """An index of written blocks by the tokens that lead to them (vLLM's chained block hashes)."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._held_by: dict[int, CachedBlock] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._held_by

    def __len__(self) -> int:
        return len(self._held_by)

    def find(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known beginning of `sequence`, in order.

        At least its last token is left to compute: without a row there would be no logits to sample from.
        """
        found: list[int] = []
        parent = ROOT
        for number in range((sequence.num_tokens - 1) // self._block_size):
            digest = self._digest(sequence, number)
            block = self._block_of.get(digest)
            if block is None or not self._holds(block, sequence, number, parent):
                break
            found.append(block)
            parent = digest
        return found

    def publish(self, sequence: Sequence, number: int) -> None:
        """Make block `number` of `sequence` findable: it is full and its values are written."""
        digest = self._digest(sequence, number)
        block = sequence.block_table[number]
        if digest in self._block_of or block in self._held_by:
            return  # The first of two equal blocks stays the one that is found.
        parent = self._digest(sequence, number - 1) if number else ROOT
        tokens = self._tokens(sequence, number)
        self._block_of[digest] = block
        self._held_by[block] = CachedBlock(
            digest, parent, tuple(tokens), sequence.cache_salt, sequence.request_id
        )

    def forget(self, block: int) -> None:
        """Its values are going to be overwritten."""
        if cached := self._held_by.pop(block, None):
            del self._block_of[cached.digest]

    def published_by(self, request_id: str) -> list[int]:
        return [block for block, cached in self._held_by.items() if cached.publisher == request_id]

    def _holds(self, block: int, sequence: Sequence, number: int, parent: bytes) -> bool:
        cached = self._held_by[block]
        return (
            cached.parent == parent
            and cached.salt == sequence.cache_salt
            and cached.token_ids == tuple(self._tokens(sequence, number))
        )

    def _tokens(self, sequence: Sequence, number: int) -> list[int]:
        return sequence.token_ids[number * self._block_size : (number + 1) * self._block_size]

    def _digest(self, sequence: Sequence, number: int) -> bytes:
        """Computed once for each block of a sequence, and kept with it."""
        digests = sequence.block_digests
        while len(digests) <= number:
            parent = digests[-1] if digests else ROOT
            digests.append(block_digest(parent, self._tokens(sequence, len(digests)), sequence.cache_salt))
        return digests[number]
