"""Puts quantised weights in the places of plain ones, and multiplies with them.

Law: a weight is quantised only if all that hold it are plain linears, parts of a fused one, or plain
embeddings, and is freed then: nothing keeps a plain copy. What is not taken stays plain. Rows are computed in
floating point, each from itself alone.

A product dequantises some rows of the weight at a time into memory that stays in the processor's cache, and
multiplies there. torch's own operators for weights in 8 and 4 bits were measured against that, and lost.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import InvalidParameter
from engine.execution.attention.probe import pass_of_two_tokens
from engine.execution.layers.fused_linears import FusedPart
from engine.execution.layers.quantized_weights import (
    GROUP,
    QuantizedWeight,
    quantize_to_int4,
    quantize_to_int8,
)

SMALLEST = 1 << 16
"""Numbers in a weight below which it stays plain: routers and gates weigh little and decide much."""
LARGEST_NUMBER = 6e4
"""What float16 can still hold, so that a scale and a least value can."""
TILE = 1 << 18
"""Numbers of a weight that are dequantised at a time: 1 MB in float32."""
LEAST_TILE_ROWS = 128
TRIAL_ROWS = 64
NUM_TRIALS = 5


class Quantized(NamedTuple):
    """What came of it. `num_bytes`: of all weights of the model, before and after."""

    num_weights: int
    num_bytes: tuple[int, int]


class QuantizedLinear(nn.Module):
    """A linear over a quantised weight; `dtype`: in which it multiplies."""

    def __init__(self, plain: nn.Linear, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.bias = plain.bias
        self._quantized = weight
        self._dtype = dtype

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [..., in] -> [..., out], in the dtype of `hidden`."""
        rows = hidden.reshape(-1, self.in_features).to(self._dtype)
        product = multiply(rows, self._quantized, self.out_features)
        if self.bias is not None:
            product += self.bias
        return product.to(hidden.dtype).view(*hidden.shape[:-1], self.out_features)


