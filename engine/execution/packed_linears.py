"""A linear multiplies with its weight in the order that suits the processor, where that is faster.

Law: for which shape and how many rows it is faster is measured on this machine, once while the model loads;
results differ by rounding only. The plain weight stays: it is faster for some numbers of rows, and others may
read it. Knows no model.

The packed order is oneDNN's, through the operators that torch's own compiler uses for frozen weights.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear

from engine.execution.linear_places import LinearPlace, linear_places

logger = logging.getLogger(__name__)

ROW_COUNTS = (1, 4, 16, 64, 256)
"""Measured. Each stands for all counts above the last one, the largest also for all above itself."""
NUM_WEIGHTS = 8
"""Of one shape, multiplied one after the other: a weight that still lies in a cache would flatter."""
NUM_REPEATS = 5
ENOUGH_SECONDS = 0.05
"""Measurements of one shape and row count end when they have taken so long."""
GAIN = 1.05
"""Packed must be faster by this: less lies within the noise."""
SMALLEST = 1 << 14
"""Numbers in a weight below which the call costs more than the product."""


class PackedLinear(nn.Module):
    """A linear with a second, packed copy of its weight; `uses_packed`: for which of `ROW_COUNTS`."""

    def __init__(self, plain: nn.Linear, uses_packed: tuple[bool, ...]) -> None:
        super().__init__()
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.weight = plain.weight
        self.bias = plain.bias
        self._packed = _pack(plain.weight)
        self._uses_packed = uses_packed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [..., in] -> [..., out]."""
        if self._uses_packed[_class_of(hidden.numel() // self.in_features)]:
            return _multiply(hidden, self._packed, self.bias)
        return linear(hidden, self.weight, self.bias)


def faster_packed(linears: list[nn.Linear]) -> tuple[bool, ...]:
    """For which of `ROW_COUNTS` linears of one shape are faster packed: for none where torch or the
    processor cannot pack their dtype.
    """
    with torch.inference_mode():
        try:
            packed = [_pack(one.weight) for one in linears]
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            logger.info("weights of %s are not packed: %s", linears[0].weight.dtype, reason)
            return (False,) * len(ROW_COUNTS)
        return tuple(_is_faster_packed(linears, packed, num_rows) for num_rows in ROW_COUNTS)


def pack_linears(
    model: nn.Module,
    *,
    max_bytes: int,
    choose: Callable[[list[nn.Linear]], tuple[bool, ...]] = faster_packed,
) -> int:
    """Pack what multiplies faster packed, as far as the copies fit into `max_bytes`; gives how many.

    `choose` says for which of `ROW_COUNTS` linears of one shape shall use the packed weight. Left alone: what
    is no plain `nn.Linear` on a CPU, or is small.
    """
    num_packed = 0
    for places in _places_by_shape(model):
        num_bytes = sum(place.linear.weight.nbytes for place in places)
        if num_bytes > max_bytes:
            continue
        uses_packed = choose([place.linear for place in places[:NUM_WEIGHTS]])
        if any(uses_packed):
            max_bytes -= num_bytes
            num_packed += len(places)
            for place in places:
                place.put(PackedLinear(place.linear, uses_packed))
    return num_packed


def _places_by_shape(model: nn.Module) -> list[list[LinearPlace]]:
    """The largest weights first."""
    groups = defaultdict[tuple[object, ...], list[LinearPlace]](list)
    for place in linear_places(model):
        weight, bias = place.linear.weight, place.linear.bias
        if weight.is_cpu and weight.numel() >= SMALLEST:
            groups[weight.shape, weight.dtype, bias is None].append(place)
    return sorted(groups.values(), key=lambda places: -places[0].linear.weight.nbytes)


def _is_faster_packed(linears: list[nn.Linear], packed: list[torch.Tensor], num_rows: int) -> bool:
    hidden = torch.ones(num_rows, linears[0].in_features, dtype=linears[0].weight.dtype)

    def multiply_plain() -> None:
        for one in linears:
            linear(hidden, one.weight, one.bias)

    def multiply_packed() -> None:
        for one, weight in zip(linears, packed, strict=True):
            _multiply(hidden, weight, one.bias)

    seconds_plain, seconds_packed = _least_seconds(multiply_plain, multiply_packed)
    return seconds_packed * GAIN < seconds_plain


def _least_seconds(*ways: Callable[[], None]) -> list[float]:
    """Of each way, by turns: what slows the machine for a while then slows all of them."""
    least = [float("inf")] * len(ways)
    began = time.perf_counter()
    for _ in range(NUM_REPEATS):
        for index, way in enumerate(ways):
            start = time.perf_counter()
            way()
            least[index] = min(least[index], time.perf_counter() - start)
        if time.perf_counter() - began > ENOUGH_SECONDS:
            break
    return least


def _class_of(num_rows: int) -> int:
    """Which of `ROW_COUNTS` stands for so many: powers of four, counted up."""
    return min(((num_rows - 1).bit_length() + 1) // 2, len(ROW_COUNTS) - 1) if num_rows else 0


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def _multiply(hidden: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")
    return product
