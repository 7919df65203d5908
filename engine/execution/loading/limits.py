"""Resolves the engine's limits from the device, the model and the memory; sizes the KV pool."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.execution.loading.loader import LoadedModel
from engine.execution.machine.device_errors import device_errors
from engine.execution.machine.memory import free_bytes, known_free_bytes

CPU_SHARE = 0.4
CUDA_SHARE = 0.85
"""Share of the memory that is free after loading. On a CPU, other programs need memory too."""
CUDA_LIMITS = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
"""Defaults on CUDA, which keep a GPU busy. The defaults of `EngineConfig` are for a CPU."""


def resolve_limits(
    loaded: LoadedModel, share: float | None, limits: dict[str, Any], progress: Callable[[str], None]
) -> EngineConfig:
    """`limits`, with defaults for those that are not set.

    Without `max_model_len`, a KV pool that does not hold the model's longest sequence reduces it, so that no
    request is accepted that can never run. A `max_model_len` that does not fit raises `InvalidParameter`.
    """
    limits = {**default_limits(loaded.device), **limits}
    length = model_length(loaded.max_model_len, limits.get("max_model_len"))
    config = EngineConfig(**{"num_kv_blocks": 1, **limits, "max_model_len": length})
    memory = pool_memory(loaded, config, share)
    if "num_kv_blocks" in limits:
        memory.check(config.num_kv_blocks)
    else:
        num_blocks = memory.choose_num_blocks(config.max_num_seqs * length, config.block_size)
        config = replace(config, num_kv_blocks=num_blocks)
    fitting = fit_model_len(config, is_required="max_model_len" in limits)
    if fitting < length:
        progress(
            f"max_model_len is {fitting} instead of the model's {length}: {config.num_kv_blocks} KV blocks"
            f" hold no more; num_kv_blocks={blocks_for(length, config.block_size)} would suffice"
        )
    return replace(config, max_model_len=fitting)


def default_limits(device: torch.device) -> dict[str, int]:
    """Fields of `EngineConfig` with other defaults on `device`."""
    return dict(CUDA_LIMITS) if device.type == "cuda" else {}


def model_length(limit: int | None, requested: int | None) -> int:
    """The longest sequence, from the model's `limit` and the setting. Raises `InvalidParameter`."""
    if requested is None:
        if limit is None:
            raise InvalidParameter(
                "max_model_len", "must be set: the model does not state its longest length"
            )
        return limit
    if limit is not None and requested > limit:
        raise InvalidParameter("max_model_len", f"is {requested}, but the model takes at most {limit} tokens")
    return requested


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Memory of the KV pool: `bytes_per_block` of all layers, and the `share` of free memory it may take."""

    device: torch.device
    bytes_per_block: int
    share: float

    def choose_num_blocks(self, max_tokens: int, block_size: int) -> int:
        """Blocks for `max_tokens`, or as many as fit into the share, besides the null block.

        Raises `InvalidParameter` if none fits.
        """
        if not 0 < self.share <= 1:
            raise InvalidParameter("kv_memory_share", f"must be above 0 and at most 1, not {self.share!r}")
        available = free_bytes(self.device)
        affordable = int(available * self.share) // self.bytes_per_block - 1
        if affordable < 1:
            raise InvalidParameter(
                "num_kv_blocks",
                f"{self.share:.0%} of the {available >> 20} MiB of free memory hold no KV block of"
                f" {self.bytes_per_block >> 10} KiB; free some memory or use a smaller model",
            )
        return min(affordable, blocks_for(max_tokens, block_size))

    def check(self, num_kv_blocks: int) -> None:
        """Raise `InvalidParameter`, with a number that fits, if the memory does not hold the blocks."""
        available = known_free_bytes(self.device)
        if available is not None and self._pool_bytes(num_kv_blocks) > available:
            raise InvalidParameter("num_kv_blocks", self._too_large(num_kv_blocks, available))

    @contextmanager
    def guard(self, num_kv_blocks: int) -> Iterator[None]:
        """Turn a failed allocation of the pool, or of the first pass, into `InvalidParameter`."""
        available = known_free_bytes(self.device)
        try:
            with device_errors():
                yield
        except MemoryError as error:
            raise InvalidParameter("num_kv_blocks", self._too_large(num_kv_blocks, available)) from error

    def _pool_bytes(self, num_kv_blocks: int) -> int:
        """Includes the null block."""
        return (num_kv_blocks + 1) * self.bytes_per_block

    def _too_large(self, num_kv_blocks: int, available: int | None) -> str:
        needs = f"{num_kv_blocks} KV blocks need {self._pool_bytes(num_kv_blocks)} bytes on {self.device}"
        if available is None:
            return f"{needs}, more than are available; set it lower"
        fitting = min(int(available * self.share) // self.bytes_per_block, num_kv_blocks) - 1
        advice = f"set it to at most {fitting}" if fitting > 0 else "free some memory or use a smaller model"
        return f"{needs}, where {available} are available; {advice}"


def pool_memory(loaded: LoadedModel, config: EngineConfig, share: float | None) -> PoolMemory:
    """`share`: None for the device's default."""
    if share is None:
        share = CUDA_SHARE if loaded.device.type == "cuda" else CPU_SHARE
    bytes_per_block = loaded.backend.bytes_per_block(loaded.layers, config.block_size, loaded.dtype)
    return PoolMemory(loaded.device, bytes_per_block, share)


def fit_model_len(config: EngineConfig, *, is_required: bool) -> int:
    """The longest sequence that the pool of `config` holds, at most its `max_model_len`.

    Raises `InvalidParameter`, with numbers that fit, if that is less and `is_required`.
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
    """KV blocks for `num_tokens` tokens."""
    return -(-num_tokens // block_size)
