"""A model has the same name in every process."""

from pathlib import Path

import pytest

from tokenmill.protocol.naming import DEFAULT_MODEL, is_path, served_model_name
from tokenmill.settings.declarations import ApiSettings, WorkerSettings


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (".", "here"),
        ("./", "here"),
        ("..", "above"),
        ("../", "above"),
        ("./tiny", "tiny"),
        ("./tiny/", "tiny"),
        ("tiny/", "tiny"),
        ("tiny/.", "tiny"),
        ("tiny/..", "here"),
        ("../tiny/../other", "other"),
        ("./link", "link"),
        ("~/tiny", "tiny"),
        ("/models/tiny//", "tiny"),
        ("a/b/c", "c"),
        ("/", "root"),
        ("owner/name", "owner/name"),
        ("gpt2", "gpt2"),
        (DEFAULT_MODEL, DEFAULT_MODEL),
    ],
)
def test_the_name_of_a_model(model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """imp#756, vllm#15439: `.` was served under the name `.`. A symbolic link keeps its own name."""
    here = tmp_path / "above" / "here"
    (here / "tiny").mkdir(parents=True)
    (here / "link").symlink_to("tiny")
    monkeypatch.chdir(here)
    assert served_model_name(model) == name
    environ = {"TOKENMILL_MODEL": model}
    assert ApiSettings.load(environ).public_model == name
    assert WorkerSettings.load(environ).public_model == name
    assert served_model_name(model, "mine") == "mine"


def test_paths_are_recognized() -> None:
    assert all(is_path(model) for model in (".", "./x", "/x", "~/x", "x/", "x/..", "x/y/z"))
    assert not any(is_path(model) for model in ("x", "x/y", "x.y", DEFAULT_MODEL))
