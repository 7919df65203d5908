"""A linear multiplies in the kernel that suits the processor: with its plain weight, or with a packed copy.

Law: for which shape and how many rows a kernel is faster is measured on this machine while the model loads,
or remembered from a start under the same conditions; results differ by rounding only. A linear has at most
one packed copy. The plain weight stays: it may be faster for some numbers of rows, and others may read it.
Knows no model, and not how a kernel multiplies.
"""

import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from engine.errors import UnsupportedModel
from engine.execution.layers.linear_kernels import LinearKernel, Product
from engine.execution.layers.linear_slots import LinearSlot, linear_slots
from engine.execution.machine.autotune_cache import AutotuneCache, Facts

logger = logging.getLogger(__name__)

ROW_COUNTS = (1, 4, 16, 64, 256)
"""Measured. Each stands for all counts above the last one, the largest also for all above itself."""
ROW_STEP = 4
"""From one to the next."""
COLD_BYTES = 1 << 26
"""Of one shape so much is multiplied, one weight after the other: one that lies in a cache would flatter."""
MOST_WEIGHTS = 8
NUM_TURNS = 4
TURN_SECONDS = 0.0025
"""A kernel that is fast is called often in its turn, so that no single disturbed call speaks against it."""
GAIN = 1.05
"""Packed must be faster by this: less lies within the noise."""
HOPELESS = 2.0
"""A kernel that is slower by this, and takes longer than a few turns, is not measured with more rows."""
QUIET_SHARE = 0.9
"""Of the time of measuring, what this thread has a processor for at least while nothing else runs."""
SMALLEST = 1 << 14
"""Numbers in a weight below which the call costs more than the product."""

Seconds = tuple[float, ...]
"""Of each of `ROW_COUNTS`."""


