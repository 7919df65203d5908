"""Writes a model directory: Tokenmill's default model, or a model with random weights.

A name always gives the same weights. Random weights are scaled so that the layers decide the next token, not
the embedding of the last one: with a shared output embedding the model would otherwise repeat one token, and
equal outputs would prove nothing. Weights are stored in bfloat16, so that all dtypes serve the same values.

    python -m benchmarks.serving.make_model NAME DIRECTORY
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from benchmarks.serving.shapes import MODELS
from engine.execution.loading.default_model import default_model

EMBEDDING_SCALE = 0.02
ATTENTION_GAIN = 2.0


def make_model(name: str, parent: Path) -> Path:
    """The model's directory in `parent`, made if it is not there."""
    config = MODELS[name].config
    if config is None:
        return default_model(parent, lambda text: print(text, file=sys.stderr))
    directory = parent / name
    if not directory.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=parent) as scratch:
            unfinished = Path(scratch) / name
            save_random(config, unfinished)
            os.rename(unfinished, directory)
    return directory


def save_random(config: dict[str, Any], directory: Path) -> None:
    """Write weights, config and a tokenizer whose tokens are numbers."""
    fields = {key: value for key, value in config.items() if key != "model_type"}
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(CONFIG_MAPPING[config["model_type"]](**fields), dtype=torch.bfloat16)
    randomize(model)
    model.save_pretrained(directory)
    words = Tokenizer(WordLevel({f"t{number}": number for number in range(config["vocab_size"])}, "t0"))
    # Typed as Any, here and above: transformers gives these no types.
    fast: Any = FastTokenizer
    tokenizer = fast(tokenizer_object=words, bos_token="t0", eos_token="t1", pad_token="t2", unk_token="t0")
    tokenizer.save_pretrained(directory)


@torch.no_grad()
def randomize(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "norm" in name:
            continue
        weight.copy_(torch.randn(weight.shape, generator=generator) * scale(name, weight))


def scale(name: str, weight: torch.Tensor) -> float:
    if "embed" in name:
        return EMBEDDING_SCALE
    if weight.ndim == 1:
        return 0.1
    gain = ATTENTION_GAIN if "attn" in name else 1.0
    return float(gain * weight.shape[-1] ** -0.5)


if __name__ == "__main__":
    print(make_model(sys.argv[1], Path(sys.argv[2])))
