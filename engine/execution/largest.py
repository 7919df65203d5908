"""The largest values of each row, found by way of its tiles, so that few of a row's values are ranked.

Law: the values are those of `topk`; of equal ones any may be named, but `first_largest` names the first. A
row's answer does not depend on the other rows.
"""

import torch

TILE = 256
"""Values whose largest is looked at first; looking through a row for places too takes six times as long."""


def first_largest(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rows.max(-1)` of `rows` [rows, width]: values and the first places; NaN is the largest of all."""
    if rows.shape[1] < TILE:
        values, places = rows.max(-1)
        return values, places
    tiles = _largest_of_tiles(rows).max(-1).indices
    places = _places(tiles[:, None], rows.shape[1])
    values, found = rows.gather(1, places).max(-1)
    return values, places.gather(1, found[:, None])[:, 0]


def largest(rows: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rows.topk(number)`: values [rows, number] in descending order, and their places."""
    if rows.shape[1] // TILE <= 2 * number:
        values, places = rows.topk(number)
        return values, places
    # What is not in one of these tiles has as many values before it as are asked for.
    places = _places(_largest_of_tiles(rows).topk(number).indices, rows.shape[1])
    values, found = rows.gather(1, places).topk(number)
    return values, places.gather(1, found)


def _largest_of_tiles(rows: torch.Tensor) -> torch.Tensor:
    """The largest value of each whole tile, [rows, tiles]; what is behind the last one is in none."""
    num_tiles = rows.shape[1] // TILE
    return rows[:, : num_tiles * TILE].view(len(rows), num_tiles, TILE).amax(-1)


def _places(tiles: torch.Tensor, width: int) -> torch.Tensor:
    """The places [rows, ...] of all values in `tiles` [rows, tiles], and of those behind the last tile."""
    within = torch.arange(TILE, device=tiles.device)
    behind = torch.arange(width // TILE * TILE, width, device=tiles.device)
    places = (tiles[:, :, None] * TILE + within).flatten(1)
    return torch.cat([places, behind.expand(len(tiles), -1)], 1)