class QuantizedEmbedding(nn.Module):
    """An embedding over a quantised weight."""

    def __init__(self, plain: nn.Embedding, weight: QuantizedWeight) -> None:
        super().__init__()
        self.num_embeddings = plain.num_embeddings
        self.embedding_dim = plain.embedding_dim
        self._dtype = plain.weight.dtype
        self._quantized = weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`token_ids` [...] -> [..., embedding_dim]."""
        return self._quantized.take(token_ids).to(self._dtype)


def multiply(rows: torch.Tensor, weight: QuantizedWeight, num_out: int) -> torch.Tensor:
    """`rows` [n, in] times the transposed weight [num_out, in], in the dtype of `rows`."""
    width = rows.shape[1]
    product = rows.new_empty(len(rows), num_out)
    step = max(LEAST_TILE_ROWS, TILE // width)
    scratch = rows.new_empty(min(step, num_out) * width)
    for first in range(0, num_out, step):
        stop = min(first + step, num_out)
        torch.mm(rows, weight.rows(first, stop, scratch).t(), out=product[:, first:stop])
    if weight.factors is not None:
        product *= weight.factors
    return product


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype this processor multiplies rows of `dtype` faster: their own, or float32."""
    if dtype == torch.float32:
        return dtype
    own, wide = (torch.ones(TRIAL_ROWS, TILE // TRIAL_ROWS, dtype=one) for one in (dtype, torch.float32))
    least = dict.fromkeys((dtype, torch.float32), float("inf"))
    for _ in range(NUM_TRIALS):
        for hidden in (own, wide):
            began = time.perf_counter()
            torch.mm(hidden, hidden.t())
            least[hidden.dtype] = min(least[hidden.dtype], time.perf_counter() - began)
    return min(least, key=lambda one: least[one])


def quantize_linears(
    model: PreTrainedModel,
    quantization: str,
    choose_dtype: Callable[[torch.dtype], torch.dtype] = product_dtype,
) -> Quantized:
    """Quantise what the law allows: to "int8", or to "int4", where what stands at the model's input and
    output keeps 8 bits. `choose_dtype`: see `product_dtype`.

    Raises `InvalidParameter` for a model on another device than a CPU, one that has no such weight, and one
    that reads its weights by itself.
    """
    if model.device.type != "cpu":
        raise InvalidParameter("quantization", f"{quantization} weights need a CPU, not {model.device.type}")
    before = _num_bytes(model)
    dtype = choose_dtype(model.dtype)
    ends = _ends(model)
    groups = _places_by_weight(model)
    sizes = []
    while groups:
        storage = next(iter(groups))
        # Popped, so that the plain weight is freed before the next one is quantised.
        sizes.append(_replace(groups.pop(storage), quantization, dtype, finely=storage in ends))
    num_weights, quantized_bytes = len(sizes) - sizes.count(0), sum(sizes)
    if not num_weights:
        raise InvalidParameter("quantization", f"this model has no weight that can be kept in {quantization}")
    _check_that_it_runs(model, quantization)
    return Quantized(num_weights, (before, _num_bytes(model) + quantized_bytes))


def _replace(places: list["_Place"], quantization: str, dtype: torch.dtype, *, finely: bool) -> int:
    """Put one weight, quantised, in all of its `places`; its bytes, or 0 if it stays plain."""
    weight = _quantize(places[0].module.weight, quantization, finely=finely)
    if weight is None:
        return 0
    for place in places:
        place.put(weight, dtype)
    return weight.nbytes


class _Place(NamedTuple):
    """`module`, a linear, an embedding or a part of a fused linear, stands as `name` in `parent`."""

    parent: nn.Module
    name: str
    module: nn.Linear | nn.Embedding | FusedPart

    def put(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        if isinstance(self.module, FusedPart):
            # Its mates and it fetch their outputs from the whole product; its weight was a view.
            self.module.register_parameter("weight", None)
        elif isinstance(self.module, nn.Linear):
            setattr(self.parent, self.name, QuantizedLinear(self.module, weight, dtype))
        else:
            setattr(self.parent, self.name, QuantizedEmbedding(self.module, weight))


def _places_by_weight(model: PreTrainedModel) -> dict[int, list[_Place]]:
    """Where each weight that may be quantised stands, the whole weight first; by its memory."""
    places = [
        _Place(parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, (nn.Linear, nn.Embedding, FusedPart)) and _is_known(child)
    ]
    groups = defaultdict[int, list[_Place]](list)
    for place in sorted(places, key=lambda place: isinstance(place.module, FusedPart)):
        groups[_storage(place.module.weight)].append(place)
    known = {place.module for place in places}
    held = {
        _storage(one)
        for module in model.modules()
        if module not in known
        for one in module.parameters(recurse=False)
    }
    return {storage: group for storage, group in groups.items() if storage not in held}


def _is_known(module: nn.Linear | nn.Embedding | FusedPart) -> bool:
    """Whether it does what its class says and no more."""
    if isinstance(module, nn.Embedding):
        return type(module) is nn.Embedding and module.max_norm is None
    return type(module) in (nn.Linear, FusedPart)


def _ends(model: PreTrainedModel) -> set[int]:
    """The weights that tokens come in and logits go out by."""
    # Typed as Any: the methods have no types in transformers.
    asked: Any = model
    ends = (asked.get_input_embeddings(), asked.get_output_embeddings())
    return {_storage(one.weight) for one in ends if one is not None}


def _quantize(weight: torch.Tensor, quantization: str, *, finely: bool) -> QuantizedWeight | None:
    """None for a weight that cannot be kept so."""
    # A NaN is not below the bound either.
    if weight.numel() < SMALLEST or not weight.detach().abs().max() < LARGEST_NUMBER:
        return None
    if quantization == "int8" or finely:
        return quantize_to_int8(weight)
    return None if weight.shape[1] % GROUP else quantize_to_int4(weight)


def _check_that_it_runs(model: PreTrainedModel, quantization: str) -> None:
    try:
        pass_of_two_tokens(model)
    except (AttributeError, TypeError) as error:
        raise InvalidParameter(
            "quantization",
            f"{quantization} is not for model type {model.config.model_type!r}, which reads its weights by"
            f" itself: {error}",
        ) from error


def _num_bytes(model: nn.Module) -> int:
    """Of the memory that the model's weights lie in, each counted once."""
    storages = {_storage(one): one.untyped_storage().nbytes() for one in model.parameters()}
    return sum(storages.values())


def _storage(weight: torch.Tensor) -> int:
    return weight.untyped_storage().data_ptr()
