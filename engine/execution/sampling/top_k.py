"""The largest values of each row, found by way of tiles, so that few of a row's values are ranked.

Law: the values are those of `topk`; of equal ones any may be named, but `first_largest` names the first. A
row's answer does not depend on the other rows.
"""

import torch

TILE = 256
"""Neighbours whose largest is looked for first; asking a whole row for places takes six times as long."""
HEIGHT = 16
"""Values that stand a fixed way apart, of which the largest are found side by side."""


def first_largest(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rows.max(-1)` of `rows` [rows, width]: values and the first places; NaN is the largest of all."""
    width = rows.shape[1]
    num_tiles = width // TILE
    if not num_tiles:
        values, places = rows.max(-1)
        return values, places
    tiles = rows[:, : num_tiles * TILE].view(len(rows), num_tiles, TILE).amax(-1)
    first = tiles.max(-1).indices[:, None] * TILE
    candidates = _with_rest(first + torch.arange(TILE, device=rows.device), num_tiles * TILE, width)
    values, found = rows.gather(1, candidates).max(-1)
    return values, candidates.gather(1, found[:, None])[:, 0]


def largest(rows: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rows.topk(number)`: values [rows, number] in descending order, and their places."""
    width = rows.shape[1]
    num_tiles = width // HEIGHT
    if num_tiles <= 2 * number:
        values, places = rows.topk(number)
        return values, places
    tiles = rows[:, : num_tiles * HEIGHT].view(len(rows), HEIGHT, num_tiles).amax(1)
    # What is in none of these tiles has as many values before it as are asked for.
    chosen = tiles.topk(number, sorted=False).indices[:, :, None]
    places = (chosen + torch.arange(HEIGHT, device=rows.device) * num_tiles).flatten(1)
    candidates = _with_rest(places, num_tiles * HEIGHT, width)
    values, found = rows.gather(1, candidates).topk(number)
    return values, candidates.gather(1, found)


def _with_rest(places: torch.Tensor, num_tiled: int, width: int) -> torch.Tensor:
    """`places` [rows, ...], and those that are in no tile, behind them."""
    rest = torch.arange(num_tiled, width, device=places.device)
    return torch.cat([places, rest.expand(len(places), -1)], 1)
