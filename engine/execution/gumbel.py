"""Noise for the draw: a pure function of (seed, output index, token id), the same bits on every device.

Law: no generator, no state. Adding this noise to the logits and taking the largest draws from their softmax
(the Gumbel-max trick), so a request's draws do not depend on what runs beside it, and a request that is
resumed goes on as it would have.

The hash mixes as MurmurHash3's finalizer does, with half of a row's key put in before each multiplication;
keys are made by SplitMix64's finalizer. All in wrap-around integers: 32 bits of int32 on the device.
"""

import numpy as np
import torch

from engine.execution.crossing import sent

_MASK64 = 2**64 - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
# MurmurHash3's two multipliers, the second as the int32 that has its bits.
_MULTIPLY_1 = 0x85EBCA6B - 2**32
_MULTIPLY_2 = 0xC2B2AE35 - 2**32
UNIFORM_BITS = 23
"""So that (n + 1/2) / 2**23 is exact in float32, and never 0 or 1."""


def row_key(seed: int, index: int) -> int:
    """64 bits that stand for one draw: output `index` of a request with `seed` (any 64-bit integer)."""
    return _splitmix64((_splitmix64(seed & _MASK64) + index) & _MASK64)


def row_keys(draws: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """`row_key` of each (seed, index), as int32 [rows, 2]: low half, high half."""
    keys = np.array([row_key(seed, index) for seed, index in draws], dtype="<u8")
    return sent(torch.from_numpy(keys.view("<i4").reshape(-1, 2)), device)


def hash_tokens(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """32 bits, as int32, for each (row, token): `keys` [rows, 2], `token_ids` [tokens] or [rows, tokens]."""
    mixed = token_ids ^ keys[:, :1]
    mixed ^= _shift_right(mixed, 16)
    mixed *= _MULTIPLY_1
    mixed ^= keys[:, 1:]
    mixed ^= _shift_right(mixed, 13)
    mixed *= _MULTIPLY_2
    mixed ^= _shift_right(mixed, 16)
    return mixed


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise in float32 for each (row, token); arguments as in `hash_tokens`."""
    uniform = _shift_right(hash_tokens(keys, token_ids), 32 - UNIFORM_BITS).float()
    uniform += 0.5
    uniform *= 2.0**-UNIFORM_BITS
    return uniform.log_().neg_().log_().neg_()


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int32 as if it had no sign."""
    shifted = values >> bits
    shifted &= (1 << (32 - bits)) - 1
    return shifted


def _splitmix64(state: int) -> int:
    """SplitMix64's next output from `state` (Steele, Lea, Flood 2014)."""
    mixed = (state + _GOLDEN64) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return mixed ^ (mixed >> 31)
