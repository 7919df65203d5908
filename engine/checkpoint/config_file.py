"""Checks `config.json`: it must belong to a language model with unquantized weights."""

from pathlib import Path
from typing import Any

from engine.checkpoint.reading import read_json, unreadable, unusable
from engine.errors import InvalidParameter, UnsupportedModel

CONFIG = "config.json"
_OTHER_KINDS = {
    "adapter_config.json": "holds a PEFT adapter, not a model; merge it into its base model{base}",
    "model_index.json": "holds a diffusion pipeline, not a language model",
    "params.json": "holds a checkpoint in the format of its authors; convert it to transformers' format",
}
"""Files that identify what a directory without config.json holds instead."""
_QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files of quantization tools beside config.json, and the method of each."""
_QUANTIZATION_KEYS = {
    "quantization_config": "unnamed",
    "compression_config": "compressed-tensors",
    "quantization": "mlx",
}
"""Keys of config.json that declare a quantization, and the method if the value names none."""


def read_config(directory: Path) -> dict[str, Any]:
    """The values in `config.json`.

    Raises `InvalidParameter` if it is missing or invalid, `UnsupportedModel` if it declares quantized
    weights.
    """
    path = directory / CONFIG
    try:
        path.lstat()
    except FileNotFoundError as error:
        raise InvalidParameter("model", _without_config(directory)) from error
    except OSError as error:
        raise unreadable(path, error) from error
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise unusable(path, "has no model_type, so it is not the config of a transformers model")
    if (directory / "adapter_config.json").exists():
        raise InvalidParameter(
            "model",
            f"{directory} holds an adapter (adapter_config.json), which would not be applied; merge it"
            " into the weights, or remove it",
        )
    refuse_quantized(config, directory)
    return config


def _without_config(directory: Path) -> str:
    for name, message in _OTHER_KINDS.items():
        if (directory / name).is_file():
            base = _base_model(directory / name) if "{base}" in message else ""
            return f"{directory} {message.format(base=base)}"
    if files := sorted(directory.glob("*.gguf")):
        return (
            f"{directory} holds a GGUF file ({files[0].name}), which is not served; use the model's directory"
            " in transformers' format"
        )
    return f"{directory} has no {CONFIG}, so it is not a model directory"


def _base_model(adapter: Path) -> str:
    base = read_json(adapter).get("base_model_name_or_path")
    return f" {base}" if isinstance(base, str) else ""


def refuse_quantized(config: dict[str, Any], directory: Path) -> None:
    """Raise `UnsupportedModel` with the method if the checkpoint declares a quantization."""
    method = _declared_method(config) or _declared_method(config.get("text_config"))
    for name, usual in _QUANTIZATION_FILES.items():
        if method is None and (directory / name).exists():
            method = f"{usual}, according to {name}"
    if method is not None:
        raise quantized(f"model type {config['model_type']!r}", directory, method)


def quantized(model: str, directory: Path, method: str) -> UnsupportedModel:
    """The error for a checkpoint whose weights are quantized by `method`."""
    return UnsupportedModel(
        f"{model}: the weights in {directory} are quantized ({method}), which is not supported; use the"
        " unquantized checkpoint (on a CPU, quantization=int8 or int4 reduces its memory)"
    )


def _declared_method(config: Any) -> str | None:
    if not isinstance(config, dict):
        return None
    for key, usual in _QUANTIZATION_KEYS.items():
        declared = config.get(key)
        if declared is None or declared == {}:
            continue
        return _method_name(declared, usual)
    return None


def _method_name(declared: Any, usual: str) -> str:
    if not isinstance(declared, dict):
        return usual
    method = declared.get("quant_method") or declared.get("quant_algo")
    if method is None and ("load_in_4bit" in declared or "load_in_8bit" in declared):
        method = "bitsandbytes"
    return str(method or usual)
