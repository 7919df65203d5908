"""Tiny random models of real architectures, in memory or as a model directory, made in seconds.

Such a model can fail a test: its weights are scaled so that what attention reads decides the next
token. Greedy decoding does not repeat one token, and omitting a window, a soft cap or the
sinks changes the text. One seed gives one model.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

VOCAB_SIZE = 320
BOS, EOS, PAD, IM_START, IM_END = range(5)
SPECIAL_TOKENS = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Merges come from ASCII only, so that other characters are several tokens.
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other fox",
    "a worker takes a request from the queue and answers it token by token",
    "what is the capital of France? hello world, user assistant system",
    "one two three four five six seven eight nine ten",
]

_LLAMA_LIKE = {"intermediate_size": 96, "num_key_value_heads": 2}
_MIXED_LAYERS = ["sliding_attention", "full_attention"]
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512,
}  # fmt: skip
_GEMMA = {**_LLAMA_LIKE, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": {**_LLAMA_LIKE, "head_dim": 24},
    "mistral": {**_LLAMA_LIKE, "sliding_window": 5},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0, "layer_types": _MIXED_LAYERS},
    "gemma3_text": {**_GEMMA, "layer_types": _MIXED_LAYERS},
    "phi3": _LLAMA_LIKE,
    "gpt_neox": {"intermediate_size": 96},
    "gpt2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "mixtral": {**_LLAMA_LIKE, "num_local_experts": 4},
    "olmo2": _LLAMA_LIKE,
    "granite": _LLAMA_LIKE,
    "smollm3": _LLAMA_LIKE,
    "gpt_oss": {
        **_LLAMA_LIKE, "head_dim": 16, "sliding_window": 6, "num_local_experts": 4,
        "layer_types": _MIXED_LAYERS, "rope_parameters": _YARN,
    },
}  # fmt: skip
"""What each architecture needs besides `make_config`'s common sizes."""


def make_config(arch: str, **overrides: Any) -> PretrainedConfig:
    """A config of two layers, hidden size 64, four heads. `overrides` are fields of the config class."""
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    return CONFIG_MAPPING[arch](**{**common, **ARCHITECTURES.get(arch, {}), **overrides})


def make_model(
    arch: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A model in eval mode with eager attention and seeded random weights."""
    config = make_config(arch, **overrides)
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomize(model, seed)
    ready: PreTrainedModel = torch.nn.Module.to(model, dtype).eval()
    return ready


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> None:
    """Fill the weights from a separate generator; the global random state does not change."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(noise * _scale(name, weight) + _centre(name, weight))


def _centre(name: str, weight: torch.Tensor) -> torch.Tensor | float:
    """Norm weights keep the mean of the architecture: one, or zero if it adds one itself."""
    if "q_norm" in name or "k_norm" in name:
        # Normed queries and keys have scores of size one, for which attention is too even.
        return weight + 1.0
    return weight if weight.ndim == 1 and ("norm" in name or ".ln_" in name) else 0.0


def _scale(name: str, weight: torch.Tensor) -> float:
    if weight.ndim == 1:
        return 1.0 if "sinks" in name else 0.1
    if "embed" in name or "wte" in name or "wpe" in name:
        return 0.3
    gain: float = 2.0 if _is_attention(name) else 1.0
    if "lm_head" in name or "embed_out" in name:
        gain = 3.0
    # GPT-2's layers, named c_*, have transposed weights.
    fan_in = weight.shape[0] if ".c_" in name else weight.shape[-1]
    return gain / math.sqrt(fan_in)


def _is_attention(name: str) -> bool:
    return any(part in name for part in ("attn", "attention"))


def make_tokenizer(chat_template: bool = True) -> FastTokenizer:
    """A byte-level BPE of `VOCAB_SIZE` tokens that prepends `<s>`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    assert backend.get_vocab_size() == VOCAB_SIZE
    tokenizer = FastTokenizer(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    if chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_model(
    directory: Path, arch: str = "llama", chat_template: bool = True, seed: int = 0, **overrides: Any
) -> Path:
    """Write a whole model directory (weights, config, generation config, tokenizer); returns it.

    Both `</s>` and `<|im_end|>` end a text, as `generation_config.json` says.
    """
    model = make_model(arch, seed, **overrides)
    model.save_pretrained(directory)
    make_tokenizer(chat_template).save_pretrained(directory)
    generation = directory / "generation_config.json"
    generation.write_text(
        json.dumps({"bos_token_id": BOS, "eos_token_id": [EOS, IM_END], "pad_token_id": PAD})
    )
    return directory
