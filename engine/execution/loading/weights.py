"""Reads a checkpoint's weights into a model, and refuses a checkpoint that does not fit the model.

transformers fills tensors that are missing with random values and drops those that it does not expect. Both
give a model that runs and answers nonsense, so both are errors here. Tied weights and buffers that are not
saved are never missing: transformers takes them out of its report.
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

    Raises `InvalidParameter` with the names of tensors that are missing, surplus or of another shape, and
    `MemoryError`.
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
                # They are reported in `info`, and refused below.
                ignore_mismatched_sizes=True,
            )
    except MemoryError:
        raise
    except Exception as error:
        if "can't start new thread" in str(error):
            # There is no memory for the stack of a thread that reads weights.
            raise MemoryError(str(error)) from error
        # Whatever a library raises while it reads a user's files is a fault of the files.
        raise InvalidParameter(
            "model", f"the weights in {directory} cannot be loaded: {one_line(error)}"
        ) from error
    _check_fit(directory, model, info)
    ready: PreTrainedModel = model.to(device).eval()
    return ready


def _check_fit(directory: Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise `InvalidParameter` unless the checkpoint holds what the model needs and no more of its kind."""
    missing = sorted(info["missing_keys"])
    surplus = sorted(info["unexpected_keys"])
    faults = []
    if missing:
        faults.append(f"{len(missing)} tensors are missing: {listed(missing)}")
    if shapes := [_shapes(entry) for entry in sorted(info["mismatched_keys"])]:
        faults.append(f"{len(shapes)} tensors have another shape: {listed(shapes)}")
    if surplus and (faults or any_of_the_model(surplus, model)):
        faults.append(f"{len(surplus)} tensors are not part of the model: {listed(surplus)}")
    if faults:
        raise InvalidParameter(
            "model",
            f"the weights in {directory} do not fit model type {model.config.model_type!r} as config.json"
            f" describes it: {'; '.join(faults)}",
        )


def _shapes(entry: tuple[str, Any, Any]) -> str:
    name, found, wanted = entry
    return f"{name} ({list(found)} instead of {list(wanted)})"


def any_of_the_model(names: list[str], model: PreTrainedModel) -> bool:
    """Whether any of `names` belongs to a part that the model has: one more layer, or a bias it does not use.

    Others, such as those of a vision tower or of layers that predict further tokens, are not needed.
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
    """The name with every number replaced, so that all layers are alike."""
    return re.sub(r"\d+", "*", name)
