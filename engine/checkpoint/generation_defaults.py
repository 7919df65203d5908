"""Reads the sampling defaults in a model's `generation_config.json`, as vLLM does.

A value that cannot be used is ignored with a warning.
"""

import json
import logging
from pathlib import Path
from typing import Any

from engine.errors import InvalidParameter
from engine.sampling_params import SamplingParams

log = logging.getLogger(__name__)

FILE = "generation_config.json"
FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Names in the file, and the fields of `SamplingParams` that they set. Others are ignored."""


def read_defaults(directory: Path) -> dict[str, Any]:
    """Fields of `SamplingParams` for requests that do not set them; empty without a file."""
    defaults: dict[str, Any] = {}
    for name, value in _read(directory / FILE).items():
        if name not in FIELDS or value is None:
            continue
        field = FIELDS[name]
        # -1 also means that all tokens are kept.
        value = 0 if field == "top_k" and value == -1 else value
        values: dict[str, Any] = {field: value}
        try:
            SamplingParams(**values)
        except InvalidParameter as error:
            log.warning("%s: %s is ignored: %s", FILE, name, error.message)
        else:
            defaults[field] = value
    return defaults


def describe_defaults(defaults: dict[str, Any]) -> str:
    """A log line."""
    if not defaults:
        return f"sampling defaults: the engine's own ({FILE} sets none)"
    return f"sampling defaults of {FILE}: " + ", ".join(f"{name} {value}" for name, value in defaults.items())


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is ignored: it cannot be read: %s", FILE, error)
        return {}
    if not isinstance(content, dict):
        log.warning("%s is ignored: it holds no JSON object", FILE)
        return {}
    return content
