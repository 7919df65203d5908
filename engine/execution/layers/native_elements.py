"""What stands between the linears of a model, its norms, gates and rotations, goes to the native operators.

Law: an operator that fails its trial is not used, and torch computes what it would have computed. Knows no
model, and nothing of how norms, gates and rotations are recognised.
"""

import logging
from typing import NamedTuple

from transformers import PreTrainedModel

from engine.execution.attention.probe import SeenCall, pass_of_two_tokens
from engine.execution.layers.elementwise_operator import ElementwiseOperator
from engine.execution.layers.elementwise_self_check import check_operator
from engine.execution.layers.module_slots import module_slots
from engine.execution.layers.native_gates import use_native_gates
from engine.execution.layers.native_norms import use_native_norms
from engine.execution.layers.native_rotary import use_native_rotary
from engine.execution.layers.rotary_operator import RotaryOperator
from engine.execution.machine.native_build import CannotBuild
from engine.execution.machine.native_library import NativeLibrary

log = logging.getLogger(__name__)


class ElementOperators(NamedTuple):
    """`elementwise` has been tried; a rotation is tried where it is recognised."""

    elementwise: ElementwiseOperator
    rotary: RotaryOperator


class Replaced(NamedTuple):
    """How many of each."""

    norms: int
    gates: int
    rotations: int


def checked_elements(library: NativeLibrary) -> ElementOperators | None:
    """The operators of `library`; None, and a warning, if they fail their trial."""
    try:
        operators = ElementOperators(ElementwiseOperator(library), RotaryOperator(library))
        check_operator(operators.elementwise)
    except CannotBuild as error:
        log.warning("norms, gates and rotations are computed by torch, which is slower: %s", error)
        return None
    return operators


def use_native_elements(model: PreTrainedModel, operators: ElementOperators) -> Replaced:
    """Replace the norms, gated MLPs and rotary embeddings that are recognised."""
    calls: list[SeenCall] = []
    places = module_slots(model, lambda: calls.extend(pass_of_two_tokens(model)))
    # Rotations first: with other norms the model's attention is no more given what the pass has shown.
    rotations = use_native_rotary(model, operators.rotary, calls)
    return Replaced(
        norms=use_native_norms(places, operators.elementwise),
        gates=use_native_gates(places, operators.elementwise),
        rotations=rotations,
    )
