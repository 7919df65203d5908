"""What stands between the linears of a model, its norms and gates, goes to the native operators.

Law: an operator that fails its trial is not used, and torch computes what it would have computed. Knows no
model, and nothing of how norms and gates are recognised.
"""

import logging
from functools import partial

from transformers import PreTrainedModel

from engine.execution.elementwise_operator import ElementwiseOperator
from engine.execution.elementwise_trial import check_operator
from engine.execution.fast_gates import replace_gates
from engine.execution.fast_norms import replace_norms
from engine.execution.native_build import CannotBuild
from engine.execution.native_library import NativeLibrary
from engine.execution.probe import pass_of_two_tokens
from engine.execution.seen_places import seen_places

log = logging.getLogger(__name__)


def tried_elements(library: NativeLibrary) -> ElementwiseOperator | None:
    """The operator of norms and gates; None, and a warning, if it fails its trial."""
    try:
        operator = ElementwiseOperator(library)
        check_operator(operator)
    except CannotBuild as error:
        log.warning("norms and gates are computed by torch, which is slower: %s", error)
        return None
    return operator


def speed_up_elements(model: PreTrainedModel, operator: ElementwiseOperator) -> tuple[int, int]:
    """Replace the norms and gated MLPs that are recognised; gives how many of each.

    `operator`: one that has been tried.
    """
    places = seen_places(model, partial(pass_of_two_tokens, model))
    return replace_norms(places, operator), replace_gates(places, operator)
