"""Launches the Triton kernels: tile sizes, grids and arguments.

Grids depend on shapes alone, not on the contents of tensors, and nothing waits for the device.
`triton_kernel.py` describes tiles.
"""

from typing import Any, NamedTuple

import torch
import triton

from engine.execution.attention.interface import LayerCall
from engine.execution.attention.triton_kernel import attend_kernel, combine_kernel, split_kernel, store_kernel

MAX_SPLITS, MIN_SPLIT = 32, 256
"""Maximum number of splits of a decode row's keys, and minimum tokens of a split."""
PROGRAMS = 528
"""Programs that keep a GPU busy: four for each of the 132 multiprocessors of an H200."""
TILE_BYTES = 1 << 15
"""Keys and values of one tile. The shared memory of a multiprocessor must hold two or three tiles."""
PROGRAM_NUMEL = 1 << 14
"""Scores or accumulators of a tile that fit into the registers of 8 warps."""
STORED_ROWS, COMBINED_HEADS = 16, 4
"""Rows that one program stores, and heads that one program combines."""
LOG2_E = 1.4426950408889634

IS_COMPILED = isinstance(attend_kernel, triton.JITFunction)
"""False under Triton's interpreter (TRITON_INTERPRET=1), which runs the kernels on a CPU."""
DTYPES: dict[torch.dtype, Any] = {
    torch.float32: triton.language.float32,
    torch.float16: triton.language.float16,
    torch.bfloat16: triton.language.bfloat16,
}


class Tiling(NamedTuple):
    """Tile sizes: rows, keys, and the padded sizes of keys and values; and launch options."""

    block_m: int
    block_n: int
    block_d: int
    block_v: int
    num_warps: int
    num_stages: int


