"""Converts a Llama or Qwen2 model directory to a GGUF file with identical weights and no vocabulary.

llama.cpp's converter supports the tokenizers of published models only, and refuses random weights.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Suffix in the directory -> suffix in the file.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TYPES = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}
FILE_TYPES = {"float32": gguf.LlamaFileType.ALL_F32, "bfloat16": gguf.LlamaFileType.MOSTLY_BF16}


def write_gguf(directory: Path, file: Path, dtype: str) -> None:
    """Raises `KeyError` for a tensor or an architecture that it does not know."""
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(file, {"llama": "llama", "qwen2": "qwen2"}[config["model_type"]])
    write_sizes(writer, config)
    writer.add_file_type(FILE_TYPES[dtype])
    for name, values in read_tensors(directory):
        stem, kind = name.rsplit(".", 1)
        if config["model_type"] == "llama" and stem.endswith(("q_proj", "k_proj")):
            values = interleaved(values, head_dim(config))
        # Vectors are small, and read as float32.
        type_ = TYPES[dtype] if values.ndim > 1 else TYPES["float32"]
        writer.add_tensor(f"{renamed(stem)}.{kind}", gguf.quants.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim(config))
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))


def head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def renamed(stem: str) -> str:
    """A tensor's name in the file."""
    if stem in OUTSIDE:
        return OUTSIDE[stem]
    _, _, number, suffix = stem.split(".", 3)
    return f"blk.{number}.{LAYER[suffix]}"


def interleaved(values: np.ndarray, size: int) -> np.ndarray:
    """Rows of queries or keys in the order in which llama.cpp turns pairs: neighbours, not halves."""
    heads = values.shape[0] // size
    return values.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(values.shape)


def read_tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors of a directory as float32. numpy has no bfloat16, so the bytes are widened here."""
    for file in sorted(directory.glob("*.safetensors")):
        content = np.memmap(file, dtype=np.uint8, mode="r")
        length = int(content[:8].view(np.uint64)[0])
        header = json.loads(content[8 : 8 + length].tobytes())
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            yield name, widened(content[begin:end].tobytes(), entry["dtype"]).reshape(entry["shape"])


def widened(content: bytes, dtype: str) -> np.ndarray:
    if dtype == "F32":
        return np.frombuffer(content, dtype=np.float32)
    if dtype != "BF16":
        raise KeyError(f"tensors of {dtype}")
    return (np.frombuffer(content, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
