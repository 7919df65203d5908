"""Noise for the draw: a pure function of (seed, output index, token id), the same bits on every device.

Law: no generator, no state. Adding this noise to the logits and taking the largest draws from their softmax
(the Gumbel-max trick), so a request's draws do not depend on what runs beside it, and a request that is
resumed goes on as it would have.

The hash mixes as MurmurHash3's finalizer does, with half of a row's key put in before each multiplication;
keys are made by SplitMix64's finalizer. All in wrap-around integers: 32 bits of int32 on the device.
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.machine.async_copy import copy_to_device

Keys = npt.NDArray[np.uint64]

_MASK64 = 2**64 - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
# MurmurHash3's two multipliers, the second as the int32 that has its bits.
_MULTIPLY_1 = 0x85EBCA6B - 2**32
_MULTIPLY_2 = 0xC2B2AE35 - 2**32
UNIFORM_BITS = 23
"""So that (n + 1/2) / 2**23 is exact in float32, and never 0 or 1."""


def seed_states(seeds: list[int]) -> Keys:
    """What a request's seed, any 64-bit integer, comes to in the keys of all its draws [seeds]."""
    return _splitmix64(np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64))


def row_keys(states: Keys, indices: npt.ArrayLike, device: torch.device) -> torch.Tensor:
    """64 bits for the draw of each output index, of requests with these `seed_states`.

    As int32 [rows, 2]: low half, high half.
    """
    keys = draw_keys(states, indices).astype("<u8", copy=False)
    return copy_to_device(torch.from_numpy(keys.view("<i4").reshape(-1, 2)), device)


def draw_keys(states: Keys, indices: npt.ArrayLike) -> Keys:
    """`row_keys` [rows] as whole integers."""
    return _splitmix64(states + np.asarray(indices, dtype=np.uint64))


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
    uniform = uniform_bits(hash_tokens(keys, token_ids)).float()
    uniform += 0.5
    uniform *= 2.0**-UNIFORM_BITS
    return uniform.log_().neg_().log_().neg_()


def uniform_bits(hashes: torch.Tensor) -> torch.Tensor:
    """The int32 below 2**`UNIFORM_BITS` that noise is made of, and with which it rises."""
    return _shift_right(hashes, 32 - UNIFORM_BITS)


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int32 as if it had no sign."""
    shifted = values >> bits
    shifted &= (1 << (32 - bits)) - 1
    return shifted


def _splitmix64(states: Keys) -> Keys:
    """SplitMix64's next output from each state (Steele, Lea, Flood 2014)."""
    mixed = states + np.uint64(_GOLDEN64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
