"""A model is a local directory or a hub id."""

from pathlib import Path

import pytest

from engine.errors import InvalidParameter
from engine.execution.loading.model_files import find_model


def test_a_directory_is_used_directly(tiny_llama: Path) -> None:
    assert find_model(str(tiny_llama), lambda _: None) == tiny_llama


@pytest.mark.parametrize("source", ["/nowhere/at/all", "not a hub id", ""])
def test_invalid_sources(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidParameter, match="model: "):
        find_model(source, lambda _: None)


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    lines: list[str] = []
    with pytest.raises(InvalidParameter, match="neither a directory nor an available hub id"):
        find_model("nobody/has-this-model", lines.append)
    assert lines == ["looking for nobody/has-this-model on the hub and in its cache"]
