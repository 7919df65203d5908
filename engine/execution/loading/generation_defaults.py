"""Sampling defaults in a model's `generation_config.json`, as vLLM reads them (`--generation-config auto`).

A value that cannot be used is left out with a warning: the model is served as if it were not there.
"""

import json
import logging
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from engine.errors import InvalidParameter
from engine.sampling_params import SamplingParams
from engine.validation import shown

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
"""Names there, and the fields of `SamplingParams` that they set. Others, as `do_sample`, are not followed."""
CHOICES = ("auto", "none")


def check_choice(choice: object) -> None:
    """Raises `InvalidParameter`."""
    if choice not in CHOICES:
        raise InvalidParameter("generation_config", f"must be {' or '.join(CHOICES)}, not {shown(choice)}")


def check_file(directory: Path) -> None:
    """Raises `InvalidParameter` where transformers would not load a model for its generation config."""
    if not (directory / FILE).is_file():
        return
    try:
        eos = GenerationConfig.from_pretrained(directory).eos_token_id
    except OSError:
        return  # transformers takes one that it cannot read for missing, and `read_defaults` warns
    except (ValueError, TypeError) as error:
        raise InvalidParameter("model", f"{directory / FILE} cannot be used: {error}") from error
    if any(type(one) is not int for one in (eos if isinstance(eos, list) else [] if eos is None else [eos])):
        raise InvalidParameter(
            "model",
            f"{directory / FILE}: eos_token_id must be a token id or a list of them, not {shown(eos)}",
        )


def read_defaults(directory: Path) -> dict[str, Any]:
    """Fields of `SamplingParams` that hold where a request does not give them; empty without such a file."""
    defaults: dict[str, Any] = {}
    for name, value in _read(directory / FILE).items():
        if name not in FIELDS or value is None:
            continue
        field = FIELDS[name]
        # -1 is another way to say that all tokens are kept.
        value = 0 if field == "top_k" and value == -1 else value
        values: dict[str, Any] = {field: value}
        try:
            SamplingParams(**values)
        except InvalidParameter as error:
            log.warning("%s: %s is not used: %s", FILE, name, error.message)
        else:
            defaults[field] = value
    return defaults


def describe_defaults(defaults: dict[str, Any]) -> str:
    """A start-up line."""
    values = ", ".join(f"{name} {value}" for name, value in defaults.items())
    return f"sampling defaults of {FILE}: {values}" if defaults else f"no sampling defaults of {FILE}"


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is not used: it cannot be read: %s", FILE, error)
        return {}
    if not isinstance(content, dict):
        log.warning("%s is not used: it holds no JSON object", FILE)
        return {}
    return content
