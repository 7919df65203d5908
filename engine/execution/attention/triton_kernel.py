"""Triton kernels over the KV pool: one writes keys and values, the others attend to them where they lie.

Law: a program reads only slots that its sequence has written. How the numbers of a row come about follows
from its own sequence and from its place in its tile: neither from what else is computed nor from the size of
the grid, which follows from shapes and never from what a tensor holds. So a launch may be recorded and played
again. This file knows tensors as pointers; `triton_attention.py` says what they are.

A tile is some queries of one sequence, with the heads that share one KV head: its rows are those heads, query
by query. `tiles` [tiles, 4] holds its first row, its number of queries, the tokens that the first of them
sees, and where its blocks begin in `tables`. Scores are held in units of log2(e), so that exp is exp2, and
sums in float32. Names that end in `_row` and `_head` are strides.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_rows"])
def store_kernel(
    key, value, keys, values, slots, num_rows, key_row, key_head, value_row, value_head,
    num_kv_heads: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_r: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Grid (groups of `block_r` rows, KV heads): write rows of `key` and `value` to their slots."""
    rows = tl.program_id(0).to(tl.int64) * block_r + tl.arange(0, block_r)
    kv_head = tl.program_id(1)
    is_row = rows < num_rows
    line = tl.load(slots + rows, mask=is_row, other=0) * num_kv_heads + kv_head
    dims = tl.arange(0, block_d)[None, :]
    there = is_row[:, None] & (dims < head_dim)
    numbers = tl.load(key + rows[:, None] * key_row + kv_head * key_head + dims, mask=there)
    tl.store(keys + line[:, None] * head_dim + dims, numbers, mask=there)
    dims = tl.arange(0, block_v)[None, :]
    there = is_row[:, None] & (dims < value_dim)
    numbers = tl.load(value + rows[:, None] * value_row + kv_head * value_head + dims, mask=there)
    tl.store(values + line[:, None] * value_dim + dims, numbers, mask=there)


