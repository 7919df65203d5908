"""Attention backends whose KV pools are full of NaN, so that reads of unwritten slots show."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine.execution.attention.interface import AttentionBackend, LayerSpec, PoolShape
from engine.execution.attention.native_backend import AttentionOperator, NativeAttention
from engine.execution.attention.torch_backend import TorchAttention
from engine.execution.machine.native_library import NativeLibrary, load_library
from engine.execution.sampling.native_draw import DrawOperator

ROOT = Path(__file__).parents[3]


@cache
def native_library() -> NativeLibrary:
    """Compiled once for all test runs. Tests that need it fail without a compiler."""
    return load_library(ROOT / ".tokenmill", lambda _: None)


def attention_operator() -> AttentionOperator:
    return AttentionOperator(native_library())


def draw_operator() -> DrawOperator:
    return DrawOperator(native_library())


def _plain(attention: str) -> Any:
    if attention == "torch":
        return TorchAttention
    # Imported here, so that other tests run without Triton.
    from engine.execution.attention.triton_backend import TritonAttention

    return TritonAttention


def cpu_shape(
    layers: tuple[LayerSpec, ...], num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32
) -> PoolShape:
    return PoolShape(layers, num_blocks, block_size, dtype, torch.device("cpu"))


def poisoned(attention: str, shape: PoolShape) -> AttentionBackend:
    """The backend "native", "torch" or "triton", with NaN everywhere except in the null block."""
    if attention in ("torch", "triton"):
        backend = _plain(attention)(shape)
        for pool in (*backend.pool.keys, *backend.pool.values):
            pool[1:] = torch.nan
        plain: AttentionBackend = backend
        return plain
    native = NativeAttention(attention_operator(), shape)
    for layer in native.pool.layers:
        layer.fill_(torch.nan)
    native.zero_blocks((0,))
    return native
