"""Paged attention in plain torch, for every device. The reference for other backends.

A row sees the tokens of its own sequence up to itself, and a batch may be computed again after a failure.
Decode rows of similar lengths are gathered together; each chunk is computed alone.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.execution.attention.interface import AttentionBatch, Chunk, LayerCall, PoolShape
from engine.execution.attention.kv_pool import KVPool
from engine.execution.machine.async_copy import copy_to_device

MAX_BUCKETS = 4
ROWS_PER_BUCKET = 8
"""Fewer rows do not repay a separate gather (measured on two CPU cores)."""
MAX_SCORES = 1 << 24
"""Scores that are materialised at a time, where they must be: 64 MiB in float32."""


class TorchAttention:
    """A KV pool of `shape`, and attention over it."""

    def __init__(self, shape: PoolShape) -> None:
        self.pool = KVPool(shape)

    def build_metadata(self, batch: AttentionBatch) -> "TorchMetadata":
        self.pool.prepare(batch)
        return TorchMetadata(self.pool, batch)

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        self.pool.zero_blocks(blocks)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Decode rows that are padded to one width: `tables` [rows, blocks], `mask` [rows, tokens]."""

    rows: torch.Tensor
    tables: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of one sequence. `slot_mapping` [tokens], `mask` [rows, tokens]; None: causal among the rows."""

    rows: slice
    slot_mapping: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What layers with the same window read."""

    buckets: tuple[_Bucket, ...]
    chunks: tuple[_Chunk, ...]


