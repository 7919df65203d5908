"""The tokens that may have the largest sum of logit and noise, found by comparing integers.

Law: whoever wins, and whoever equals it, is among them, so drawing from them draws as from all. Noise rises
with the integer that it is made of, so "more noise than this" is a comparison with a hash; logarithms are
left to the few that pass. A row's contenders depend on that row alone. Knows no filters but their threshold.
"""

import numpy as np
import torch

from engine.execution.gumbel import UNIFORM_BITS, gumbel_noise, hash_tokens, least_uniform, uniform_bits
from engine.execution.largest import TILE, tile_maxima

SLACK = 2.0**-10
"""More than the roundings of noise and sum, which are below 1e-5; it lets a thousandth more tokens pass."""
TRIED_TILES = 4
"""In which a sum is looked for that the winner cannot be below."""
TILES_AT_ONCE = 256
"""Whose hashes are made at once, so that they stay in a CPU's cache."""


def contenders(
    logits: torch.Tensor, lowest: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and tokens, both int64 [contenders] and ascending, that may win in `logits` [rows, vocabulary].

    Each row's largest logit is 0; those below its `lowest` [rows] do not take part. `keys` [rows, 2] name the
    noise. A row with NaN, or of nothing but -inf, has whichever.
    """
    maxima = tile_maxima(logits)
    reached = _reached(logits, maxima, lowest, keys)
    missing = reached[:, None].double() - maxima - SLACK
    missing[maxima < lowest[:, None]] = torch.inf
    places = pass_by_hash(keys, least_uniform(missing))
    rows = places // (maxima.shape[1] * TILE)
    token_ids = places % (maxima.shape[1] * TILE)
    # What the last tile lacks was hashed as well.
    is_token = token_ids < logits.shape[1]
    return rows[is_token], token_ids[is_token]


def _reached(
    logits: torch.Tensor, maxima: torch.Tensor, lowest: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """What each row's winner has at least [rows]: the best of the tiles with the largest logits."""
    first = maxima.topk(min(TRIED_TILES, maxima.shape[1]), sorted=False).indices[:, :, None] * TILE
    # The last tile may be short; looking again at its last token changes nothing.
    token_ids = (first + torch.arange(TILE)).flatten(1).clamp_(max=logits.shape[1] - 1)
    values = logits.gather(1, token_ids)
    values.masked_fill_(values < lowest[:, None], -torch.inf)
    return (values + gumbel_noise(keys, token_ids.int())).amax(-1)


def pass_by_hash(keys: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """The tokens whose `uniform_bits` are at least what `least` [rows, tiles] says of their tile.

    As places in [rows * tiles * TILE], in order. `keys` [rows, 2]; all int32.
    """
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
