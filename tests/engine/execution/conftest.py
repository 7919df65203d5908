"""Model directories that several tests load."""

from pathlib import Path

import pytest

from tests.tiny_models import save_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny-llama")
