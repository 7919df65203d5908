"""Triton kernels that write keys and values to the KV pool and attend to them in place.

A program reads only slots that its sequence has written. The bits of a row depend on its sequence and its
position in its tile, not on the batch or the grid; grids depend on shapes alone, so launches can be captured.

A tile is a range of queries of one sequence and the heads that share one KV head; its rows are those heads,
query by query. `tiles` [tiles, 4]: first row, number of queries, tokens that the first query sees, offset of
the block table in `tables`. Scores are scaled by log2(e), so that exp becomes exp2; sums are float32. Names
that end in `_row` and `_head` are strides.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_rows"])
def store_kernel(
    key, value, keys, values, slot_mapping, num_rows, key_row, key_head, value_row, value_head,
    num_kv_heads: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_r: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Write rows of `key` and `value` to their slots. Grid: (groups of `block_r` rows, KV heads)."""
    rows = tl.program_id(0).to(tl.int64) * block_r + tl.arange(0, block_r)
    kv_head = tl.program_id(1)
    is_row = rows < num_rows
    line = tl.load(slot_mapping + rows, mask=is_row, other=0) * num_kv_heads + kv_head
    dims = tl.arange(0, block_d)[None, :]
    valid = is_row[:, None] & (dims < head_dim)
    block = tl.load(key + rows[:, None] * key_row + kv_head * key_head + dims, mask=valid)
    tl.store(keys + line[:, None] * head_dim + dims, block, mask=valid)
    dims = tl.arange(0, block_v)[None, :]
    valid = is_row[:, None] & (dims < value_dim)
    block = tl.load(value + rows[:, None] * value_row + kv_head * value_head + dims, mask=valid)
    tl.store(values + line[:, None] * value_dim + dims, block, mask=valid)