class TorchMetadata:
    """One forward pass. The reads are planned once for each sliding window."""

    def __init__(self, pool: KVPool, batch: AttentionBatch) -> None:
        self._pool = pool
        self._batch = batch
        self._on_device = batch.on(pool.device)
        self._plans: dict[int | None, _Plan] = {}

    def forward(
        self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self._pool.store(call.layer, self._on_device.slot_mapping, key, value)
        keys, values = self._pool.keys[call.layer], self._pool.values[call.layer]
        flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
        plan = self._plan(call.sliding_window)
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        for bucket in plan.buckets:
            seen = (keys[bucket.tables].flatten(1, 2), values[bucket.tables].flatten(1, 2))
            out.index_copy_(0, bucket.rows, _attend_decode_rows(call, query[bucket.rows], *seen, bucket.mask))
        for chunk in plan.chunks:
            rows, slots = chunk.rows, chunk.slot_mapping
            seen = (key[rows], value[rows]) if slots is None else (flat_keys[slots], flat_values[slots])
            out[rows] = _attend_chunk(call, query[rows], *seen, chunk.mask)
        return out

    def _plan(self, window: int | None) -> _Plan:
        if window not in self._plans:
            block_size, device = self._pool.block_size, self._pool.device
            self._plans[window] = _Plan(
                _plan_buckets(self._batch, window, block_size, device),
                tuple(_plan_chunk(chunk, window, block_size) for chunk in self._on_device.chunks),
            )
        return self._plans[window]


def _plan_buckets(
    batch: AttentionBatch, window: int | None, block_size: int, device: torch.device
) -> tuple[_Bucket, ...]:
    """Decode rows sorted by length and divided into a few buckets, so that little padding is read."""
    lengths = batch.decode_lengths
    first_seen = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
    first_blocks = first_seen // block_size
    widths = (lengths + block_size - 1) // block_size - first_blocks
    order = widths.argsort(stable=True)
    num_buckets = max(1, min(MAX_BUCKETS, len(order) // ROWS_PER_BUCKET))
    buckets = []
    for members in order.tensor_split(num_buckets) if len(order) else ():
        columns = first_blocks[members, None] + torch.arange(int(widths[members[-1]]))
        positions = (columns[..., None] * block_size + torch.arange(block_size)).flatten(1)
        mask = (positions < lengths[members, None]) & (positions >= first_seen[members, None])
        # Shorter rows read past their own blocks; the mask excludes that.
        tables = batch.decode_tables[members].gather(1, columns.clamp(max=batch.decode_tables.shape[1] - 1))
        parts = (batch.decode_rows[members], tables, mask)
        buckets.append(_Bucket(*(copy_to_device(part, device) for part in parts)))
    return tuple(buckets)


def _plan_chunk(chunk: Chunk, window: int | None, block_size: int) -> _Chunk:
    """The tokens that a chunk reads: all before it, or those within the window."""
    rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
    end = chunk.start + chunk.num_rows
    if chunk.start == 0 and (window is None or window >= end):
        return _Chunk(rows, None, None)
    first_seen = 0 if window is None else max(0, chunk.start - window + 1)
    device = chunk.table.device
    seen = torch.arange(first_seen, end, device=device)
    own = torch.arange(chunk.start, end, device=device)[:, None]
    mask = seen <= own
    if window is not None:
        mask &= seen > own - window
    slots = chunk.table[seen // block_size] * block_size + seen % block_size
    return _Chunk(rows, slots, mask)


def _attend_decode_rows(
    call: LayerCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """`query` [rows, heads, size], `keys` and `values` [rows, tokens, kv heads, size], `mask` [rows, tokens].

    Heads that share a KV head are treated as queries of that head, so that keys are not repeated.
    """
    num_rows, num_heads, _ = query.shape
    num_kv_heads = keys.shape[2]
    grouped = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, -1)
    keys, values, mask = keys.transpose(1, 2), values.transpose(1, 2), mask[:, None, None]
    if call.softcap is None and call.sinks is None:
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=call.scaling)
    else:
        out = _attend_by_scores(call, grouped, keys, values, mask, repeats=1)
    return out.reshape(num_rows, num_heads, -1)


def _attend_chunk(
    call: LayerCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """`query` [rows, heads, size], `keys` and `values` [tokens, kv heads, size], `mask` [rows, tokens]."""
    if call.softcap is not None or call.sinks is not None:
        return _attend_chunk_by_scores(call, query, keys, values, mask)
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=call.scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return out[0].transpose(0, 1)


def _attend_chunk_by_scores(
    call: LayerCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """`_attend_by_scores` in tiles of rows, which bounds the memory of the scores."""
    num_rows, num_heads, _ = query.shape
    num_tokens, num_kv_heads, _ = keys.shape
    if mask is None:
        mask = torch.ones(num_rows, num_tokens, dtype=torch.bool, device=query.device).tril()
    groups = num_heads // num_kv_heads
    heads_first = (keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
    tile = max(1, MAX_SCORES // (num_heads * num_tokens))
    tiles = []
    for at in range(0, num_rows, tile):
        rows, seen = query[at : at + tile], mask[at : at + tile]
        grouped = rows.transpose(0, 1).reshape(1, num_kv_heads, groups * len(rows), -1)
        out = _attend_by_scores(call, grouped, *heads_first, seen.repeat(groups, 1), repeats=len(rows))
        tiles.append(out.reshape(num_heads, len(rows), -1).transpose(0, 1))
    return torch.cat(tiles)


def _attend_by_scores(
    call: LayerCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    repeats: int,
) -> torch.Tensor:
    """Attention with explicit scores in float32, for soft caps and sinks, which torch's operator lacks.

    `query` [n, kv heads, groups * repeats, size], `keys`, `values` [n, kv heads, tokens, size]; `mask`
    broadcasts to the scores [n, kv heads, groups * repeats, tokens].
    """
    scores = (query.float() @ keys.float().transpose(-1, -2)) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    num_tokens = scores.shape[-1]
    if call.sinks is not None:
        sinks = call.sinks.float().repeat_interleave(repeats).reshape(1, keys.shape[1], -1, 1)
        scores = torch.cat([scores, sinks.expand(len(scores), -1, -1, -1)], dim=-1)
    weights = scores.softmax(-1)[..., :num_tokens]
    return (weights @ values.float()).to(query.dtype)
