"""Replaces weights with quantized ones and multiplies with them.

A weight is quantized only if all modules that hold it are plain linears, parts of a fused linear, or plain
embeddings; the plain weight is then freed. Other weights stay plain. Each row is computed in floating point
from that row alone.

A product dequantizes some rows of the weight at a time into memory that stays in the processor's cache.
torch's own operators for 8-bit and 4-bit weights were measured to be slower.
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
from engine.execution.layers.module_slots import ModuleSlot, module_slots
from engine.execution.layers.quantized_weights import (
    GROUP,
    QuantizedWeight,
    quantize_to_int4,
    quantize_to_int8,
)

MINIMUM_NUMEL = 1 << 16
"""Elements of a weight below which it stays plain: routers and gates are small and sensitive."""
MAXIMUM_VALUE = 6e4
"""Within the range of float16, in which scales and offsets are kept."""
TILE = 1 << 18
"""Elements of a weight that are dequantized at a time: 1 MB in float32."""
MINIMUM_TILE_ROWS = 128
MEASURED_ROWS = 64
NUM_MEASUREMENTS = 5

_Kind = nn.Linear | nn.Embedding | FusedPart


class Quantized(NamedTuple):
    """The result. `num_bytes`: of all weights of the model, before and after."""

    num_weights: int
    num_bytes: tuple[int, int]


class QuantizedLinear(nn.Module):
    """A linear with a quantized weight, which multiplies in `dtype`."""

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
    """An embedding with a quantized weight."""

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
    """`rows` [n, in] times the transposed weight [num_out, in] -> [n, num_out], in the dtype of `rows`."""
    width = rows.shape[1]
    product = rows.new_empty(len(rows), num_out)
    step = max(MINIMUM_TILE_ROWS, TILE // width)
    scratch = rows.new_empty(min(step, num_out) * width)
    for first in range(0, num_out, step):
        stop = min(first + step, num_out)
        torch.mm(rows, weight.rows(first, stop, scratch).t(), out=product[:, first:stop])
    if weight.factors is not None:
        product *= weight.factors
    return product


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which this processor multiplies rows of `dtype` faster, measured: their own or float32."""
    if dtype == torch.float32:
        return dtype
    seconds = {one: float("inf") for one in (dtype, torch.float32)}
    operands = [torch.ones(MEASURED_ROWS, TILE // MEASURED_ROWS, dtype=one) for one in seconds]
    for _ in range(NUM_MEASUREMENTS):
        for rows in operands:
            start = time.perf_counter()
            torch.mm(rows, rows.t())
            seconds[rows.dtype] = min(seconds[rows.dtype], time.perf_counter() - start)
    return min(seconds, key=lambda one: seconds[one])


def quantize_linears(
    model: PreTrainedModel,
    quantization: str,
    choose_dtype: Callable[[torch.dtype], torch.dtype] = product_dtype,
) -> Quantized:
    """Quantize the weights to "int8" or "int4". With "int4", input and output embeddings keep 8 bits.

    `choose_dtype`: see `product_dtype`. Raises `InvalidParameter` for a model that is not on a CPU, has no
    weight that can be quantized, or reads its weights outside its linears.
    """
    if model.device.type != "cpu":
        raise InvalidParameter("quantization", f"{quantization} weights need a CPU, not {model.device.type}")
    before = _num_bytes(model)
    dtype = choose_dtype(model.dtype)
    embeddings = _embedding_storages(model)
    groups = _slots_by_weight(model)
    sizes = []
    while groups:
        storage = next(iter(groups))
        # Popped, so that the plain weight is freed before the next one is quantized.
        bits = "int8" if storage in embeddings else quantization
        sizes.append(_quantize_slots(groups.pop(storage), bits, dtype))
    num_weights, quantized_bytes = len(sizes) - sizes.count(0), sum(sizes)
    if not num_weights:
        raise InvalidParameter("quantization", f"this model has no weight that can be kept in {quantization}")
    _check_forward(model, quantization)
    return Quantized(num_weights, (before, _num_bytes(model) + quantized_bytes))


def _quantize_slots(slots: list[ModuleSlot[_Kind]], quantization: str, dtype: torch.dtype) -> int:
    """Quantize the weight that `slots` share. Returns its bytes, or 0 if it stays plain."""
    weight = _quantize(slots[0].module.weight, quantization)
    if weight is None:
        return 0
    for slot in slots:
        module = slot.module
        if isinstance(module, FusedPart):
            # It reads its output from the fused product; its weight was a view.
            module.register_parameter("weight", None)
        elif isinstance(module, nn.Linear):
            slot.replace(QuantizedLinear(module, weight, dtype))
        else:
            slot.replace(QuantizedEmbedding(module, weight))
    return weight.nbytes


def _slots_by_weight(model: PreTrainedModel) -> dict[int, list[ModuleSlot[_Kind]]]:
    """The slots of each weight that can be quantized, by its storage; the owner of the whole weight first."""
    slots = [
        ModuleSlot(parent, name, child)
        for parent, name, child in module_slots(model)
        if isinstance(child, _Kind) and _is_plain(child)
    ]
    groups = defaultdict[int, list[ModuleSlot[_Kind]]](list)
    for slot in sorted(slots, key=lambda slot: isinstance(slot.module, FusedPart)):
        groups[_storage(slot.module.weight)].append(slot)
    known = {slot.module for slot in slots}
    held = {
        _storage(one)
        for module in model.modules()
        if module not in known
        for one in module.parameters(recurse=False)
    }
    return {storage: group for storage, group in groups.items() if storage not in held}


def _is_plain(module: _Kind) -> bool:
    """Whether it is the class itself, not a subclass, and an embedding does not renormalise."""
    if isinstance(module, nn.Embedding):
        return type(module) is nn.Embedding and module.max_norm is None
    return type(module) in (nn.Linear, FusedPart)


def _embedding_storages(model: PreTrainedModel) -> set[int]:
    """The weights of the input and output embeddings."""
    untyped: Any = model  # The methods have no types in transformers.
    modules = (untyped.get_input_embeddings(), untyped.get_output_embeddings())
    return {_storage(one.weight) for one in modules if one is not None}


def _quantize(weight: torch.Tensor, quantization: str) -> QuantizedWeight | None:
    """None for a weight that stays plain."""
    # NaN must fail the comparison.
    if weight.numel() < MINIMUM_NUMEL or not weight.detach().abs().max() < MAXIMUM_VALUE:
        return None
    if quantization == "int8":
        return quantize_to_int8(weight)
    return None if weight.shape[1] % GROUP else quantize_to_int4(weight)


def _check_forward(model: PreTrainedModel, quantization: str) -> None:
    try:
        pass_of_two_tokens(model)
    except (AttributeError, TypeError) as error:
        raise InvalidParameter(
            "quantization",
            f"{quantization} does not support model type {model.config.model_type!r}, which reads its weights"
            f" outside its linears: {error}",
        ) from error


def _num_bytes(model: nn.Module) -> int:
    """Bytes of the storages of the model's weights, each counted once."""
    storages = {_storage(one): one.untyped_storage().nbytes() for one in model.parameters()}
    return sum(storages.values())


def _storage(weight: torch.Tensor) -> int:
    return weight.untyped_storage().data_ptr()