@triton.jit
def attend_kernel(
    out, query, keys, values, sinks, tiles, tables, query_row, query_head, window, score_scale, softcap_scale,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_size: tl.constexpr, has_window: tl.constexpr, has_softcap: tl.constexpr, has_sinks: tl.constexpr,
    dot_dtype: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
    block_v: tl.constexpr,
):  # fmt: skip
    """Write `out` [rows, heads, value_dim]. Grid: (tiles, KV heads)."""
    tile, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, count, length, table = _read_tile(tiles, tile, tables)
    at, heads = _lanes(kv_head, num_heads // num_kv_heads, block_m)
    valid = at < count
    q = _load_queries(query, row + at, heads, valid, query_row, query_head, head_dim, block_d)
    begin = _first_key(length, window, has_window, block_n)
    top, total, acc = _attend_keys(
        q.to(dot_dtype), keys, values, table, length - 1 + at, begin, length - 1 + count, kv_head, window,
        score_scale, softcap_scale, num_kv_heads, head_dim, value_dim, block_size, has_window, has_softcap,
        dot_dtype, block_m, block_n, block_d, block_v,
    )  # fmt: skip
    if has_sinks:
        top, total, acc = _add_sinks(top, total, acc, sinks, heads, valid)
    dims = tl.arange(0, block_v)[None, :]
    pointers = out + ((row + at) * num_heads + heads)[:, None] * value_dim + dims
    tl.store(pointers, _means(total, acc).to(out.dtype.element_ty), mask=valid[:, None] & (dims < value_dim))


@triton.jit(do_not_specialize=["num_splits"])
def split_kernel(
    sums, stats, query, keys, values, tiles, tables, num_splits, query_row, query_head, window, score_scale,
    softcap_scale,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_size: tl.constexpr, has_window: tl.constexpr, has_softcap: tl.constexpr, max_splits: tl.constexpr,
    min_split: tl.constexpr, dot_dtype: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    block_d: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Compute the splits of tiles of one query. Grid: (tiles, KV heads, any number).

    Writes `sums` [tiles, heads, num_splits, value_dim] and `stats` [tiles, heads, num_splits, 2] for
    `combine_kernel`. `num_splits`: at least the number of splits of the longest sequence.
    """
    tile, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, count, length, table = _read_tile(tiles, tile, tables)
    at, heads = _lanes(kv_head, num_heads // num_kv_heads, block_m)
    valid = at < count
    q = _load_queries(query, row + at, heads, valid, query_row, query_head, head_dim, block_d).to(dot_dtype)
    begin = _first_key(length, window, has_window, block_n)
    share = _share(length - begin, max_splits, min_split, block_n)
    dims = tl.arange(0, block_v)[None, :]
    for split in range(tl.program_id(2), tl.cdiv(length - begin, share), tl.num_programs(2)):
        first = begin + split * share
        top, total, acc = _attend_keys(
            q, keys, values, table, length - 1 + at, first, tl.minimum(first + share, length), kv_head,
            window, score_scale, softcap_scale, num_kv_heads, head_dim, value_dim, block_size, has_window,
            has_softcap, dot_dtype, block_m, block_n, block_d, block_v,
        )  # fmt: skip
        index = (tile * num_heads + heads) * num_splits + split
        tl.store(sums + index[:, None] * value_dim + dims, acc, mask=valid[:, None] & (dims < value_dim))
        tl.store(stats + 2 * index, top, mask=valid)
        tl.store(stats + 2 * index + 1, total, mask=valid)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    out, sums, stats, sinks, tiles, window, num_splits,
    num_heads: tl.constexpr, value_dim: tl.constexpr, has_window: tl.constexpr, has_sinks: tl.constexpr,
    max_splits: tl.constexpr, min_split: tl.constexpr, block_n: tl.constexpr, block_h: tl.constexpr,
    block_v: tl.constexpr,
):  # fmt: skip
    """Combine the splits in order and write `out`. Grid: (tiles, groups of `block_h` heads)."""
    tile = tl.program_id(0).to(tl.int64)
    row = tl.load(tiles + 4 * tile)
    length = tl.load(tiles + 4 * tile + 2).to(tl.int32)
    heads = tl.program_id(1) * block_h + tl.arange(0, block_h)
    valid = heads < num_heads
    tokens = length - _first_key(length, window, has_window, block_n)
    dims = tl.arange(0, block_v)[None, :]
    mask = valid[:, None] & (dims < value_dim)
    top = tl.full([block_h], float("-inf"), tl.float32)
    total = tl.zeros([block_h], tl.float32)
    acc = tl.zeros([block_h, block_v], tl.float32)
    for split in range(tl.cdiv(tokens, _share(tokens, max_splits, min_split, block_n))):
        index = (tile * num_heads + heads) * num_splits + split
        split_top = tl.load(stats + 2 * index, mask=valid, other=0.0)
        higher = tl.maximum(top, split_top)
        # A split whose keys are all masked has no largest score.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp2(top - shift), tl.exp2(split_top - shift)
        total = total * fade + tl.load(stats + 2 * index + 1, mask=valid, other=0.0) * weight
        partial = tl.load(sums + index[:, None] * value_dim + dims, mask=mask, other=0.0)
        acc = acc * fade[:, None] + partial * weight[:, None]
        top = higher
    if has_sinks:
        top, total, acc = _add_sinks(top, total, acc, sinks, heads, valid)
    pointers = out + (row * num_heads + heads)[:, None] * value_dim + dims
    tl.store(pointers, _means(total, acc).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _read_tile(tiles, tile, tables):
    row = tl.load(tiles + 4 * tile)
    count = tl.load(tiles + 4 * tile + 1).to(tl.int32)
    length = tl.load(tiles + 4 * tile + 2).to(tl.int32)
    return row, count, length, tables + tl.load(tiles + 4 * tile + 3)


@triton.jit
def _lanes(kv_head, group: tl.constexpr, block_m: tl.constexpr):
    """The query and the head of each row of a tile."""
    lanes = tl.arange(0, block_m)
    return lanes // group, kv_head * group + lanes % group


@triton.jit
def _load_queries(
    query, rows, heads, valid, query_row, query_head, head_dim: tl.constexpr, block_d: tl.constexpr
):  # fmt: skip
    dims = tl.arange(0, block_d)[None, :]
    pointers = query + rows[:, None] * query_row + heads[:, None] * query_head + dims
    return tl.load(pointers, mask=valid[:, None] & (dims < head_dim), other=0.0)


@triton.jit
def _first_key(length, window, has_window: tl.constexpr, block_n: tl.constexpr):
    """The first key tile of a query that sees the last `window` of `length` tokens."""
    first = length * 0
    if has_window:
        first = tl.maximum(length - window, 0) // block_n * block_n
    return first


@triton.jit
def _share(tokens, max_splits: tl.constexpr, min_split: tl.constexpr, block_n: tl.constexpr):
    """Tokens of one split, a multiple of the key tile."""
    return tl.maximum(tl.cdiv(tl.cdiv(tokens, max_splits), block_n) * block_n, min_split)


@triton.jit
def _attend_keys(
    q, keys, values, table, own, begin, end, kv_head, window, score_scale, softcap_scale,
    num_kv_heads: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr, block_size: tl.constexpr,
    has_window: tl.constexpr, has_softcap: tl.constexpr, dot_dtype: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Attend with queries [block_m, block_d] at positions `own` to the keys from `begin` to `end`.

    Returns the largest score, the sum of weights and the weighted sum of values of each query.
    """
    dims = tl.arange(0, block_d)[:, None]
    value_dims = tl.arange(0, block_v)[None, :]
    top = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, block_v], tl.float32)
    for at in range(begin, end, block_n):
        seen = at + tl.arange(0, block_n)
        valid = seen < end
        block = tl.load(table + seen // block_size, mask=valid, other=0)
        line = (block * block_size + seen % block_size) * num_kv_heads + kv_head
        pointers = keys + line[None, :] * head_dim + dims
        k = tl.load(pointers, mask=valid[None, :] & (dims < head_dim), other=0.0)
        scores = tl.dot(q, k.to(dot_dtype), input_precision="ieee")
        scores = _scaled(scores, score_scale, softcap_scale, has_softcap)
        visible = valid[None, :] & (seen[None, :] <= own[:, None])
        if has_window:
            visible &= seen[None, :] > own[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A query that has seen no key yet has no largest score.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weights = tl.exp2(top - shift), tl.exp2(scores - shift[:, None])
        top, total = higher, total * fade + tl.sum(weights, 1)
        pointers = values + line[:, None] * value_dim + value_dims
        v = tl.load(pointers, mask=valid[:, None] & (value_dims < value_dim), other=0.0)
        weights = weights.to(values.dtype.element_ty).to(dot_dtype)
        acc = tl.dot(weights, v.to(dot_dtype), acc * fade[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def _scaled(scores, score_scale, softcap_scale, has_softcap: tl.constexpr):
    """Scores in units of log2(e). With a soft cap, `score_scale` yields twice the argument of tanh."""
    scores = scores * score_scale
    if has_softcap:
        # tanh(x) = 1 - 2 / (1 + exp(2x)), clamped at 2^64; NaN propagates.
        scores = tl.where(scores > 64.0, 64.0, scores)
        scores = (1.0 - 2.0 / (1.0 + tl.exp2(scores))) * softcap_scale
    return scores


@triton.jit
def _add_sinks(top, total, acc, sinks, heads, valid):
    """Add a score without a value to each row."""
    sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32) * _LOG2_E
    higher = tl.maximum(top, sink)
    fade = tl.exp2(top - higher)
    return higher, total * fade + tl.exp2(sink - higher), acc * fade[:, None]


@triton.jit
def _means(total, acc):
    """The outputs; zeros for a row that sees no key."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
