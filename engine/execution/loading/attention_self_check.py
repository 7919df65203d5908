"""Self-check of GPU attention kernels against torch's attention, before a worker is ready.

`agreement.py` checks a model in float32, over 44 tokens and blocks of 4. A GPU serves other compiled
variants: half precision on tensor cores, several tiles of keys, several splits of a row. So this check runs
the kernels with the served dtype, block size and heads, over up to 5,000 tokens.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from engine.errors import UnsupportedModel
from engine.execution.attention.interface import AttentionBackend, Backend, LayerCall, PoolShape
from engine.execution.attention.kv_pool import KVPool
from engine.execution.attention.torch_backend import TorchAttention
from engine.execution.loading.loader import LoadedModel
from engine.execution.runner.synthetic_steps import SyntheticSequences
from engine.execution.runner.transfers import move_inputs

log = logging.getLogger(__name__)

FLOAT32_DIFFERENCE = 1e-3
HALF_DIFFERENCE = 2e-2
"""Share of a row's largest value. Correct attention in half precision differs by 0.005; omitting one block of
16 tokens from 5,000 differs by 0.07.
"""
PARTS = ((0, 1), (254, 255), (256, 257), (999, 1000), (4999, 5000), (0, 150), (300, 500))
"""(start, end) of each sequence: decodes within one tile, around the shortest split, with several splits and
with the most splits; chunks of several query tiles, at the start and after other tokens."""
SHARPNESS = 0.5
"""Standard deviation of the scores. A large one gives a few keys nearly all weight, which hides errors."""


class PooledBackend(AttentionBackend, Protocol):
    """A backend with a `KVPool`."""

    pool: KVPool


def with_checked_attention(
    loaded: LoadedModel, backends: tuple[Backend, ...], block_size: int
) -> LoadedModel:
    """`loaded`, with the last of `backends` if its own backend fails its self-check.

    Raises `UnsupportedModel` if its own is the last one.
    """
    backend = loaded.backend
    if backend.self_check is None:
        return loaded
    try:
        for spec in dict.fromkeys(loaded.layers):
            backend.self_check(PoolShape((spec,), 1, block_size, loaded.dtype, loaded.device))
    except UnsupportedModel as error:
        if backend is backends[-1]:
            raise UnsupportedModel(f"{backend.name} attention: {error}") from error
        log.warning("%s attention is not used: %s", backend.name, error)
        return replace(loaded, backend=backends[-1])
    return loaded


def check_attention(make: Callable[[PoolShape], PooledBackend], shape: PoolShape) -> None:
    """Raise `UnsupportedModel` unless the backend agrees with torch's attention in the one layer of `shape`.

    The check makes its own pool and ignores the number of blocks of `shape`.
    """
    try:
        with torch.inference_mode():
            difference = _difference(make, shape)
    except UnsupportedModel:
        raise
    except Exception as error:
        # Compilers and drivers may raise anything.
        raise UnsupportedModel(f"its self-check failed: {type(error).__name__}: {error}") from error
    # Also true for NaN.
    if not difference <= (FLOAT32_DIFFERENCE if shape.dtype == torch.float32 else HALF_DIFFERENCE):
        raise UnsupportedModel(
            f"it disagrees with torch's by {difference:.2g} of the largest value in {shape.dtype} with"
            f" blocks of {shape.block_size} tokens"
        )


def _difference(make: Callable[[PoolShape], PooledBackend], shape: PoolShape) -> float:
    """The largest difference, as a share of the row's largest value."""
    (spec,), device, dtype = shape.layers, shape.device, shape.dtype
    generator = torch.Generator().manual_seed(0)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    sequences = SyntheticSequences([end for _, end in PARTS], shape.block_size)
    inputs = sequences.inputs((slot, start, end) for slot, (start, end) in enumerate(PARTS))
    batch = move_inputs(inputs, device).batch
    shape = shape._replace(num_blocks=sequences.num_blocks)
    ours, reference = make(shape), TorchAttention(shape._replace(dtype=torch.float32))
    pools = ((ours.pool.keys, reference.pool.keys), (ours.pool.values, reference.pool.values))
    for mine, theirs in pools:
        mine[0][1:] = noise(*mine[0][1:].shape)
        theirs[0][1:] = mine[0][1:]
    rows = len(batch.slot_mapping)
    query = noise(rows, spec.num_heads, spec.head_dim) * (SHARPNESS / spec.scaling * spec.head_dim**-0.5)
    key = noise(rows, spec.num_kv_heads, spec.head_dim)
    value = noise(rows, spec.num_kv_heads, spec.value_dim)
    sinks = noise(spec.num_heads) if spec.sinks else None
    call = LayerCall(0, spec.scaling, spec.sliding_window, spec.softcap, sinks)
    found = ours.build_metadata(batch).forward(call, query, key, value).float()
    expected = reference.build_metadata(batch).forward(call, query.float(), key.float(), value.float())
    return float(((found - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2))).max())
