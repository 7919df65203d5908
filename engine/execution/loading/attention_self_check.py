"""Compares attention on a GPU with torch's under the conditions of service, before a worker is ready.

The trial of a model (`trial.py`) runs in float32, over 44 tokens and blocks of 4. What a GPU serves is
compiled from other code: half precision on tensor cores, several tiles of keys, several splits of a row. So
the kernels run here with the served dtype, block size and heads, over up to 5,000 tokens.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from engine.errors import UnsupportedModel
from engine.execution.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    Backend,
    LayerCall,
    PoolShape,
)
from engine.execution.attention.kv_pool import KVPool
from engine.execution.attention.torch_backend import TorchAttention
from engine.execution.loading.loader import LoadedModel
from engine.execution.runner.inputs import InputBuilder
from engine.execution.runner.transfers import move_inputs
from engine.outputs import ScheduledSequence, SchedulerOutputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

log = logging.getLogger(__name__)

FLOAT32_DIFFERENCE = 1e-3
HALF_DIFFERENCE = 2e-2
"""Of the largest number of a row. Sound attention in half precision differs by 0.005; one block of 16 tokens
that is left out of 5,000 by 0.07.
"""
PARTS = ((0, 1), (254, 255), (256, 257), (999, 1000), (4999, 5000), (0, 150), (300, 500))
"""(start, end) of each sequence: decodes within one tile, around the shortest split, of several splits and of
as many as there are; chunks of several tiles of queries, from the beginning and behind other tokens."""
SHARPNESS = 0.5
"""Deviation of the scores. With a large one a few keys weigh nearly all, and an error in the others hides."""


class PooledBackend(AttentionBackend, Protocol):
    """A backend whose keys and values lie in a `KVPool`."""

    pool: KVPool


def with_checked_attention(
    loaded: LoadedModel, backends: tuple[Backend, ...], block_size: int
) -> LoadedModel:
    """`loaded`, with the last of `backends` if its own fails its self-check.

    Raises `UnsupportedModel` if that is its own.
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

    The pool is the check's own: the number of blocks of `shape` is not used.
    """
    try:
        with torch.inference_mode():
            difference = _difference(make, shape)
    except UnsupportedModel:
        raise
    except Exception as error:
        # Compilers and drivers raise what they like.
        raise UnsupportedModel(f"its self-check failed: {type(error).__name__}: {error}") from error
    # NaN is not within the bound either.
    if not difference <= (FLOAT32_DIFFERENCE if shape.dtype == torch.float32 else HALF_DIFFERENCE):
        raise UnsupportedModel(
            f"it disagrees with torch's by {difference:.2g} of the largest number in {shape.dtype} with"
            f" blocks of {shape.block_size} tokens"
        )


def _difference(make: Callable[[PoolShape], PooledBackend], shape: PoolShape) -> float:
    """The largest, as a share of the row's largest number."""
    (spec,), device, dtype = shape.layers, shape.device, shape.dtype
    generator = torch.Generator().manual_seed(0)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    batch, num_blocks = _batch(shape.block_size, device)
    shape = shape._replace(num_blocks=num_blocks)
    ours, right = make(shape), TorchAttention(shape._replace(dtype=torch.float32))
    for mine, theirs in ((ours.pool.keys, right.pool.keys), (ours.pool.values, right.pool.values)):
        mine[0][1:] = noise(*mine[0][1:].shape)
        theirs[0][1:] = mine[0][1:]
    rows = len(batch.slot_mapping)
    query = noise(rows, spec.num_heads, spec.head_dim) * (SHARPNESS / spec.scaling * spec.head_dim**-0.5)
    key = noise(rows, spec.num_kv_heads, spec.head_dim)
    value = noise(rows, spec.num_kv_heads, spec.value_dim)
    sinks = noise(spec.num_heads) if spec.sinks else None
    call = LayerCall(0, spec.scaling, spec.sliding_window, spec.softcap, sinks)
    found = ours.build_metadata(batch).forward(call, query, key, value).float()
    expected = right.build_metadata(batch).forward(call, query.float(), key.float(), value.float())
    return float(((found - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2))).max())


def _batch(block_size: int, device: torch.device) -> tuple[AttentionBatch, int]:
    """A step of `PARTS` on `device`, and the number of blocks that it needs, the null block included."""
    builder = InputBuilder(len(PARTS), max(end for _, end in PARTS), block_size)
    items, num_blocks = [], 1
    for slot, (start, end) in enumerate(PARTS):
        sequence = Sequence(f"self-check-{slot}", [0] * end, SamplingParams(), arrival_time=0.0)
        sequence.admit(slot)
        width = -(-end // block_size)
        # Backwards: a kernel that counts blocks up instead of reading the table is found.
        sequence.block_table = list(range(num_blocks + width - 1, num_blocks - 1, -1))
        num_blocks += width
        items.append(ScheduledSequence(sequence, start, end - start, 0, False))
    inputs = builder.build(SchedulerOutputs(prefill=tuple(items)))
    return move_inputs(inputs, device).batch, num_blocks
