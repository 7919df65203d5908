"""Weights in 8 or 4 bits: how they are made, how large they are, and how rows of them become numbers again.

Law: only how a weight is kept stands here. Nothing that is computed is rounded: activations stay what they
are, so that a row's result depends on that row alone. Knows no module, and nothing of how a product is made.
"""

from typing import NamedTuple, Protocol

import torch

GROUP = 32
"""Numbers of a row that share a scale and a least value, in 4 bits. With 64 a model of 135 million weights
strayed far (see the README)."""
_GROUP_BYTES = GROUP // 2 + 4
_LEAST_SCALE = 2.0**-24
"""The smallest that float16 can tell from 0."""


class QuantizedWeight(Protocol):
    """A matrix [out, in]; `factors` [out], where it has them, are still to be multiplied with its rows."""

    @property
    def nbytes(self) -> int: ...

    @property
    def factors(self) -> torch.Tensor | None: ...

    def rows(self, first: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        """Rows `first` to `stop` without their factors, [stop - first, in] in `scratch`'s dtype; may lie in
        `scratch`, which holds as many numbers."""

    def take(self, indices: torch.Tensor) -> torch.Tensor:
        """The rows at `indices` [...], with their factors: [..., in] in float32."""


class Int8Weight(NamedTuple):
    """`values` [out, in] int8, each row with a `factors` [out] float32 of its own; 0 stays 0."""

    values: torch.Tensor
    factors: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.factors.nbytes

    def rows(self, first: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        values = self.values[first:stop]
        return scratch[: values.numel()].view(values.shape).copy_(values)

    def take(self, indices: torch.Tensor) -> torch.Tensor:
        return self.values[indices].float() * self.factors[indices][..., None]


class Int4Weight(NamedTuple):
    """`groups` [out, in / GROUP, bytes] uint8: pairs of values, then scale and least value in float16.

    That is the layout of torch's quantised embeddings, whose operator unpacks it with vector instructions.
    """

    groups: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.groups.nbytes

    @property
    def factors(self) -> torch.Tensor | None:
        return None

    def rows(self, first: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        return _unpack(self.groups[first:stop]).to(scratch.dtype)

    def take(self, indices: torch.Tensor) -> torch.Tensor:
        return _unpack(self.groups[indices])


def quantize_to_int8(weight: torch.Tensor) -> Int8Weight:
    """`weight` [out, in] of any floating dtype, to the nearest 127th of each row's largest."""
    numbers = weight.detach().float()
    factors = numbers.abs().amax(1).div_(127)
    # A row of zeros has no scale, and any will do.
    steps = factors.where(factors > 0, 1.0)
    return Int8Weight(numbers.div(steps[:, None]).round_().to(torch.int8), steps)


def quantize_to_int4(weight: torch.Tensor) -> Int4Weight:
    """`weight` [out, in] of any floating dtype; `in` is a multiple of `GROUP`.

    Each group's range is cut into 15 steps. The scale and the least value are rounded to float16 first, so
    that each number goes to the nearest of what can be had.
    """
    out, width = weight.shape
    numbers = weight.detach().float().view(out, width // GROUP, GROUP)
    least, most = numbers.aminmax(dim=2, keepdim=True)
    scale = ((most - least) / 15).clamp_(min=_LEAST_SCALE).half()
    least = least.half()
    values = ((numbers - least.float()) / scale.float()).round_().clamp_(0, 15).to(torch.uint8)
    pairs = values[..., ::2] | values[..., 1::2] << 4
    return Int4Weight(torch.cat([pairs, scale.view(torch.uint8), least.view(torch.uint8)], dim=2))


def _unpack(groups: torch.Tensor) -> torch.Tensor:
    """[..., groups, bytes] -> [..., in] in float32."""
    *shape, num_groups, _ = groups.shape
    numbers: torch.Tensor = torch.ops.quantized.embedding_bag_4bit_unpack(groups.reshape(-1, _GROUP_BYTES))
    return numbers.view(*shape, num_groups * GROUP)
