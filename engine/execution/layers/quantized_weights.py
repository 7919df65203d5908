"""Weights in 8 or 4 bits: quantization, size, and dequantization of rows.

Only weights are quantized, not activations, so a row's result depends on that row alone.
"""

from typing import NamedTuple, Protocol

import torch

GROUP = 32
"""Elements of a row that share a scale and an offset, in 4 bits. Groups of 64 degrade a model of 135 million
weights (benchmarks/quantization.py)."""
_GROUP_BYTES = GROUP // 2 + 4
_MINIMUM_SCALE = 2.0**-24
"""The smallest positive float16."""


class QuantizedWeight(Protocol):
    """A matrix [out, in]. `factors` [out]: multiply the rows after a product; None if there are none."""

    @property
    def nbytes(self) -> int: ...

    @property
    def factors(self) -> torch.Tensor | None: ...

    def rows(self, first: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        """Rows `first` to `stop` without their factors, [stop - first, in], in the dtype of `scratch`.

        The result may be a view of `scratch`, which has at least as many elements.
        """

    def take(self, indices: torch.Tensor) -> torch.Tensor:
        """The rows at `indices` [...], with their factors: [..., in] in float32."""


class Int8Weight(NamedTuple):
    """`values` [out, in] int8 and `factors` [out] float32, one for each row. 0 stays 0."""

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
    """`groups` [out, in / GROUP, bytes] uint8: pairs of values, then scale and offset in float16.

    This is the layout of torch's quantized embeddings, whose operator unpacks it with vector instructions.
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
    """Round `weight` [out, in] to 1/127 of the largest absolute value of each row."""
    values = weight.detach().float()
    factors = values.abs().amax(1).div_(127)
    # A row of zeros may have any scale.
    steps = factors.where(factors > 0, 1.0)
    return Int8Weight(values.div(steps[:, None]).round_().to(torch.int8), steps)


def quantize_to_int4(weight: torch.Tensor) -> Int4Weight:
    """`weight` [out, in] of any floating dtype; `in` is a multiple of `GROUP`.

    Each group's range is divided into 15 steps. Scale and offset are rounded to float16 first, so that each
    element is rounded to the nearest value that can be represented.
    """
    out, width = weight.shape
    values = weight.detach().float().view(out, width // GROUP, GROUP)
    minimum, maximum = values.aminmax(dim=2, keepdim=True)
    scale = ((maximum - minimum) / 15).clamp_(min=_MINIMUM_SCALE).half()
    offset = minimum.half()
    steps = ((values - offset.float()) / scale.float()).round_().clamp_(0, 15).to(torch.uint8)
    pairs = steps[..., ::2] | steps[..., 1::2] << 4
    return Int4Weight(torch.cat([pairs, scale.view(torch.uint8), offset.view(torch.uint8)], dim=2))


def _unpack(groups: torch.Tensor) -> torch.Tensor:
    """[..., groups, bytes] -> [..., in] in float32."""
    *shape, num_groups, _ = groups.shape
    values: torch.Tensor = torch.ops.quantized.embedding_bag_4bit_unpack(groups.reshape(-1, _GROUP_BYTES))
    return values.view(*shape, num_groups * GROUP)