@triton.jit
def attend_kernel(
    out, query, keys, values, sinks, tiles, tables, query_row, query_head, window, score_scale, softcap_scale,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_size: tl.constexpr, has_window: tl.constexpr, has_softcap: tl.constexpr, has_sinks: tl.constexpr,
    dot_dtype: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
    block_v: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV heads): write `out` [rows, heads, value_dim]."""
    tile, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, count, length, table = _read_tile(tiles, tile, tables)
    at, heads = _lanes(kv_head, num_heads // num_kv_heads, block_m)
    there = at < count
    q = _load_queries(query, row + at, heads, there, query_row, query_head, head_dim, block_d)
    begin = _first_key(length, window, has_window, block_n)
    top, total, acc = _attend_keys(
        q.to(dot_dtype), keys, values, table, length - 1 + at, begin, length - 1 + count, kv_head, window,
        score_scale, softcap_scale, num_kv_heads, head_dim, value_dim, block_size, has_window, has_softcap,
        dot_dtype, block_m, block_n, block_d, block_v,
    )  # fmt: skip
    if has_sinks:
        top, total, acc = _add_sinks(top, total, acc, sinks, heads, there)
    dims = tl.arange(0, block_v)[None, :]
    place = out + ((row + at) * num_heads + heads)[:, None] * value_dim + dims
    tl.store(place, _means(total, acc).to(out.dtype.element_ty), mask=there[:, None] & (dims < value_dim))


@triton.jit(do_not_specialize=["num_splits"])
def split_kernel(
    sums, stats, query, keys, values, tiles, tables, num_splits, query_row, query_head, window, score_scale,
    softcap_scale,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_size: tl.constexpr, has_window: tl.constexpr, has_softcap: tl.constexpr, most_splits: tl.constexpr,
    least_split: tl.constexpr, dot_dtype: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    block_d: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV heads, any number): of tiles of one query, each split of the keys by itself.

    Writes `sums` [tiles, heads, num_splits, value_dim] and `stats` [tiles, heads, num_splits, 2] for
    `combine_kernel`. `num_splits`: at least as many as any of the sequences has.
    """
    tile, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, count, length, table = _read_tile(tiles, tile, tables)
    at, heads = _lanes(kv_head, num_heads // num_kv_heads, block_m)
    there = at < count
    q = _load_queries(query, row + at, heads, there, query_row, query_head, head_dim, block_d).to(dot_dtype)
    begin = _first_key(length, window, has_window, block_n)
    share = _share(length - begin, most_splits, least_split, block_n)
    dims = tl.arange(0, block_v)[None, :]
    for split in range(tl.program_id(2), tl.cdiv(length - begin, share), tl.num_programs(2)):
        first = begin + split * share
        top, total, acc = _attend_keys(
            q, keys, values, table, length - 1 + at, first, tl.minimum(first + share, length), kv_head,
            window, score_scale, softcap_scale, num_kv_heads, head_dim, value_dim, block_size, has_window,
            has_softcap, dot_dtype, block_m, block_n, block_d, block_v,
        )  # fmt: skip
        place = (tile * num_heads + heads) * num_splits + split
        tl.store(sums + place[:, None] * value_dim + dims, acc, mask=there[:, None] & (dims < value_dim))
        tl.store(stats + 2 * place, top, mask=there)
        tl.store(stats + 2 * place + 1, total, mask=there)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    out, sums, stats, sinks, tiles, window, num_splits,
    num_heads: tl.constexpr, value_dim: tl.constexpr, has_window: tl.constexpr, has_sinks: tl.constexpr,
    most_splits: tl.constexpr, least_split: tl.constexpr, block_n: tl.constexpr, block_h: tl.constexpr,
    block_v: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, groups of `block_h` heads): put the splits together, in their order, and write `out`."""
    tile = tl.program_id(0).to(tl.int64)
    row = tl.load(tiles + 4 * tile)
    length = tl.load(tiles + 4 * tile + 2).to(tl.int32)
    heads = tl.program_id(1) * block_h + tl.arange(0, block_h)
    there = heads < num_heads
    tokens = length - _first_key(length, window, has_window, block_n)
    dims = tl.arange(0, block_v)[None, :]
    mask = there[:, None] & (dims < value_dim)
    top = tl.full([block_h], float("-inf"), tl.float32)
    total = tl.zeros([block_h], tl.float32)
    acc = tl.zeros([block_h, block_v], tl.float32)
    for split in range(tl.cdiv(tokens, _share(tokens, most_splits, least_split, block_n))):
        place = (tile * num_heads + heads) * num_splits + split
        split_top = tl.load(stats + 2 * place, mask=there, other=0.0)
        higher = tl.maximum(top, split_top)
        # A split whose keys are all hidden has no largest score to subtract.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp2(top - shift), tl.exp2(split_top - shift)
        total = total * fade + tl.load(stats + 2 * place + 1, mask=there, other=0.0) * weight
        numbers = tl.load(sums + place[:, None] * value_dim + dims, mask=mask, other=0.0)
        acc = acc * fade[:, None] + numbers * weight[:, None]
        top = higher
    if has_sinks:
        top, total, acc = _add_sinks(top, total, acc, sinks, heads, there)
    place = out + (row * num_heads + heads)[:, None] * value_dim + dims
    tl.store(place, _means(total, acc).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _read_tile(tiles, tile, tables):
    row = tl.load(tiles + 4 * tile)
    count = tl.load(tiles + 4 * tile + 1).to(tl.int32)
    length = tl.load(tiles + 4 * tile + 2).to(tl.int32)
    return row, count, length, tables + tl.load(tiles + 4 * tile + 3)


@triton.jit
def _lanes(kv_head, group: tl.constexpr, block_m: tl.constexpr):
    """Of each row of a tile: which query, and which head."""
    lanes = tl.arange(0, block_m)
    return lanes // group, kv_head * group + lanes % group


@triton.jit
def _load_queries(
    query, rows, heads, there, query_row, query_head, head_dim: tl.constexpr, block_d: tl.constexpr
):  # fmt: skip
    dims = tl.arange(0, block_d)[None, :]
    place = query + rows[:, None] * query_row + heads[:, None] * query_head + dims
    return tl.load(place, mask=there[:, None] & (dims < head_dim), other=0.0)


@triton.jit
def _first_key(length, window, has_window: tl.constexpr, block_n: tl.constexpr):
    """Where the tiles of keys begin for a query that sees the last `window` of `length` tokens."""
    first = length * 0
    if has_window:
        first = tl.maximum(length - window, 0) // block_n * block_n
    return first


@triton.jit
def _share(tokens, most_splits: tl.constexpr, least_split: tl.constexpr, block_n: tl.constexpr):
    """Tokens of one split: whole tiles of keys."""
    return tl.maximum(tl.cdiv(tl.cdiv(tokens, most_splits), block_n) * block_n, least_split)


@triton.jit
def _attend_keys(
    q, keys, values, table, own, begin, end, kv_head, window, score_scale, softcap_scale,
    num_kv_heads: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr, block_size: tl.constexpr,
    has_window: tl.constexpr, has_softcap: tl.constexpr, dot_dtype: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Queries [block_m, block_d] at the positions `own` over the keys from `begin` to `end`.

    Returns the largest score, the sum of weights and the weighted sum of values, of each.
    """
    dims = tl.arange(0, block_d)[:, None]
    value_dims = tl.arange(0, block_v)[None, :]
    top = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, block_v], tl.float32)
    for at in range(begin, end, block_n):
        seen = at + tl.arange(0, block_n)
        there = seen < end
        block = tl.load(table + seen // block_size, mask=there, other=0)
        line = (block * block_size + seen % block_size) * num_kv_heads + kv_head
        place = keys + line[None, :] * head_dim + dims
        k = tl.load(place, mask=there[None, :] & (dims < head_dim), other=0.0)
        scores = tl.dot(q, k.to(dot_dtype), input_precision="ieee")
        scores = _scaled(scores, score_scale, softcap_scale, has_softcap)
        visible = there[None, :] & (seen[None, :] <= own[:, None])
        if has_window:
            visible &= seen[None, :] > own[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A query that has seen nothing yet has no largest score to subtract.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weights = tl.exp2(top - shift), tl.exp2(scores - shift[:, None])
        top, total = higher, total * fade + tl.sum(weights, 1)
        place = values + line[:, None] * value_dim + value_dims
        v = tl.load(place, mask=there[:, None] & (value_dims < value_dim), other=0.0)
        weights = weights.to(values.dtype.element_ty).to(dot_dtype)
        acc = tl.dot(weights, v.to(dot_dtype), acc * fade[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def _scaled(scores, score_scale, softcap_scale, has_softcap: tl.constexpr):
    """Scores in units of log2(e). With a soft cap, `score_scale` gives twice the argument of tanh."""
    scores = scores * score_scale
    if has_softcap:
        # tanh(x) = 1 - 2 / (1 + exp(2x)), and 1 beyond 2^64; written so that NaN stays NaN.
        scores = tl.where(scores > 64.0, 64.0, scores)
        scores = (1.0 - 2.0 / (1.0 + tl.exp2(scores))) * softcap_scale
    return scores


@triton.jit
def _add_sinks(top, total, acc, sinks, heads, there):
    """A sink takes weight and gives no value."""
    sink = tl.load(sinks + heads, mask=there, other=0.0).to(tl.float32) * _LOG2_E
    higher = tl.maximum(top, sink)
    fade = tl.exp2(top - higher)
    return higher, total * fade + tl.exp2(sink - higher), acc * fade[:, None]


@triton.jit
def _means(total, acc):
    """A row that sees nothing gets zeros."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
