"""Sizes the KV pool: how many blocks the memory holds, and whether the longest sequence fits into them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.execution.machine.device_errors import device_errors
from engine.execution.machine.memory import known_free_bytes

CPU_SHARE = 0.4
CUDA_SHARE = 0.85
"""Of the memory that is free after the model is loaded. A CPU's memory is other programs' too."""


def choose_num_kv_blocks(
    *, max_tokens: int, block_size: int, bytes_per_block: int, free_bytes: int, share: float
) -> int:
    """Usable blocks: enough for `max_tokens`, if these fit into `share` of `free_bytes`, else what fits.

    One more, the null block, is counted as memory. Raises `InvalidParameter` when none fits.
    """
    if not 0 < share <= 1:
        raise InvalidParameter("kv_memory_share", f"must be above 0 and at most 1, not {share!r}")
    affordable = int(free_bytes * share) // bytes_per_block - 1
    if affordable < 1:
        raise InvalidParameter(
            "num_kv_blocks",
            f"{share:.0%} of the {free_bytes >> 20} MiB of free memory hold no KV block of"
            f" {bytes_per_block >> 10} KiB; free some memory or use a smaller model",
        )
    return min(affordable, -(-max_tokens // block_size))


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Memory of the pool: `bytes_per_block` of all layers; `share` of the free memory that it may take."""

    device: torch.device
    bytes_per_block: int
    share: float

    def check(self, num_kv_blocks: int) -> None:
        """Raise `InvalidParameter`, with a number that would do, if the memory does not hold the blocks."""
        available = known_free_bytes(self.device)
        if available is not None and self._pool_bytes(num_kv_blocks) > available:
            raise InvalidParameter("num_kv_blocks", self._too_large(num_kv_blocks, available))

    @contextmanager
    def guard(self, num_kv_blocks: int) -> Iterator[None]:
        """Turn a failure to allocate the pool, or what the first pass needs, into `InvalidParameter`."""
        available = known_free_bytes(self.device)
        try:
            with device_errors():
                yield
        except MemoryError as error:
            raise InvalidParameter("num_kv_blocks", self._too_large(num_kv_blocks, available)) from error

    def _pool_bytes(self, num_kv_blocks: int) -> int:
        """With the null block."""
        return (num_kv_blocks + 1) * self.bytes_per_block

    def _too_large(self, num_kv_blocks: int, available: int | None) -> str:
        needs = f"{num_kv_blocks} KV blocks need {self._pool_bytes(num_kv_blocks)} bytes on {self.device}"
        if available is None:
            return f"{needs}, more than are available; set it lower"
        fitting = min(int(available * self.share) // self.bytes_per_block, num_kv_blocks) - 1
        advice = f"set it to at most {fitting}" if fitting > 0 else "free some memory or use a smaller model"
        return f"{needs}, where {available} are available; {advice}"


def fit_model_len(config: EngineConfig, *, is_required: bool) -> int:
    """The longest sequence that the pool of `config` holds, at most its `max_model_len`.

    Raises `InvalidParameter` with the numbers that would do if that is less and `is_required`.
    """
    if config.max_model_len <= config.kv_capacity:
        return config.max_model_len
    if is_required:
        raise InvalidParameter(
            "max_model_len",
            f"is {config.max_model_len}, but {config.num_kv_blocks} KV blocks of {config.block_size} tokens"
            f" hold {config.kv_capacity}; set it to at most {config.kv_capacity}, or num_kv_blocks to at"
            f" least {blocks_for(config.max_model_len, config.block_size)}",
        )
    return config.kv_capacity


def blocks_for(num_tokens: int, block_size: int) -> int:
    """KV blocks of one sequence of `num_tokens`."""
    return -(-num_tokens // block_size)
