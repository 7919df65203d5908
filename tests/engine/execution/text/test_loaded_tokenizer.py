"""A broken tokenizer, or one of another model, is refused at load."""

import json
import shutil
from pathlib import Path

import pytest

from engine.errors import InvalidParameter
from engine.execution.text.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_models import VOCAB_SIZE, make_tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_tokenizer_that_fits(directory: Path) -> None:
    assert load_tokenizer(directory, VOCAB_SIZE).vocab_size == VOCAB_SIZE
    # Embeddings are often padded.
    assert load_tokenizer(directory, VOCAB_SIZE + 64).vocab_size == VOCAB_SIZE


def test_ids_beyond_the_embedding(directory: Path) -> None:
    with pytest.raises(
        InvalidParameter,
        match=r"model: its tokenizer has token ids up to 319, but its embedding has 300 rows",
    ):
        load_tokenizer(directory, 300)


def test_an_added_token_without_an_embedding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gemma 3 1B has one for images; texts are served nevertheless."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path, VOCAB_SIZE).encode("<image>")[-1] == VOCAB_SIZE
    assert "the model has no embedding for <image>; prompts that contain them are refused" in caplog.text


def test_a_tokenizer_without_a_vocabulary(directory: Path) -> None:
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"] |= {"vocab": {}, "merges": []}
    values["added_tokens"] = []
    values["post_processor"] = None
    path.write_text(json.dumps(values))
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidParameter, match="turns text into no tokens"):
        load_tokenizer(directory, VOCAB_SIZE)


def test_a_chat_template_that_cannot_be_parsed(directory: Path) -> None:
    template = directory / "chat_template.jinja"
    template.write_text("{% if %}")
    with pytest.raises(InvalidParameter, match="model: its chat template cannot be parsed: Expected an expr"):
        load_tokenizer(directory, VOCAB_SIZE)
    # A template may refuse a chat.
    template.write_text("{{ raise_exception('a system message is needed') }}")
    assert load_tokenizer(directory, VOCAB_SIZE).has_chat_template


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", '{"model": {}, "version": "1.0"}', "has no usable tokenizer: "),
        ("tokenizer.json", '{"model": {"type": "BPE"}, "added_tokens": []}', "has no usable tokenizer: "),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["x.Y", null]}}',
            "it is defined by code in the checkpoint .auto_map., which is never run",
        ),
    ],
)
def test_files_that_the_library_cannot_load(directory: Path, name: str, content: str, message: str) -> None:
    """The message is one line."""
    (directory / name).write_text(content)
    with pytest.raises(InvalidParameter, match=message) as raised:
        Tokenizer.load(directory)
    assert "\n" not in str(raised.value)


def test_a_directory_without_tokenizer_files(directory: Path) -> None:
    """vllm#31444: the message blamed a library that was not needed."""
    empty = directory / "empty"
    empty.mkdir()
    shutil.copy(directory / "tokenizer_config.json", empty)
    with pytest.raises(
        InvalidParameter, match=r"no tokenizer files in .*/empty \(looked for tokenizer.json, "
    ):
        Tokenizer.load(empty)
