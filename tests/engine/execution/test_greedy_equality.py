"""Greedy float32 tokens equal those of `transformers.generate`, on every architecture, in every batch."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.execution.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionMetadata,
    LayerCall,
)
from engine.sampling_params import SamplingParams
from tests.comparer import Reference, assert_equal_tokens, compare, reference
from tests.engine.execution.serving import GREEDY, make_prompts, make_runner, serve
from tests.tiny_models import ARCHITECTURES, make_model

PROMPTS = make_prompts((1, 5, 17, 33, 40, 64))
REQUESTS = {name: (prompt, GREEDY) for name, prompt in PROMPTS.items()}
ALONE = EngineConfig(max_model_len=128, num_kv_blocks=32, block_size=4, max_num_seqs=1)
# Chunks of at most 24 tokens, and blocks for 120 tokens while the requests need 280.
CROWDED = EngineConfig(
    max_model_len=128, num_kv_blocks=30, block_size=4, max_num_batched_tokens=24, max_num_seqs=4
)


@cache
def expected(arch: str) -> dict[str, Reference]:
    model = make_model(arch)
    return {name: reference(model, prompt, 20) for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_reference_can_fail(arch: str) -> None:
    for right in expected(arch).values():
        assert len(set(right.token_ids)) >= 8


@pytest.mark.parametrize("attention", ["native", "torch"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_equals_generate_alone(arch: str, attention: str) -> None:
    served = serve(make_runner(make_model(arch), ALONE, attention=attention), ALONE, REQUESTS)
    assert_equal_tokens(served.token_ids, expected(arch))


@pytest.mark.parametrize("attention", ["native", "torch"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_equals_generate_in_chunks_and_out_of_blocks(arch: str, attention: str) -> None:
    served = serve(make_runner(make_model(arch), CROWDED, attention=attention), CROWDED, REQUESTS)
    assert served.num_preempted > 0
    assert_equal_tokens(served.token_ids, expected(arch))


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("config", [CROWDED, replace(CROWDED, num_kv_blocks=60)])
def test_a_prefix_found_in_the_cache_gives_the_same_tokens(arch: str, config: EngineConfig) -> None:
    """nano-vllm#208, nano-vllm#211: prompts with a common prefix, in one batch and after preemptions."""
    (beginning,) = make_prompts((22,), seed=7).values()
    tails = make_prompts((1, 2, 3, 5, 8, 13), seed=8)
    prompts = {name: beginning + tail for name, tail in tails.items()}
    prompts["again"] = prompts["13 tokens"]
    model = make_model(arch)
    right = {name: reference(model, prompt, 20) for name, prompt in prompts.items()}

    served = serve(
        make_runner(make_model(arch), config), config, {name: (one, GREEDY) for name, one in prompts.items()}
    )

    assert served.num_found > 0
    assert_equal_tokens(served.token_ids, right)


def test_sampled_rows_do_not_change_greedy_rows() -> None:
    random = SamplingParams(temperature=1.5, top_p=0.9, max_tokens=20, seed=3)
    others = {f"other {name}": (prompt, random) for name, prompt in make_prompts((9, 30), seed=2).items()}
    served = serve(make_runner(make_model("llama"), CROWDED), CROWDED, {**others, **REQUESTS})
    assert_equal_tokens({name: served.token_ids[name] for name in REQUESTS}, expected("llama"))


def test_random_tokens_do_not_depend_on_the_batch() -> None:
    """vllm#51226, vllm#17524: a seeded request gave other tokens in a batch."""
    random = SamplingParams(temperature=1.0, top_k=40, max_tokens=20, seed=11)
    requests = {name: (prompt, random) for name, prompt in PROMPTS.items()}
    alone = serve(make_runner(make_model("llama"), ALONE), ALONE, requests)
    crowded = serve(make_runner(make_model("llama"), CROWDED), CROWDED, requests)
    assert crowded.token_ids == alone.token_ids
    assert alone.token_ids != {name: right.token_ids for name, right in expected("llama").items()}


@dataclass(frozen=True)
class Forgetful:
    """A backend that omits one feature."""

    backend: AttentionBackend
    forgotten: dict[str, Any]

    def build_metadata(self, batch: AttentionBatch) -> AttentionMetadata:
        return ForgetfulMetadata(self.backend.build_metadata(batch), self.forgotten)

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        self.backend.zero_blocks(blocks)


@dataclass(frozen=True)
class ForgetfulMetadata:
    step: AttentionMetadata
    forgotten: dict[str, Any]

    def forward(
        self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return self.step.forward(call._replace(**self.forgotten), query, key, value)


@pytest.mark.parametrize(
    ("arch", "feature"),
    [
        ("mistral", "sliding_window"),
        ("gemma2", "sliding_window"),
        ("gemma2", "softcap"),
        ("gemma3_text", "sliding_window"),
        ("gpt_oss", "sliding_window"),
        ("gpt_oss", "sinks"),
    ],
)
def test_an_omitted_feature_is_detected(arch: str, feature: str) -> None:
    model = make_model(arch)
    runner = make_runner(model, ALONE, lambda backend: Forgetful(backend, {feature: None}))
    served = serve(runner, ALONE, REQUESTS)
    assert compare(served.token_ids, expected(arch)).mismatches


def test_prompts_that_fill_their_blocks_exactly() -> None:
    """FastDeploy#3288, vllm-rbln#662: a prompt of exactly k blocks stalled or lost its second block."""
    prompts = make_prompts((3, 4, 5, 8), seed=4)
    model = make_model("llama")
    right = {name: reference(model, prompt, 20) for name, prompt in prompts.items()}
    requests = {name: (prompt, GREEDY) for name, prompt in prompts.items()}
    for config in (ALONE, CROWDED):
        served = serve(make_runner(make_model("llama"), config), config, requests)
        assert_equal_tokens(served.token_ids, right)


def test_fifty_short_requests() -> None:
    """Few slots, so that slots and blocks change owners at every step."""
    prompts = make_prompts(tuple(range(1, 51)))
    short = replace(GREEDY, max_tokens=5)
    model = make_model("qwen2")
    right = {name: reference(model, prompt, 5) for name, prompt in prompts.items()}
    served = serve(
        make_runner(make_model("qwen2"), CROWDED),
        CROWDED,
        {name: (prompt, short) for name, prompt in prompts.items()},
    )
    assert_equal_tokens(served.token_ids, right)