def tiling(group: int, head_dim: int, value_dim: int, dtype: torch.dtype, *, decode: bool) -> Tiling:
    """`group`: query heads that share a KV head. `decode`: a tile is one query."""
    is_half = dtype.itemsize == 2
    block_m, block_d, block_v = _block(group), _block(head_dim), _block(value_dim)
    if not decode:
        # Without tensor cores, as in float32, a large tile is no faster.
        block_m = max(block_m, min(128, PROGRAM_NUMEL // block_v) if is_half else 32)
    max_keys = TILE_BYTES // ((block_d + block_v) * dtype.itemsize)
    # A power of two, which the quotient may not be. 128 keys of a chunk spill registers on sm_80 to sm_89.
    block_n = max(16, min(128 if decode else 64, 1 << (max_keys.bit_length() - 1)))
    is_large = not decode or block_m * max(block_n, block_v) >= PROGRAM_NUMEL
    return Tiling(
        block_m=block_m,
        block_n=block_n,
        block_d=block_d,
        block_v=block_v,
        # Products in float32 need more registers.
        num_warps=8 if is_large or not is_half else 4,
        # A tile's address depends on its block ids, so two dependent loads must overlap.
        num_stages=3 if is_half else 2,
    )


def _block(size: int) -> int:
    """The smallest power of two that is at least `size` and valid for a matrix product."""
    return max(16, 1 << (size - 1).bit_length())


class Layer(NamedTuple):
    """One layer's call: `query` [rows, heads, head_dim], its KV pool, `out` [rows, heads, value_dim]."""

    call: LayerCall
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.query.shape[1] // self.keys.shape[2]

    def tiling(self, *, decode: bool) -> Tiling:
        return tiling(self.group, self.keys.shape[3], self.values.shape[3], self.keys.dtype, decode=decode)


def store(layer: Layer, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write `key` [rows, kv heads, head_dim] and `value` to `slot_mapping` [rows] of the layer's pool."""
    num_kv_heads, head_dim, value_dim = *layer.keys.shape[2:], layer.values.shape[3]
    store_kernel[(-(-len(slot_mapping) // STORED_ROWS), num_kv_heads)](
        key,
        value,
        layer.keys,
        layer.values,
        slot_mapping,
        len(slot_mapping),
        *key.stride()[:2],
        *value.stride()[:2],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        block_r=STORED_ROWS,
        block_d=triton.next_power_of_2(head_dim),
        block_v=triton.next_power_of_2(value_dim),
    )


def attend_tiles(layer: Layer, tiling: Tiling, tiles: torch.Tensor, tables: torch.Tensor) -> None:
    """Compute the rows of `tiles`, each tile in one pass over its keys."""
    attend_kernel[(len(tiles), layer.keys.shape[2])](
        out=layer.out,
        sinks=_sinks(layer),
        tiles=tiles,
        tables=tables,
        has_sinks=layer.call.sinks is not None,
        **_read_arguments(layer, tiling),
    )


def attend_decode_rows(layer: Layer, tiles: torch.Tensor, tables: torch.Tensor) -> None:
    """Compute the decode rows of `tiles`, whose blocks are the rows of `tables` [tiles, blocks].

    The keys of long rows are split. The number of programs per row depends on the number of rows and changes
    no bits.
    """
    tiling = layer.tiling(decode=True)
    max_tokens = tables.shape[1] * layer.keys.shape[1]
    num_splits = min(MAX_SPLITS, -(-max_tokens // MIN_SPLIT))
    if num_splits == 1:
        attend_tiles(layer, tiling, tiles, tables)
        return
    num_tiles, (num_heads, value_dim) = len(tiles), layer.out.shape[1:]
    sums = torch.empty(
        num_tiles, num_heads, num_splits, value_dim, dtype=torch.float32, device=layer.out.device
    )
    stats = sums.new_empty(num_tiles, num_heads, num_splits, 2)
    splits = {"num_splits": num_splits, "max_splits": MAX_SPLITS, "min_split": MIN_SPLIT}
    num_kv_heads = layer.keys.shape[2]
    programs = min(num_splits, -(-PROGRAMS // (num_tiles * num_kv_heads)))
    split_kernel[(num_tiles, num_kv_heads, programs)](
        sums=sums, stats=stats, tiles=tiles, tables=tables, **splits, **_read_arguments(layer, tiling)
    )
    combine_kernel[(num_tiles, -(-num_heads // COMBINED_HEADS))](
        out=layer.out,
        sums=sums,
        stats=stats,
        sinks=_sinks(layer),
        tiles=tiles,
        window=layer.call.sliding_window or 0,
        **splits,
        num_heads=num_heads,
        value_dim=value_dim,
        has_window=layer.call.sliding_window is not None,
        has_sinks=layer.call.sinks is not None,
        block_n=tiling.block_n,
        block_h=COMBINED_HEADS,
        block_v=tiling.block_v,
    )


def _sinks(layer: Layer) -> torch.Tensor:
    """The sinks, or any pointer for a kernel that does not read them."""
    return layer.out if layer.call.sinks is None else layer.call.sinks.contiguous()


def _read_arguments(layer: Layer, tiling: Tiling) -> dict[str, Any]:
    """The common arguments of the kernels that read the pool."""
    call, softcap = layer.call, layer.call.softcap
    return {
        "query": layer.query,
        "keys": layer.keys,
        "values": layer.values,
        "query_row": layer.query.stride(0),
        "query_head": layer.query.stride(1),
        "window": call.sliding_window or 0,
        "score_scale": call.scaling * LOG2_E * (1.0 if softcap is None else 2.0 / softcap),
        "softcap_scale": LOG2_E * (softcap or 0.0),
        "num_heads": layer.query.shape[1],
        "num_kv_heads": layer.keys.shape[2],
        "head_dim": layer.keys.shape[3],
        "value_dim": layer.values.shape[3],
        "block_size": layer.keys.shape[1],
        "has_window": call.sliding_window is not None,
        "has_softcap": softcap is not None,
        # The interpreter multiplies the bits of bfloat16 as integers.
        "dot_dtype": DTYPES[layer.keys.dtype if IS_COMPILED else torch.float32],
        **tiling._asdict(),
    }
