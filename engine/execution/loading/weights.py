"""Loads a checkpoint's weights into a model, and refuses a checkpoint that does not match it.

transformers fills missing tensors with random values and drops unexpected ones. Either gives a model that
runs and answers nonsense, so both are errors here. transformers does not report tied weights, or buffers that
are not saved, as missing.
"""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.checkpoint.reading import listed
from engine.errors import InvalidParameter
from engine.execution.attention.interface import ATTENTION_NAME
from engine.execution.machine.device_errors import device_errors
from engine.execution.machine.library_messages import one_line


def load_weights(directory: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model on `device`, in `dtype`.

    Raises `InvalidParameter` with the names of missing, surplus or misshapen tensors, and `MemoryError`.
    """
    # Typed as Any: `from_pretrained` has no types for what it returns with loading information.
    auto: Any = AutoModelForCausalLM
    try:
        with device_errors():
            model, info = auto.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=False,
                output_loading_info=True,
                # Reported in `info`, and refused below.
                ignore_mismatched_sizes=True,
            )
    except MemoryError:
        raise
    except Exception as error:
        if "can't start new thread" in str(error):
            # No memory for the stack of a thread that reads weights.
            raise MemoryError(str(error)) from error
        # Any error while a library reads a user's files is an error in the files.
        raise InvalidParameter(
            "model", f"the weights in {directory} cannot be loaded: {one_line(error)}"
        ) from error
    _check_fit(directory, model, info)
    ready: PreTrainedModel = model.to(device).eval()
    return ready


def _check_fit(directory: Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise `InvalidParameter` for missing, misshapen or surplus tensors."""
    missing = sorted(info["missing_keys"])
    surplus = sorted(info["unexpected_keys"])
    errors = []
    if missing:
        errors.append(f"{len(missing)} tensors are missing: {listed(missing)}")
    if shapes := [_shapes(entry) for entry in sorted(info["mismatched_keys"])]:
        errors.append(f"{len(shapes)} tensors have another shape: {listed(shapes)}")
    if surplus and (errors or belongs_to_model(surplus, model)):
        errors.append(f"{len(surplus)} tensors are not part of the model: {listed(surplus)}")
    if errors:
        raise InvalidParameter(
            "model",
            f"the weights in {directory} do not fit model type {model.config.model_type!r} as config.json"
            f" describes it: {'; '.join(errors)}",
        )


def _shapes(entry: tuple[str, Any, Any]) -> str:
    name, found, wanted = entry
    return f"{name} ({list(found)} instead of {list(wanted)})"


def belongs_to_model(names: list[str], model: PreTrainedModel) -> bool:
    """Whether any of `names` belongs to a part of the model, such as one more layer or an unused bias.

    Others, such as a vision tower or layers for multi-token prediction, are not needed.
    """
    known = set(model.state_dict())
    kinds = {_kind(name) for name in known}
    predicts_more = bool(getattr(model.config.get_text_config(), "num_nextn_predict_layers", 0))
    for name in names:
        owner = name.rpartition(".")[0]
        if f"{owner}.weight" in known or (_kind(name) in kinds and not predicts_more):
            return True
    return False


def _kind(name: str) -> str:
    """The name without numbers, the same for all layers."""
    return re.sub(r"\d+", "*", name)
