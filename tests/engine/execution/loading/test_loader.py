"""A model is served as its files describe it; an error names what cannot be served."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import InvalidParameter, UnsupportedModel
from engine.execution.loading import loader as module
from engine.execution.loading.attention_backends import TORCH
from engine.execution.loading.loader import LoadedModel, find_device, find_dtype, load_model, position_limit
from tests.tiny_models import EOS, IM_END, VOCAB_SIZE, make_config, save_model


def load(source: Path, **options: Any) -> LoadedModel:
    lines: list[str] = []
    loaded = load_model(str(source), backends=(TORCH,), device="cpu", progress=lines.append, **options)
    assert lines
    return loaded


def test_a_model_directory(tiny_llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load(tiny_llama)
    assert capfd.readouterr() == ("", "")
    assert loaded.dtype == loaded.model.dtype == torch.float32
    assert loaded.eos_token_ids == {EOS, IM_END}
    assert loaded.vocab_size == VOCAB_SIZE
    assert loaded.max_model_len == 2048
    assert [layer.num_kv_heads for layer in loaded.layers] == [2, 2]
    assert not loaded.model.training


def test_the_requested_dtype(tiny_llama: Path) -> None:
    loaded = load(tiny_llama, dtype="bfloat16")
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.dtype == torch.bfloat16


def test_a_checkpoint_in_bfloat16_is_served_in_float32_on_a_cpu(tmp_path: Path) -> None:
    assert load(save_model(tmp_path, dtype=torch.bfloat16)).dtype == torch.float32


def test_eos_from_the_config_without_a_generation_config(tmp_path: Path) -> None:
    """vllm#4589: end-of-text tokens in only one of the files were ignored."""
    save_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert load(tmp_path).eos_token_ids == {EOS}


@pytest.mark.parametrize("model_type", ["bloom", "falcon"])
def test_an_unsupported_model_is_refused_before_its_weights_are_read(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UnsupportedModel, match=f"'{model_type}'"):
        load(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        '{"model_type": "llama", "hidden_size": "x"}',
        '{"model_type": "llama", "num_attention_heads": 0}',
        '{"model_type": "llama", "eos_token_id": "x"}',
    ],
)
def test_a_config_that_transformers_cannot_use(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InvalidParameter, match=r"model: the config in .* cannot be used: ") as raised:
        load(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "no_such_model"}, "is not known to transformers"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "x.Y"}}, "code in the checkpoint"),
        ({"model_type": "t5"}, "is not a decoder-only language model"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "its config states no layers"),
    ],
)
def test_an_unsupported_model_type(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=f"model type '{config['model_type']}'.*{reason}"):
        load(tmp_path)


def test_a_config_without_positions(tmp_path: Path) -> None:
    save_model(tmp_path, max_position_embeddings=2)
    changed = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 0}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(InvalidParameter, match="model: its config allows 0 positions"):
        load(tmp_path)


def test_eos_ids_that_are_not_numbers(tmp_path: Path) -> None:
    save_model(tmp_path)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [EOS, -1, VOCAB_SIZE]}))
    assert load(tmp_path).eos_token_ids == {EOS}
    generation.write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(
        InvalidParameter, match="eos_token_id must be a token id or a list of them, not '</s>'"
    ):
        load(tmp_path)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    make_config("llama").save_pretrained(tmp_path)
    with pytest.raises(InvalidParameter, match=r"model: .* holds no weights"):
        load(tmp_path)


def test_weights_that_exceed_the_memory(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message states the bytes needed and available, and what to change."""
    needed = sum(one.numel() * 4 for one in load(tiny_llama).model.parameters())
    monkeypatch.setattr(module, "known_free_bytes", lambda _: needed - 1)
    with pytest.raises(
        InvalidParameter,
        match=rf"need {needed} bytes as float32 on cpu, where {needed - 1} are available; set dtype to"
        rf" bfloat16 \({needed // 2} bytes\)",
    ):
        load(tiny_llama)
    assert load(tiny_llama, dtype="bfloat16").dtype == torch.bfloat16


def test_an_allocation_failure_while_loading(tiny_llama: Path) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    with pytest.raises(InvalidParameter, match=r"model: its weights need \d+ bytes as float32"):
        load(tiny_llama, finish=fail)


def test_devices_and_dtypes_by_name() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert find_device("cpu") == cpu
    wide, half = torch.float32, torch.bfloat16
    assert find_dtype("auto", cpu, half) == wide
    assert [find_dtype("auto", cuda, one) for one in (wide, half, torch.float16)] == [
        half,
        half,
        torch.float16,
    ]
    assert find_dtype("bfloat16", cpu, wide) == half
    assert find_dtype("float32", cuda, half) == wide
    assert [find_dtype("float16", one, wide) for one in (cpu, cuda)] == [torch.float16] * 2
    with pytest.raises(InvalidParameter, match="device: must be auto, cpu or cuda"):
        find_device("tpu")
    with pytest.raises(InvalidParameter, match="dtype: must be auto"):
        find_dtype("float8", cpu, wide)


def test_cuda_on_a_machine_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == torch.device("cpu")
    with pytest.raises(InvalidParameter, match=r"device: .* no CUDA"):
        find_device("cuda")


def test_positions_end_where_one_request_would_change_others() -> None:
    """`longrope` changes the frequencies of the whole batch beyond its original length."""
    assert position_limit(make_config("llama")) == 2048
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 512,
        **factors,
    }
    assert (
        position_limit(make_config("phi3", rope_parameters=longrope, original_max_position_embeddings=512))
        == 512
    )
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert position_limit(make_config("llama", rope_parameters=dynamic)) == 2048
    by_layer = {"full_attention": longrope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = make_config("llama")
    config.rope_parameters = by_layer
    assert position_limit(config) == 512