class PackedLinear(nn.Module):
    """A linear that multiplies in the kernel that is best for each of `ROW_COUNTS`."""

    def __init__(self, plain: nn.Linear, products: Sequence[Product]) -> None:
        super().__init__()
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.weight = plain.weight
        self.bias = plain.bias
        self._products = tuple(products)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [..., in] -> [..., out]."""
        return self._products[_class_of(hidden.numel() // self.in_features)](hidden)


class Candidate(NamedTuple):
    """A kernel that takes the weights of one shape, and the products of some of them."""

    kernel: LinearKernel
    products: list[Product]

    def product(self, index: int, plain: nn.Linear) -> Product:
        """Of linear `index`, which is `plain`: none is packed twice."""
        return self.products[index] if index < len(self.products) else self.kernel.bind(plain)


Measure = Callable[[Sequence[Candidate], nn.Linear], list[Seconds]]
"""Of each candidate, for linears like the one given."""


def measure(candidates: Sequence[Candidate], like: nn.Linear) -> list[Seconds]:
    """The least seconds of each candidate for each of `ROW_COUNTS`, one linear after the other."""
    taken: list[list[float]] = [[] for _ in candidates]
    with torch.inference_mode():
        for num_rows in ROW_COUNTS:
            hidden = torch.ones(num_rows, like.in_features, dtype=like.weight.dtype)
            open_ones = [index for index, one in enumerate(taken) if not _is_hopeless(one, taken)]
            found = _least_seconds([candidates[index].products for index in open_ones], hidden)
            for index, one in enumerate(taken):
                # What is not measured any more is taken to be as slow for each row as before.
                one.append(found[open_ones.index(index)] if index in open_ones else one[-1] * ROW_STEP)
    return [tuple(one) for one in taken]


def choose(seconds: Sequence[Seconds]) -> tuple[int, ...]:
    """For each of `ROW_COUNTS` which kernel to go: the first, which is plain, or the one that gains most."""
    plain, *others = seconds
    gains = [
        [mine if mine * GAIN < theirs else theirs for mine, theirs in zip(one, plain, strict=True)]
        for one in others
    ]
    best = min(range(len(others)), key=lambda kernel: math.prod(gains[kernel]), default=None)
    if best is None:
        return (0,) * len(plain)
    return tuple(
        0 if gained == theirs else best + 1 for gained, theirs in zip(gains[best], plain, strict=True)
    )


def pack_linears(
    model: nn.Module,
    kernels: Sequence[LinearKernel],
    *,
    max_bytes: int,
    measure: Measure = measure,
    remembered: AutotuneCache | None = None,
) -> int:
    """Pack what multiplies faster packed, as far as the copies fit into `max_bytes`; gives how many.

    `kernels`: the plain one first. `remembered`: what was measured before, and where this time's goes. Left
    alone: what is no plain `nn.Linear` on a CPU, or is small.
    """
    num_packed = 0
    for places in _places_by_shape(model):
        num_bytes = sum(place.linear.weight.nbytes for place in places)
        if num_bytes > max_bytes:
            continue
        facts = _facts(places, kernels)
        chosen = remembered and _remembered(remembered.find(facts), kernels, places[0].linear)
        if not chosen:
            chosen, is_disturbed = _measured(places, kernels, measure)
            if remembered:
                names = [one.kernel.name for one in chosen]
                remembered.keep(facts, names, is_disturbed=is_disturbed)
        if any(one.kernel is not kernels[0] for one in chosen):
            max_bytes -= num_bytes
            num_packed += len(places)
            _put(places, chosen)
    return num_packed


def _facts(places: list[LinearSlot], kernels: Sequence[LinearKernel]) -> Facts:
    """All of the linears and of this process that the seconds of a product depend on."""
    weight, bias = places[0].linear.weight, places[0].linear.bias
    return {
        "kernels": [kernel.name for kernel in kernels],
        "row_counts": ROW_COUNTS,
        "weight": list(weight.shape),
        "dtype": str(weight.dtype),
        "bias": None if bias is None else str(bias.dtype),
        "weights_measured": _num_samples(places),
        "threads": torch.get_num_threads(),
    }


def _remembered(
    names: tuple[str, ...] | None, kernels: Sequence[LinearKernel], like: nn.Linear
) -> list[Candidate]:
    """A candidate for each of `ROW_COUNTS`; none if nothing is remembered that can be done.

    The weight of `like` is bound, so that a kernel that refuses it shows before any linear is replaced.
    """
    by_name = {kernel.name: kernel for kernel in kernels}
    if names is None or len(names) != len(ROW_COUNTS) or not set(names) <= by_name.keys():
        return []
    wanted = [by_name[name] for name in dict.fromkeys(names)]
    if len([kernel for kernel in wanted if kernel is not kernels[0]]) > 1:
        # Never chosen so: each would be one more copy of the weight.
        return []
    candidates = {one.kernel.name: one for one in _candidates(wanted, [like])}
    return [candidates[name] for name in names] if len(candidates) == len(wanted) else []


def _measured(
    places: list[LinearSlot], kernels: Sequence[LinearKernel], measure: Measure
) -> tuple[list[Candidate], bool]:
    """The best candidate for each of `ROW_COUNTS`, and whether other programs disturbed the measuring."""
    candidates = _candidates(kernels, [place.linear for place in places[: _num_samples(places)]])
    if len(candidates) < 2:
        return [candidates[0]] * len(ROW_COUNTS), False
    began, worked = time.perf_counter(), time.thread_time()
    seconds = measure(candidates, places[0].linear)
    passed, worked = time.perf_counter() - began, time.thread_time() - worked
    return [candidates[kernel] for kernel in choose(seconds)], worked < QUIET_SHARE * passed


def _put(places: list[LinearSlot], chosen: list[Candidate]) -> None:
    weight = places[0].linear.weight
    names = ", ".join(
        f"{count} rows {one.kernel.name}" for count, one in zip(ROW_COUNTS, chosen, strict=True)
    )
    logger.debug("linears of %s %s: %s", list(weight.shape), weight.dtype, names)
    distinct = {one.kernel.name: one for one in chosen}
    for index, place in enumerate(places):
        products = {name: one.product(index, place.linear) for name, one in distinct.items()}
        place.put(PackedLinear(place.linear, [products[one.kernel.name] for one in chosen]))


def _places_by_shape(model: nn.Module) -> list[list[LinearSlot]]:
    """The largest weights first."""
    groups = defaultdict[tuple[object, ...], list[LinearSlot]](list)
    for place in linear_slots(model):
        weight, bias = place.linear.weight, place.linear.bias
        if weight.is_cpu and weight.numel() >= SMALLEST:
            groups[weight.shape, weight.dtype, None if bias is None else bias.dtype].append(place)
    return sorted(groups.values(), key=lambda places: -places[0].linear.weight.nbytes)


def _num_samples(places: list[LinearSlot]) -> int:
    return min(len(places), MOST_WEIGHTS, -(-COLD_BYTES // places[0].linear.weight.nbytes))


def _candidates(kernels: Sequence[LinearKernel], linears: list[nn.Linear]) -> list[Candidate]:
    candidates = []
    for kernel in kernels:
        try:
            candidates.append(Candidate(kernel, [kernel.bind(one) for one in linears]))
        except UnsupportedModel as error:
            logger.info("weights of %s are not packed by %s: %s", linears[0].weight.dtype, kernel.name, error)
    return candidates


def _is_hopeless(mine: list[float], all_of_them: list[list[float]]) -> bool:
    return bool(mine) and mine[-1] > max(
        NUM_TURNS * TURN_SECONDS, HOPELESS * min(one[-1] for one in all_of_them)
    )


def _least_seconds(kernels: list[list[Product]], hidden: torch.Tensor) -> list[float]:
    """Of one call of each kernel, by turns: what slows the machine for a while then slows all of them."""
    calls = [itertools.cycle(products) for products in kernels]
    turns = [[_least_of_a_turn(one, hidden) for one in calls] for _ in range(NUM_TURNS)]
    return [min(found) for found in zip(*turns, strict=True)]


def _least_of_a_turn(products: Iterator[Product], hidden: torch.Tensor) -> float:
    least = float("inf")
    began = start = time.perf_counter()
    while start - began < TURN_SECONDS:
        next(products)(hidden)
        now = time.perf_counter()
        least, start = min(least, now - start), now
    return least


def _class_of(num_rows: int) -> int:
    """Which of `ROW_COUNTS` stands for so many: powers of four, counted up."""
    return min(((num_rows - 1).bit_length() + 1) // 2, len(ROW_COUNTS) - 1) if num_rows else 0
