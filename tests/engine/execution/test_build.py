"""Limits that are set hold; the others follow from the model and the memory."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.execution.build import Execution, build_execution
from engine.execution.loading import limits
from engine.execution.loading.limits import default_limits, model_length
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.comparer import assert_equal_tokens, reference
from tests.tiny_models import EOS, IM_END, VOCAB_SIZE, make_model, save_model


def test_what_is_built_serves_what_transformers_generates(tiny_llama: Path) -> None:
    execution = build_execution(str(tiny_llama), device="cpu", num_kv_blocks=64, max_num_batched_tokens=16)
    assert execution.eos_token_ids == {EOS, IM_END}
    assert execution.vocab_size == VOCAB_SIZE
    assert (execution.dtype, execution.device) == ("float32", "cpu")
    engine = execution.new_engine()
    prompt = execution.tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    engine.add(EngineRequest("r", prompt, SamplingParams(temperature=0.0, max_tokens=30), arrival_time=0.0))
    token_ids: list[int] = []
    while engine.has_work:
        token_ids += [output.token_id for output in engine.step().outputs if output.token_id is not None]
    right = reference(make_model("llama"), prompt, 30, execution.eos_token_ids)
    assert_equal_tokens({"r": token_ids}, {"r": right})


def test_default_limits(tiny_llama: Path) -> None:
    config = build_execution(str(tiny_llama), device="cpu", max_num_seqs=2).config
    assert config.max_model_len == 2048
    assert config.num_kv_blocks == 2 * 2048 // 16
    assert config.block_size == 16
    assert config.chunked_prefill


def test_default_limits_on_cuda(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert default_limits(cpu) == {}
    assert default_limits(cuda) == {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
    expected = default_limits(cuda)
    monkeypatch.setattr(limits, "default_limits", lambda _: expected)

    def built(**settings: Any) -> tuple[int, int]:
        config = build_execution(str(tiny_llama), device="cpu", num_kv_blocks=8, **settings).config
        return config.max_num_batched_tokens, config.max_num_seqs

    assert built() == (2048, 256)
    assert built(max_num_batched_tokens=None, max_num_seqs=8) == (2048, 8)
    assert built(max_num_batched_tokens=64) == (64, 256)


def test_limits_that_are_set(tiny_llama: Path) -> None:
    config = build_execution(
        str(tiny_llama),
        device="cpu",
        max_model_len=100,
        num_kv_blocks=13,
        block_size=8,
        max_num_batched_tokens=33,
        max_num_seqs=3,
        max_num_prefill_seqs=2,
        chunked_prefill=False,
    ).config
    assert (config.max_model_len, config.num_kv_blocks, config.block_size) == (100, 13, 8)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (33, 3)
    assert (config.max_num_prefill_seqs, config.chunked_prefill) == (2, False)


def test_every_field_of_the_config_may_be_set(tiny_llama: Path) -> None:
    """A field that is not passed on would be a setting without effect."""
    wanted = EngineConfig(
        max_model_len=90,
        num_kv_blocks=23,
        block_size=4,
        max_num_batched_tokens=40,
        max_num_seqs=5,
        max_num_prefill_seqs=3,
        chunked_prefill=False,
        prefix_caching=False,
        policy="skip_ahead",
        max_skip_ahead=2,
        ageing_seconds=7.0,
        max_waiting_seconds=8.0,
        max_preemptions=9,
        prefill_reserve=0.25,
        max_chunk_tokens=11,
        num_speculative_tokens=6,
    )
    values = {field.name: getattr(wanted, field.name) for field in fields(EngineConfig)}
    assert all(values[field.name] != field.default for field in fields(EngineConfig))
    assert build_execution(str(tiny_llama), device="cpu", **values).config == wanted


def test_none_is_the_default_unless_it_is_a_value(tiny_llama: Path) -> None:
    config = build_execution(
        str(tiny_llama), device="cpu", num_kv_blocks=4, max_num_seqs=None, policy=None, ageing_seconds=None
    ).config
    assert (config.max_num_seqs, config.policy, config.ageing_seconds) == (64, "fifo", None)


def test_asynchronous_scheduling_is_off_by_default_on_a_cpu(tiny_llama: Path) -> None:
    built = {
        setting: build_execution(str(tiny_llama), device="cpu", num_kv_blocks=9, async_scheduling=setting)
        for setting in (None, False, True)
    }
    assert {setting: one.async_executor is not None for setting, one in built.items()} == {
        None: False, False: False, True: True,
    }  # fmt: skip
    assert generate(built[True]) == generate(built[False])


def generate(execution: Execution) -> list[int | None]:
    engine = execution.new_engine()
    engine.add(
        EngineRequest(
            "a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True), arrival_time=0.0
        )
    )
    tokens: list[int | None] = []
    while engine.has_work:
        tokens += [one.token_id for one in engine.step().outputs]
    return tokens


def test_an_unknown_limit_is_refused() -> None:
    with pytest.raises(TypeError, match="EngineConfig has no field max_sequences"):
        build_execution("/nowhere", max_sequences=3)


def test_a_length_beyond_the_model_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(InvalidParameter, match="max_model_len: is 2049, but the model takes at most 2048"):
        build_execution(str(tiny_llama), device="cpu", max_model_len=2049)


def test_a_bad_limit_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidParameter, match="max_num_seqs"):
        build_execution("/nowhere", max_num_seqs=0)
    with pytest.raises(InvalidParameter, match="num_kv_blocks"):
        build_execution("/nowhere", num_kv_blocks=0)
    with pytest.raises(InvalidParameter, match="max_model_len"):
        build_execution("/nowhere", max_model_len=0)


def test_a_model_without_eos_uses_the_eos_of_its_tokenizer(tmp_path: Path) -> None:
    save_model(tmp_path, eos_token_id=None)
    (tmp_path / "generation_config.json").unlink()
    assert build_execution(str(tmp_path), device="cpu", num_kv_blocks=4).eos_token_ids == {EOS}


def test_the_default_model_needs_a_cache_directory() -> None:
    with pytest.raises(InvalidParameter, match="cache_dir: must be set"):
        build_execution("SmolLM2-135M-Instruct")


def test_a_model_without_a_stated_length_needs_the_setting() -> None:
    assert model_length(None, 500) == 500
    with pytest.raises(InvalidParameter, match="max_model_len: must be set"):
        model_length(None, None)


def test_a_pool_that_does_not_hold_the_longest_sequence(tiny_llama: Path) -> None:
    """A length that is set is refused, the model's own is reduced, so that no request waits forever."""
    lines: list[str] = []
    config = build_execution(str(tiny_llama), device="cpu", num_kv_blocks=10, progress=lines.append).config
    assert (config.max_model_len, config.max_prompt_tokens) == (160, 159)
    (line,) = [line for line in lines if "max_model_len" in line]
    assert line.startswith("max_model_len is 160 instead of the model's 2048: 10 KV blocks hold no more;")
    assert line.endswith("num_kv_blocks=128 would suffice")
    with pytest.raises(
        InvalidParameter,
        match="max_model_len: is 161, but 10 KV blocks of 16 tokens hold 160; set it to at most 160, or"
        " num_kv_blocks to at least 11",
    ):
        build_execution(str(tiny_llama), device="cpu", num_kv_blocks=10, max_model_len=161)


def test_a_pool_that_the_memory_does_not_hold(tiny_llama: Path) -> None:
    with pytest.raises(
        InvalidParameter,
        match=r"num_kv_blocks: \d+ KV blocks need \d+ bytes on cpu, where \d+ are available; set it to",
    ):
        build_execution(str(tiny_llama), device="cpu", num_kv_blocks=2**31 - 1)
