"""Loads a causal language model of transformers with paged attention, or says why it cannot be served.

A returned model has been checked: every layer calls paged attention once, and a small model of its kind
agrees with transformers' own attention.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from engine.checkpoint.config_file import read_config
from engine.checkpoint.fingerprint import fingerprint
from engine.checkpoint.generation_defaults import FILE as GENERATION_FILE
from engine.checkpoint.tokenizer_files import check_settings_files
from engine.checkpoint.weights import Weights, check_weights
from engine.errors import InvalidParameter, UnsupportedModel
from engine.execution.attention.interface import Backend, LayerSpec, install
from engine.execution.attention.probe import record_layers, refuse_by_config
from engine.execution.loading.agreement import Preparation, check_agreement
from engine.execution.loading.model_files import find_model
from engine.execution.loading.weights import load_weights
from engine.execution.machine.device_errors import device_errors
from engine.execution.machine.library_messages import one_line, quiet_transformers
from engine.execution.machine.memory import known_free_bytes
from engine.validation import excerpt

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, with facts from its files.

    `backend`: the one that agreed with the model's own attention. `max_model_len`: tokens that its positions
    allow; None: no limit stated. `eos_token_ids`: from its generation config; may be empty. `fingerprint`:
    see `engine.checkpoint.fingerprint`.
    """

    model: PreTrainedModel
    layers: tuple[LayerSpec, ...]
    backend: Backend
    directory: Path
    device: torch.device
    dtype: torch.dtype
    max_model_len: int | None
    eos_token_ids: frozenset[int]
    vocab_size: int
    fingerprint: str


# Seven parameters, most of which have defaults that tests and benchmarks use.
def load_model(
    source: str,
    *,
    backends: tuple[Backend, ...],
    prepare: Preparation = lambda _: None,
    finish: Preparation = lambda _: None,
    dtype: str = "auto",
    device: str = "auto",
    progress: Callable[[str], None],
) -> LoadedModel:
    """Load the model in a directory or under a hub id.

    `backends`: candidates for its attention; the first that agrees with the model's own is used. `prepare`: a
    change of the model and, before, of the small model of the self-check; `finish`: a change of the model
    only, which may change its logits. `dtype`, `device`: see `find_dtype`, `find_device`. `progress`:
    receives log lines.

    Raises `InvalidParameter`, or `UnsupportedModel` with the model's type and the reason.
    """
    target = find_device(device)
    directory = find_model(source, progress)
    with quiet_transformers():
        stated = read_config(directory)
        config = _read_config(directory, stated)
        _check_generation_config(directory)
        refuse_by_config(config)
        check_settings_files(directory)
        weights = check_weights(directory, stated)
        install()
        progress(f"checking paged attention on a small {config.model_type} model")
        served = find_dtype(dtype, target, _checkpoint_dtype(config))
        backend = _agreeing_backend(config, backends, target, prepare)
        progress(f"loading {directory} on {target}")
        with _guard_memory(weights, served, target):
            model = load_weights(directory, served, target)
            prepare(model)
            finish(model)
            layers = record_layers(model)
    return LoadedModel(
        model=model,
        layers=layers,
        backend=backend,
        directory=directory,
        device=target,
        dtype=model.dtype,
        max_model_len=position_limit(config),
        eos_token_ids=_eos_token_ids(model),
        vocab_size=config.get_text_config().vocab_size,
        fingerprint=fingerprint(directory),
    )


def _agreeing_backend(
    config: PretrainedConfig, backends: tuple[Backend, ...], device: torch.device, prepare: Preparation
) -> Backend:
    """The first that agrees. Raises `UnsupportedModel` from the last one."""
    *first, last = backends
    for backend in first:
        try:
            check_agreement(config, backend.make, device, prepare)
        except UnsupportedModel as error:
            log.warning("%s attention is not used for this model: %s", backend.name, error)
        else:
            return backend
    check_agreement(config, last.make, device, prepare)
    return last


