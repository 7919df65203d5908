"""Gumbel noise as a pure function of (seed, output index, token id), bit-identical on every device.

The argmax of logits plus this noise is a draw from their softmax (the Gumbel-max trick). Without a generator
state, a request's draws do not depend on the batch, and a resumed request draws the same tokens.

The hash is MurmurHash3's finalizer, with half of a row's key mixed in before each multiplication; keys come
from SplitMix64's finalizer. The device computes in wrapping int32.
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.machine.async_copy import copy_to_device

Keys = npt.NDArray[np.uint64]

_MASK64 = 2**64 - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
# MurmurHash3's two multipliers as int32.
_MULTIPLY_1 = 0x85EBCA6B - 2**32
_MULTIPLY_2 = 0xC2B2AE35 - 2**32
UNIFORM_BITS = 23
"""(n + 1/2) / 2**23 is exact in float32 and never 0 or 1."""


def seed_states(seeds: list[int]) -> Keys:
    """The state [seeds] of each 64-bit seed, from which the keys of all its draws are made."""
    return _splitmix64(np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64))


def row_keys(states: Keys, indices: npt.ArrayLike, device: torch.device) -> torch.Tensor:
    """A 64-bit key for each (seed state, output index), as int32 [rows, 2]: low half, high half."""
    keys = draw_keys(states, indices).astype("<u8", copy=False)
    return copy_to_device(torch.from_numpy(keys.view("<i4").reshape(-1, 2)), device)


def draw_keys(states: Keys, indices: npt.ArrayLike) -> Keys:
    """`row_keys` as 64-bit integers [rows]."""
    return _splitmix64(states + np.asarray(indices, dtype=np.uint64))


def hash_tokens(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """An int32 hash of each (row, token): `keys` [rows, 2], `token_ids` [tokens] or [rows, tokens]."""
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
    """The integers below 2**`UNIFORM_BITS` from which noise is computed; noise increases with them."""
    return _shift_right(hashes, 32 - UNIFORM_BITS)


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int32."""
    shifted = values >> bits
    shifted &= (1 << (32 - bits)) - 1
    return shifted


def _splitmix64(states: Keys) -> Keys:
    """SplitMix64's next output from each state (Steele, Lea and Flood 2014)."""
    mixed = states + np.uint64(_GOLDEN64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
