"""The KV pool takes its share of the memory; one that does not fit is refused with a number that does."""

import pytest
import torch

from engine.errors import InvalidParameter
from engine.execution.loading import kv_sizing
from engine.execution.loading.kv_sizing import PoolMemory

GIB = 1 << 30


def test_a_pool_that_cannot_be_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PoolMemory(torch.device("cpu"), bytes_per_block=1 << 20, share=0.5)
    for available, message in {
        GIB: "10 KV blocks need 11534336 bytes on cpu, where 1073741824 are available; set it to at most 9",
        1 << 20: "are available; free some memory or use a smaller model",
        None: "more than are available; set it lower",
    }.items():
        monkeypatch.setattr(kv_sizing, "known_free_bytes", lambda _, known=available: known)
        with pytest.raises(InvalidParameter, match=message), memory.guard(10):
            raise RuntimeError("can't allocate memory: you tried to allocate 7 bytes")
    memory.check(2**31 - 1)  # Where the memory is not known, trying is all that can be done.


def test_blocks_within_a_share_of_the_memory() -> None:
    def choose(free: int, max_tokens: int = 16_000_000, share: float = 0.5) -> int:
        return kv_sizing.choose_num_kv_blocks(
            max_tokens=max_tokens, block_size=16, bytes_per_block=1 << 20, free_bytes=free, share=share
        )

    # Half of the memory, less the null block.
    assert choose(2 * GIB) == 1023
    assert choose(2 * GIB, share=1.0) == 2047
    # No more than can be used.
    assert choose(2 * GIB, max_tokens=161) == 11
    with pytest.raises(InvalidParameter, match=r"num_kv_blocks: .* hold no KV block"):
        choose(3 << 20)
    for share in (0.0, 1.1, -1.0):
        with pytest.raises(InvalidParameter, match="kv_memory_share"):
            choose(GIB, share=share)
