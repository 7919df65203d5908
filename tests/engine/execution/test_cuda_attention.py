"""On CUDA the fastest attention that can be had goes first; what is asked for by name is taken or refused."""

import logging
import sys

import pytest
import torch

from engine.errors import InvalidParameter, UnsupportedModel
from engine.execution import cuda_attention
from engine.execution.attention import AttentionBackend, PoolShape, install
from engine.execution.attention_choice import TORCH
from engine.execution.cuda_attention import cuda_backends
from engine.execution.loader import load_model
from engine.execution.torch_attention import TorchAttention
from engine.execution.trial import Backend, Terms, check_agreement
from tests.engine.execution.test_greedy_equality import Forgetful
from tests.tiny_models import make_config, save_model

CPU = torch.device("cpu")


def names(attention: str, block_size: int = 16) -> list[str]:
    return [backend.name for backend in cuda_backends(attention, block_size, TORCH)]


def test_triton_goes_first(caplog: pytest.LogCaptureFixture) -> None:
    assert names("auto") == ["triton", "torch"]
    assert names("auto", 256) == ["triton", "varlen", "torch"]
    assert names("triton") == ["triton"]
    assert names("varlen", 512) == ["varlen"]
    assert not caplog.records


def test_without_triton_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "engine.execution.triton_attention", None)
    assert names("auto") == ["torch"]
    assert names("auto", 256) == ["varlen", "torch"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert len(caplog.records) == 2
    assert "not computed by Triton's kernels" in caplog.text
    with pytest.raises(InvalidParameter, match=r"attention: triton cannot be had: .*triton_attention"):
        names("triton")


def test_varlen_wants_large_blocks_and_a_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameter, match=r"varlen cannot be had: .* of 256 tokens, not of 32"):
        names("varlen", 32)

    def missing() -> None:
        raise ImportError("it has no block_table")

    monkeypatch.setattr(cuda_attention, "find_varlen_attn", missing)
    assert names("auto", 256) == ["triton", "torch"]
    with pytest.raises(InvalidParameter, match="varlen cannot be had: it has no block_table"):
        names("varlen", 256)


def varlen_terms() -> Terms:
    (varlen,) = cuda_backends("varlen", 256, TORCH)
    return varlen.terms


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gemma3_text", "mistral", "qwen3", "gpt2"])
def test_a_trial_in_half_precision_passes_what_is_right(arch: str) -> None:
    """Models without experts: a router near a tie may choose another one by rounding alone."""
    install()
    check_agreement(make_config(arch), TorchAttention, CPU, terms=varlen_terms())


@pytest.mark.parametrize(
    ("arch", "field"), [("mistral", "sliding_window"), ("gemma3_text", "sliding_window")]
)
def test_a_trial_in_half_precision_finds_what_is_left_out(arch: str, field: str) -> None:
    def make_backend(shape: PoolShape) -> AttentionBackend:
        assert (shape.dtype, shape.block_size) == (torch.float16, 256)
        return Forgetful(TorchAttention(shape), {field: None})

    install()
    with pytest.raises(UnsupportedModel, match="disagrees with the model's own"):
        check_agreement(make_config(arch), make_backend, CPU, terms=varlen_terms())


def test_a_backend_serves_the_dtypes_that_it_takes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The checkpoint's dtype counts where none is asked for."""
    half = Backend("half", TorchAttention, TORCH.bytes_per_block, dtypes=(torch.bfloat16,))
    directory = str(save_model(tmp_path_factory.mktemp("models") / "tiny"))

    def taken(dtype: str, *backends: Backend) -> str:
        loaded = load_model(directory, backends=backends, dtype=dtype, device="cpu", progress=lambda _: None)
        return loaded.backend.name

    assert taken("bfloat16", half, TORCH) == "half"
    assert taken("float32", half, TORCH) == "torch"
    with pytest.raises(UnsupportedModel, match=r"half attention does not take torch\.float32"):
        taken("float32", half)
