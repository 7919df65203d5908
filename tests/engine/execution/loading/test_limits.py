"""The KV pool takes its share of the memory; one that does not fit is refused with a number that fits."""

import pytest
import torch

from engine.errors import InvalidParameter
from engine.execution.loading import limits
from engine.execution.loading.limits import PoolMemory

GIB = 1 << 30
CPU = torch.device("cpu")


def test_a_pool_that_cannot_be_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PoolMemory(CPU, bytes_per_block=1 << 20, share=0.5)
    for available, message in {
        GIB: "10 KV blocks need 11534336 bytes on cpu, where 1073741824 are available; set it to at most 9",
        1 << 20: "are available; free some memory or use a smaller model",
        None: "more than are available; set it lower",
    }.items():
        monkeypatch.setattr(limits, "known_free_bytes", lambda _, known=available: known)
        with pytest.raises(InvalidParameter, match=message), memory.guard(10):
            raise RuntimeError("can't allocate memory: you tried to allocate 7 bytes")
    memory.check(2**31 - 1)  # Nothing is refused where the memory is not known.


def test_blocks_within_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(free: int, max_tokens: int = 16_000_000, share: float = 0.5) -> int:
        monkeypatch.setattr(limits, "free_bytes", lambda _: free)
        return PoolMemory(CPU, bytes_per_block=1 << 20, share=share).choose_num_blocks(max_tokens, 16)

    # Half of the memory, less the null block.
    assert choose(2 * GIB) == 1023
    assert choose(2 * GIB, share=1.0) == 2047
    # No more than max_tokens need.
    assert choose(2 * GIB, max_tokens=161) == 11
    with pytest.raises(InvalidParameter, match=r"num_kv_blocks: .* hold no KV block"):
        choose(3 << 20)
    for share in (0.0, 1.1, -1.0):
        with pytest.raises(InvalidParameter, match="kv_memory_share"):
            choose(GIB, share=share)
