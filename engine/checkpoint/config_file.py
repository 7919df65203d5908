"""Checks `config.json`: that it is one, that it belongs to a language model, and that weights are plain."""

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
"""Files that show what a directory without config.json holds instead."""
_QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files in which quantization tools state their settings apart from config.json, and the method of each."""
_QUANTIZATION_KEYS = {
    "quantization_config": "unnamed",
    "compression_config": "compressed-tensors",
    "quantization": "mlx",
}
"""Keys of config.json that state a quantization, and the method where the value names none."""


def read_config(directory: Path) -> dict[str, Any]:
    """The values in `config.json`.

    Raises `InvalidParameter` if there is none or it cannot be used, `UnsupportedModel` if it states quantized
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
        raise unusable(path, "states no model_type, so it is no config of a model of transformers")
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
    return f"{directory} has no {CONFIG}, so it is no model directory"


def _base_model(adapter: Path) -> str:
    base = read_json(adapter).get("base_model_name_or_path")
    return f" {base}" if isinstance(base, str) else ""


def refuse_quantized(config: dict[str, Any], directory: Path) -> None:
    """Raise `UnsupportedModel`, which names the method, if the checkpoint states that it is quantized."""
    method = _stated_method(config) or _stated_method(config.get("text_config"))
    for name, usual in _QUANTIZATION_FILES.items():
        if method is None and (directory / name).exists():
            method = f"{usual}, as {name} says"
    if method is not None:
        raise quantized(f"model type {config['model_type']!r}", directory, method)


def quantized(model: str, directory: Path, method: str) -> UnsupportedModel:
    """The error for a checkpoint whose weights are quantized by `method`."""
    return UnsupportedModel(
        f"{model}: the weights in {directory} are quantized ({method}), which is not supported; use the"
        " unquantized checkpoint (quantization=int8 or int4 makes its weights small on a CPU)"
    )


def _stated_method(config: Any) -> str | None:
    if not isinstance(config, dict):
        return None
    for key, usual in _QUANTIZATION_KEYS.items():
        stated = config.get(key)
        if stated is None or stated == {}:
            continue
        return _method_name(stated, usual)
    return None


def _method_name(stated: Any, usual: str) -> str:
    if not isinstance(stated, dict):
        return usual
    method = stated.get("quant_method") or stated.get("quant_algo")
    if method is None and ("load_in_4bit" in stated or "load_in_8bit" in stated):
        method = "bitsandbytes"
    return str(method or usual)
