"""Sampling defaults come from the model's `generation_config.json`."""

import json
import logging
from pathlib import Path

import pytest

from engine.checkpoint.generation_defaults import FIELDS, describe_defaults, read_defaults
from engine.errors import InvalidParameter
from engine.execution.build import build_execution
from engine.offline.llm import LLM
from engine.sampling_params import SamplingParams
from tests.tiny_models import save_model


def write(directory: Path, content: object) -> Path:
    (directory / "generation_config.json").write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    return directory


def test_the_fields_that_vllm_reads_are_read(tmp_path: Path) -> None:
    content = {
        "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05,
        "repetition_penalty": 1.05, "max_new_tokens": 2048, "eos_token_id": [1, 2], "num_beams": 1,
        "transformers_version": "5.0.0",
    }  # fmt: skip
    defaults = read_defaults(write(tmp_path, content))

    assert defaults == {
        "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05,
        "max_tokens": 2048,
    }  # fmt: skip
    SamplingParams(**defaults)
    assert "temperature 0.6" in describe_defaults(defaults)


def test_every_field_is_a_sampling_parameter() -> None:
    assert set(FIELDS.values()) <= set(SamplingParams.__dataclass_fields__)


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == {}
    assert describe_defaults({}) == "sampling defaults: the engine's own (generation_config.json sets none)"


@pytest.mark.parametrize(
    ("content", "left"),
    [
        ({"top_k": 1, "temperature": 0.01}, {"top_k": 1, "temperature": 0.01}),
        ({"temperature": "hot", "top_p": 0.9}, {"top_p": 0.9}),
        ({"temperature": -1}, {}),
        ('{"temperature": NaN, "top_k": 5}', {"top_k": 5}),
        ({"top_p": 0}, {}),
        ({"top_k": 2.5}, {}),
        ({"top_k": True}, {}),
        ({"repetition_penalty": 10**400}, {}),
        ({"max_new_tokens": 0}, {}),
        ("[1, 2]", {}),
        ("{", {}),
        ("\x00", {}),
    ],
)
def test_an_unusable_value_is_ignored_with_a_warning(
    tmp_path: Path, content: object, left: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_defaults(write(tmp_path, content)) == left
    assert bool(caplog.records) is (left != content)
    assert all("generation_config.json" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("content", [{"top_k": -1}, {"top_k": 0}, {"temperature": None}])
def test_values_that_set_nothing(tmp_path: Path, content: object, caplog: pytest.LogCaptureFixture) -> None:
    assert read_defaults(write(tmp_path, content)) in ({"top_k": 0}, {})
    assert not caplog.records


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved = save_model(tmp_path_factory.mktemp("model"))
    config = json.loads((saved / "generation_config.json").read_text())
    return write(saved, {**config, "temperature": 0.01, "top_k": 1, "max_new_tokens": 3})


def test_the_setting_and_the_log_line(directory: Path) -> None:
    lines: list[str] = []
    followed = build_execution(str(directory), num_kv_blocks=8, progress=lines.append)
    assert followed.default_sampling == {"temperature": 0.01, "top_k": 1, "max_tokens": 3}
    assert any("temperature 0.01" in line for line in lines)
    ignored = build_execution(
        str(directory), num_kv_blocks=8, generation_config="none", progress=lines.append
    )
    assert ignored.default_sampling == {}
    with pytest.raises(InvalidParameter, match="generation_config: must be auto or none"):
        build_execution(str(directory), generation_config="vllm")


@pytest.mark.parametrize(
    "content",
    [{"max_new_tokens": 0}, {"early_stopping": 7}, [1], {"eos_token_id": "x"}, {"eos_token_id": [1, None]}],
)
def test_a_file_that_transformers_refuses_is_named(directory: Path, tmp_path: Path, content: object) -> None:
    """Before the weights are read."""
    for file in directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    write(tmp_path, content)
    with pytest.raises(InvalidParameter, match=r"model: .*generation_config\.json"):
        build_execution(str(tmp_path), num_kv_blocks=8)


def test_offline_models_use_the_same_defaults(directory: Path) -> None:
    llm = LLM(str(directory), num_kv_blocks=8)
    assert llm.sampling_params(top_k=4) == SamplingParams(temperature=0.01, top_k=4, max_tokens=3)
    defaults = llm.generate("the quick", show_progress=False)[0].outputs[0]
    assert len(defaults.token_ids) <= 3
    own = LLM(str(directory), num_kv_blocks=8, generation_config="none")
    assert own.sampling_params() == SamplingParams()
