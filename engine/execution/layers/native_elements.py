"""Replaces the norms, gated MLPs and rotary embeddings of a model with native operators."""

import logging
from typing import NamedTuple

from transformers import PreTrainedModel

from engine.execution.attention.probe import SeenCall, pass_of_two_tokens
from engine.execution.layers.elementwise_operator import ElementwiseOperator, check_elementwise
from engine.execution.layers.module_slots import observed_slots
from engine.execution.layers.native_gates import use_native_gates
from engine.execution.layers.native_norms import use_native_norms
from engine.execution.layers.native_rotary import use_native_rotary
from engine.execution.machine.native_build import CannotBuild
from engine.execution.machine.native_library import NativeLibrary

log = logging.getLogger(__name__)


class Replaced(NamedTuple):
    """Numbers of replaced modules."""

    norms: int
    gates: int
    rotations: int


def checked_elementwise(library: NativeLibrary | None) -> ElementwiseOperator | None:
    """The operator of `library`; None without a library, or, with a warning, if the self-check fails."""
    if library is None:
        return None
    try:
        operator = ElementwiseOperator(library)
        check_elementwise(operator)
    except CannotBuild as error:
        log.warning("norms, gates and rotary embeddings are computed by torch, which is slower: %s", error)
        return None
    return operator


def use_native_elements(model: PreTrainedModel, operator: ElementwiseOperator) -> Replaced:
    """Replace the norms, gated MLPs and rotary embeddings that are recognised."""
    calls: list[SeenCall] = []
    slots = observed_slots(model, lambda: calls.extend(pass_of_two_tokens(model)))
    # Rotary embeddings first: native norms round differently, which changes the recorded queries and keys.
    rotations = use_native_rotary(model, operator, calls)
    return Replaced(use_native_norms(slots, operator), use_native_gates(slots, operator), rotations)
