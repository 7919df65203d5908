"""Equal files have equal fingerprints; any change of a file changes the fingerprint."""

import shutil
from pathlib import Path

import pytest

from engine.checkpoint.fingerprint import fingerprint
from tests.tiny_models import save_model


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


def test_a_copy_has_the_same_fingerprint(tiny_llama: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(tiny_llama, tmp_path / "elsewhere")
    (copied / "README.md").write_text("not a part of the model")
    assert fingerprint(copied) == fingerprint(tiny_llama)
    assert len(fingerprint(copied)) == 32


def test_other_weights_of_the_same_shape_are_another_model(tiny_llama: Path, tmp_path: Path) -> None:
    assert fingerprint(save_model(tmp_path, seed=1)) != fingerprint(tiny_llama)


@pytest.mark.parametrize(
    "name", ["config.json", "chat_template.jinja", "tokenizer.json", "generation_config.json"]
)
def test_every_small_file_counts(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    copied = shutil.copytree(tiny_llama, tmp_path / "changed")
    (copied / name).write_text((copied / name).read_text() + " ")
    assert fingerprint(copied) != fingerprint(tiny_llama)


@pytest.mark.parametrize("name", ["qwen.tiktoken", "spiece.model"])
def test_a_vocabulary_file_of_any_format_counts(tmp_path: Path, name: str) -> None:
    before = fingerprint(tmp_path)
    (tmp_path / name).write_text("IQ== 0")
    assert fingerprint(tmp_path) != before


def test_a_large_file_is_sampled(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1_000_000))
    before = fingerprint(tmp_path)
    weights.write_bytes(bytes(999_999) + b"x")
    assert fingerprint(tmp_path) != before


def test_files_that_are_no_part_of_the_fingerprint(tiny_llama: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(tiny_llama, tmp_path / "copied")
    (copied / "notes.txt").mkdir()
    (copied / "gone.json").symlink_to("nowhere")
    assert fingerprint(copied) == fingerprint(tiny_llama)
