"""A model that would be served wrongly is refused, with its type and the reason."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from engine.errors import UnsupportedModel
from engine.execution.attention import torch_backend as torch_attention
from engine.execution.attention.interface import AttentionBackend, LayerSpec, PoolShape, install
from engine.execution.attention.probe import record_layers, refuse_by_config
from engine.execution.attention.torch_backend import TorchAttention
from engine.execution.loading.agreement import check_agreement, shrink
from tests.engine.execution.serving import make_runner
from tests.engine.execution.test_greedy_equality import ALONE, Forgetful
from tests.tiny_models import ARCHITECTURES, make_config, make_model

CPU = torch.device("cpu")


def check(config: PretrainedConfig, **forgotten: None) -> None:
    install()

    def make_backend(shape: PoolShape) -> AttentionBackend:
        return Forgetful(TorchAttention(shape), forgotten)

    refuse_by_config(config)
    check_agreement(config, make_backend, CPU)


def small(model_type: str, **fields: Any) -> PretrainedConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    return CONFIG_MAPPING[model_type](**{**sizes, **fields})


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_supported_model_passes(arch: str) -> None:
    check(make_config(arch))


def test_values_of_another_size_than_keys_are_supported() -> None:
    """Latent attention, with queries and keys of size 24 and values of size 16."""
    config = small(
        "deepseek_v3", intermediate_size=32, moe_intermediate_size=32, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, num_key_value_heads=4, n_routed_experts=8,
        n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
    )  # fmt: skip
    check(config)


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "mpt", "gpt_neo"])
def test_a_model_that_bypasses_the_interface_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{model_type}'.*attention interface"):
        check(CONFIG_MAPPING[model_type]())


def test_chunked_attention_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'llama4_text' has chunked attention"):
        check(CONFIG_MAPPING["llama4_text"]())


def test_bidirectional_attention_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'gemma3_text' has bidirectional attention"):
        check(make_config("gemma3_text", use_bidirectional_attention=True))


def test_attention_that_is_not_causal_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'bert': the model has attention that is not causal"):
        check(small("bert", intermediate_size=32))


def test_a_mask_of_the_models_own_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'doge': the model adds its own mask or bias"):
        check(small("doge", intermediate_size=32, num_key_value_heads=2))


def test_a_layer_that_attends_twice_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"'diffllama' has 2 layers but called .* 4 times"):
        check(small("diffllama", intermediate_size=32, num_key_value_heads=2))


def test_an_encoder_decoder_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'t5' is not a decoder-only"):
        check(CONFIG_MAPPING["t5"]())


def test_a_model_whose_self_check_fails_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'llama': the self-check failed: ZeroDivisionError"):
        check(make_config("llama", num_key_value_heads=0))


@pytest.mark.parametrize(
    ("arch", "feature"),
    [
        ("mistral", "sliding_window"),
        ("gemma2", "softcap"),
        ("gemma3_text", "sliding_window"),
        ("gpt_oss", "sinks"),
    ],
)
def test_a_backend_that_omits_a_feature_is_detected(arch: str, feature: str) -> None:
    config = make_config(arch, sliding_window=4096)
    if feature == "softcap":
        # The value of Gemma 2, whose omission alone would hardly show.
        config.attn_logit_softcapping = 50.0
    with pytest.raises(UnsupportedModel, match=f"'{arch}': paged attention disagrees"):
        check(config, **{feature: None})


def test_a_backend_that_is_not_causal_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = torch.nn.functional.scaled_dot_product_attention

    def looking_ahead(*args: Any, **options: Any) -> torch.Tensor:
        return fused(*args, **{**options, "is_causal": False})

    monkeypatch.setattr(torch_attention, "scaled_dot_product_attention", looking_ahead)
    with pytest.raises(UnsupportedModel, match="disagrees"):
        check(make_config("llama"))


def test_the_small_model_keeps_heads_and_every_kind_of_layer() -> None:
    config = make_config(
        "gemma3_text",
        num_hidden_layers=12,
        layer_types=["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 6,
        sliding_window=512,
    )
    before = config.to_dict()
    shrunken = shrink(config)
    assert config.to_dict() == before
    assert shrunken.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert shrunken.num_hidden_layers == 3
    assert shrunken.sliding_window == 8
    assert (shrunken.num_attention_heads, shrunken.num_key_value_heads, shrunken.head_dim) == (4, 2, 16)


def test_layers_without_positions_stay() -> None:
    """SmolLM3 has layers without RoPE, named by a list with an entry per layer."""
    shrunken = shrink(make_config("smollm3", num_hidden_layers=8, no_rope_layers=[1, 1, 1, 0, 1, 1, 1, 0]))
    assert shrunken.no_rope_layers == [1, 1, 0]


def test_the_attention_of_layers_is_recorded() -> None:
    model = make_model("gemma2")
    make_runner(model, ALONE)
    assert record_layers(model) == (
        LayerSpec(4, 2, 16, 16, 0.25, sliding_window=6, softcap=2.0),
        LayerSpec(4, 2, 16, 16, 0.25, softcap=2.0),
    )


def test_the_global_random_state_does_not_change() -> None:
    before = torch.random.get_rng_state()
    check(make_config("llama"))
    assert torch.equal(torch.random.get_rng_state(), before)