def find_device(device: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda"; "auto" prefers CUDA. Raises `InvalidParameter`."""
    if device not in ("auto", "cpu", "cuda"):
        raise InvalidParameter("device", f"must be auto, cpu or cuda, not {device!r}")
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise InvalidParameter("device", "this machine or this build of torch has no CUDA; use cpu or auto")
    return torch.device("cuda" if has_cuda and device != "cpu" else "cpu")


def find_dtype(dtype: str, device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """The dtype for "auto" or a name in `DTYPES`. Raises `InvalidParameter`.

    "auto" is float32 on a CPU. On CUDA it is the checkpoint's dtype, with bfloat16 instead of float32: half
    the memory, computed by tensor cores.
    """
    if dtype == "auto":
        is_half = device.type == "cuda" and checkpoint == torch.float32
        return torch.bfloat16 if is_half else checkpoint if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise InvalidParameter("dtype", f"must be auto, {', '.join(DTYPES)}, not {dtype!r}")
    return DTYPES[dtype]


def position_limit(config: PretrainedConfig) -> int | None:
    """Tokens that the model's positions allow in one sequence; None: no limit stated.

    With RoPE of type `longrope` or `dynamic`, transformers changes the frequencies of a whole batch once its
    longest position passes a length, so that one long request would change the tokens of others. That length
    is the limit: the original length for `longrope`, `max_position_embeddings` for `dynamic`. Raises
    `InvalidParameter` for a limit below two tokens.
    """
    text = config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None)]
    limits += [
        rope.get("original_max_position_embeddings")
        for rope in _ropes(text)
        if rope.get("rope_type") == "longrope"
    ]
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is not None and limit < 2:
        raise InvalidParameter("model", f"its config allows {limit} positions (max_position_embeddings)")
    return limit


def _ropes(text: PretrainedConfig) -> list[dict[str, Any]]:
    """The RoPE parameters: one set, or one per kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]


def _read_config(directory: Path, stated: dict[str, Any]) -> PretrainedConfig:
    """The config as transformers reads it. `stated`: the values in its file."""
    model_type = stated["model_type"]
    if model_type not in CONFIG_MAPPING:
        reason = f"is not known to transformers {transformers.__version__}"
        if stated.get("auto_map"):
            reason = "is defined by code in the checkpoint (auto_map), which is never run"
        raise UnsupportedModel(f"model type {model_type!r} of {directory} {reason}")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        # Any error while a library reads a user's file is an error in the file.
        raise InvalidParameter(
            "model", f"the config in {directory} cannot be used: {one_line(error)}"
        ) from error
    return config


def _check_generation_config(directory: Path) -> None:
    """Raise `InvalidParameter` for a generation config that would make transformers refuse the model."""
    path = directory / GENERATION_FILE
    if not path.is_file():
        return
    try:
        eos = GenerationConfig.from_pretrained(directory).eos_token_id
    except OSError:
        return  # transformers ignores an unreadable file; `read_defaults` warns
    except (ValueError, TypeError) as error:
        raise InvalidParameter("model", f"{path} cannot be used: {error}") from error
    if any(type(one) is not int for one in (eos if isinstance(eos, list) else [] if eos is None else [eos])):
        raise InvalidParameter(
            "model", f"{path}: eos_token_id must be a token id or a list of them, not {excerpt(eos)}"
        )


def _checkpoint_dtype(config: PretrainedConfig) -> torch.dtype:
    """The stated dtype; float32 without one."""
    stated = config.get_text_config().dtype or config.dtype
    return stated if isinstance(stated, torch.dtype) else torch.float32


@contextmanager
def _guard_memory(weights: Weights, served: torch.dtype, device: torch.device) -> Iterator[None]:
    """Raise `InvalidParameter` if the weights need more memory than is available."""
    needed = weights.loaded_bytes(served.itemsize)
    available = known_free_bytes(device)
    if available is not None and needed > available:
        raise _out_of_memory(needed, available, served, device)
    try:
        with device_errors():
            yield
    except MemoryError as error:
        raise _out_of_memory(needed, available, served, device) from error


def _out_of_memory(
    needed: int, available: int | None, served: torch.dtype, device: torch.device
) -> InvalidParameter:
    smaller = "" if served.itemsize < 4 else f"set dtype to bfloat16 ({needed // 2} bytes), or "
    shown = "fewer" if available is None else available
    return InvalidParameter(
        "model",
        f"its weights need {needed} bytes as {str(served).removeprefix('torch.')} on {device}, where {shown}"
        f" are available; {smaller}choose a smaller model or more memory",
    )


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """All ids that end a text, without ids outside the vocabulary, which are never sampled."""
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    text = model.config.get_text_config()
    if eos is None:
        eos = text.eos_token_id
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if wrong := [one for one in ids if type(one) is not int]:
        raise InvalidParameter("model", f"its eos_token_id must be numbers, not {wrong[0]!r}")
    return frozenset(one for one in ids if 0 <= one < text.vocab_size)
