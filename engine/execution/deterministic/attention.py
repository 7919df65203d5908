"""Paged attention whose output rows are bit-identical whatever else is computed.

The computation of a row depends on its position only. Queries form tiles of `QUERY_TILE` at absolute
positions, whether one or all of them are computed; a tile reads whole tiles of `KEY_TILE` keys up to its
position. So the matrices of a row have one size and one order of reduction when it is decoded, part of any
chunk, or recomputed. Only the number of matrices in a batched product varies, which `self_check.py` checks.

Scores are float32. Padding rows give zeros.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.execution.attention.interface import AttentionBatch, LayerCall, PoolShape
from engine.execution.attention.kv_pool import KVPool

QUERY_TILE = 4
KEY_TILE = 64
MAX_GATHERED = 1 << 21
"""Key elements, and as many value elements, that are gathered at once: 8 MiB each in float32."""


class DeterministicAttention:
    """A KV pool of `shape`, and attention over it."""

    def __init__(self, shape: PoolShape) -> None:
        self.pool = KVPool(shape)

    def build_metadata(self, batch: AttentionBatch) -> "DeterministicMetadata":
        self.pool.prepare(batch)
        return DeterministicMetadata(self.pool, batch)

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        self.pool.zero_blocks(blocks)


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Query tiles: `first` [tiles], the position of a tile's first query; `tables` [tiles, blocks].

    `rows` [tiles, QUERY_TILE]: the row of the batch at each position, or -1 if it is not computed. Tables are
    padded with null blocks.
    """

    first: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Query tiles that read the same number of keys.

    `queries` [tiles * QUERY_TILE]: the row at each position; `slot_mapping` [tiles, keys]; `hidden` [tiles,
    QUERY_TILE, keys]: masked scores. `computed` and `rows` [rows]: indices into `queries`, and the rows
    there.
    """

    queries: torch.Tensor
    slot_mapping: torch.Tensor
    hidden: torch.Tensor
    computed: torch.Tensor
    rows: torch.Tensor


class DeterministicMetadata:
    """The attention of one forward pass: plans the reads once per window, then computes every layer."""

    def __init__(self, pool: KVPool, batch: AttentionBatch) -> None:
        self._pool = pool
        self._slot_mapping = batch.slot_mapping.to(pool.device)
        self._tiles = query_tiles(batch)
        self._plans: dict[int | None, tuple[_Bucket, ...]] = {}

    def forward(
        self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        num_rows = len(self._slot_mapping)
        self._pool.store(call.layer, self._slot_mapping, key[:num_rows], value[:num_rows])
        keys = self._pool.keys[call.layer].flatten(0, 1)
        values = self._pool.values[call.layer].flatten(0, 1)
        out = query.new_zeros(*query.shape[:2], value.shape[-1])
        for bucket in self._plan(call.sliding_window):
            found = _attend(call, query[bucket.queries], keys, values, bucket)
            out.index_copy_(0, bucket.rows, found[bucket.computed])
        return out

    def _plan(self, window: int | None) -> tuple[_Bucket, ...]:
        if window not in self._plans:
            pool = self._pool
            self._plans[window] = tuple(_plan_buckets(self._tiles, window, pool.block_size, pool.device))
        return self._plans[window]


def query_tiles(batch: AttentionBatch) -> QueryTiles:
    """The tiles of a batch: one for each decode row, and the tiles of each chunk in order."""
    offsets = torch.arange(QUERY_TILE)
    positions = batch.decode_lengths - 1
    first = [positions - positions % QUERY_TILE]
    rows = [torch.where(first[0][:, None] + offsets == positions[:, None], batch.decode_rows[:, None], -1)]
    tables = [batch.decode_tables]
    for chunk in batch.chunks:
        end = chunk.start + chunk.num_rows
        tiles = torch.arange(chunk.start // QUERY_TILE, -(-end // QUERY_TILE)) * QUERY_TILE
        at = tiles[:, None] + offsets
        first.append(tiles)
        rows.append(torch.where((at >= chunk.start) & (at < end), at - chunk.start + chunk.first_row, -1))
        tables.append(chunk.table.expand(len(tiles), -1))
    width = 1 + max(table.shape[1] for table in tables)
    padded = [torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables]
    return QueryTiles(torch.cat(first), torch.cat(padded), torch.cat(rows))


def _plan_buckets(
    tiles: QueryTiles, window: int | None, block_size: int, device: torch.device
) -> Iterator[_Bucket]:
    """The keys of a tile begin with the first that any of its positions may see, computed or not."""
    seen_from = torch.zeros_like(tiles.first) if window is None else (tiles.first - window + 1).clamp(min=0)
    begins = seen_from // KEY_TILE * KEY_TILE
    ends = (tiles.first + QUERY_TILE + KEY_TILE - 1) // KEY_TILE * KEY_TILE
    widths = ends - begins
    for width in sorted(set(widths.tolist())):
        members = torch.nonzero(widths == width).flatten()
        at = begins[members, None] + torch.arange(width)
        # Beyond its own blocks a sequence reads the null block, which is masked.
        blocks = (at // block_size).clamp(max=tiles.tables.shape[1] - 1)
        slots = tiles.tables[members].gather(1, blocks) * block_size + at % block_size
        own = (tiles.first[members, None] + torch.arange(QUERY_TILE))[..., None]
        hidden = at[:, None] > own
        if window is not None:
            hidden |= at[:, None] <= own - window
        rows = tiles.rows[members].flatten()
        computed = torch.nonzero(rows >= 0).flatten()
        yield _Bucket(
            queries=rows.clamp(min=0).to(device),
            slot_mapping=slots.to(device),
            hidden=hidden.to(device),
            computed=computed.to(device),
            rows=rows[computed].to(device),
        )


def _attend(
    call: LayerCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bucket: _Bucket
) -> torch.Tensor:
    """`query` [tiles * QUERY_TILE, heads, size], `keys` and `values` [slots, kv heads, size].

    Returns [tiles * QUERY_TILE, heads, value_dim]. Computed in parts to bound the gathered keys.
    """
    num_tiles, num_keys = bucket.slot_mapping.shape
    part = max(1, MAX_GATHERED // (num_keys * keys[0].numel()))
    found = []
    for at in range(0, num_tiles, part):
        slots, hidden = bucket.slot_mapping[at : at + part], bucket.hidden[at : at + part]
        queries = query[at * QUERY_TILE : (at + part) * QUERY_TILE]
        found.append(_attend_tiles(call, queries, keys[slots], values[slots], hidden))
    return found[0] if len(found) == 1 else torch.cat(found)


def _attend_tiles(
    call: LayerCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """`query` [tiles * QUERY_TILE, heads, size], `keys`, `values` [tiles, keys, kv heads, size].

    Heads that share a key head are rows of one matrix: [tiles * kv heads, groups * QUERY_TILE, size].
    """
    num_tiles, num_keys, num_kv_heads, size = keys.shape
    num_heads = query.shape[1]
    groups = num_heads // num_kv_heads
    grouped = query.reshape(num_tiles, QUERY_TILE, num_kv_heads, groups, size).permute(0, 2, 3, 1, 4)
    scaled = (grouped.float() * call.scaling).reshape(num_tiles * num_kv_heads, groups * QUERY_TILE, size)
    scores = _multiply(scaled, _heads_first(keys).transpose(1, 2))
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.view(num_tiles, num_heads, QUERY_TILE, num_keys)
    scores.masked_fill_(hidden[:, None], -torch.inf)
    if call.sinks is not None:
        sinks = call.sinks.float()[:, None, None].expand(num_tiles, -1, QUERY_TILE, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., :num_keys].reshape(len(scaled), groups * QUERY_TILE, num_keys)
    out = _multiply(weights, _heads_first(values)).view(num_tiles, num_heads, QUERY_TILE, -1)
    return out.transpose(1, 2).flatten(0, 1).to(query.dtype)


def _heads_first(gathered: torch.Tensor) -> torch.Tensor:
    """[tiles, keys, kv heads, size] as float32 [tiles * kv heads, keys, size]."""
    return gathered.transpose(1, 2).float().flatten(0, 1).contiguous()


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A batched product of at least two: a single product may use another kernel."""
    if len(left) > 1:
        return torch.bmm(left, right)
    return torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1]
