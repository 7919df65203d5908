"""On CUDA the fastest attention that can be had goes first; what is asked for by name is taken or refused."""

import logging
import sys

import pytest

from engine.errors import InvalidParameter
from engine.execution.loading.attention_backends import TORCH
from engine.execution.loading.cuda_backends import cuda_backends


def names(attention: str) -> list[str]:
    return [backend.name for backend in cuda_backends(attention, TORCH)]


def test_triton_goes_first(caplog: pytest.LogCaptureFixture) -> None:
    assert names("auto") == ["triton", "torch"]
    assert names("triton") == ["triton"]
    assert not caplog.records


def test_without_triton_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "engine.execution.attention.triton_backend", None)
    assert names("auto") == ["torch"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "not computed by Triton's kernels" in caplog.text
    with pytest.raises(InvalidParameter, match=r"attention: triton cannot be had: .*triton_attention"):
        names("triton")
