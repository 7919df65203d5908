"""Fixtures of the command's tests."""

from collections.abc import Iterator

import pytest

from tests.tokenmill.cli.fake_service import FakeService, running
from tokenmill.settings.declarations import ALL


@pytest.fixture
def service() -> Iterator[FakeService]:
    with running(FakeService()) as fake:
        yield fake


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """No setting is set, and the current directory has no file of settings."""
    for setting in ALL.values():
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.chdir(str(tmp_path))
