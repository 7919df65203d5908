"""Model directories that several tests load."""

import os
from pathlib import Path

# Before Triton is imported anywhere: kernels are then run on the CPU by its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from tests.tiny_models import save_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny-llama")
