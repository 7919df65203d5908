"""Searches of whole vocabularies: which ones a draw needs, and how torch does them.

Law: whoever searches finds the same. A row's answer does not depend on the other rows. Knows no parameters of
requests.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.execution import largest as by_tiles
from engine.execution.gumbel import UNIFORM_BITS, hash_tokens, uniform_bits
from engine.execution.largest import TILE

TILES_AT_ONCE = 256
"""Whose hashes torch makes at once, so that they stay in a CPU's cache."""


@dataclass(frozen=True, slots=True)
class Searches:
    """`largest(rows, number)`: as `rows.topk(number)`; of equal values any may be named. In a row with NaN,
    whatever there is.

    `pass_by_hash(keys, least)`: the places, in order, in [rows * tiles * TILE] of the tokens whose
    `uniform_bits` are at least what `least` [rows, tiles] says of their tile. `keys` [rows, 2], all int32,
    on a CPU.
    """

    largest: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
    pass_by_hash: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def pass_by_hash(keys: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """See `Searches`; in torch."""
    tiles = (least < 1 << UNIFORM_BITS).flatten().nonzero()[:, 0]
    rows, first_ids = tiles // least.shape[1], (tiles % least.shape[1] * TILE).int()
    bounds = least.flatten()[tiles, None]
    within = torch.arange(TILE, dtype=torch.int32)
    found = [torch.empty(0, dtype=torch.int64)]
    for start in range(0, len(tiles), TILES_AT_ONCE):
        part = slice(start, start + TILES_AT_ONCE)
        hashes = hash_tokens(keys[rows[part]], first_ids[part, None] + within)
        passes = uniform_bits(hashes) >= bounds[part]
        # numpy's is three times as fast as torch's.
        places = torch.from_numpy(np.flatnonzero(passes.numpy()))
        found.append(tiles[start + places // TILE] * TILE + places % TILE)
    return torch.cat(found)


TORCH = Searches(by_tiles.largest, pass_by_hash)
