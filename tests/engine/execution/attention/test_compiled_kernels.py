"""Resources of the compiled Triton kernels, without a GPU: see `compile_triton.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.execution.attention.compile_triton import (
    ARCHITECTURES,
    QUICK,
    SHAPES,
    cases,
    read_table,
    stale,
)
from tests.engine.execution.pools import ROOT

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes available to one program."""
TENSOR_CORES = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05"}
"""The matrix instructions of chunks in half precision."""
MOST_SPILLED = {100: 32}
"""Bytes of a thread that may be spilled: one kernel with every feature. Elsewhere none."""


def test_the_table_is_current() -> None:
    assert list(read_table()) == cases()
    assert stale() == [], "python -m tests.engine.execution.attention.compile_triton --write"


def test_a_change_of_a_kernel_makes_the_table_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "8B", SHAPES["8B"]._replace(group=5))
    assert {case[:2] for case in stale()} == {(arch, "8B") for arch in ARCHITECTURES}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_fit_into_registers_and_shared_memory(arch: int) -> None:
    rows = {case: row for case, row in read_table().items() if case[0] == arch}
    assert rows
    for (_, model, kernel), row in rows.items():
        assert int(row["shared"]) <= SHARED_MEMORY[arch], row
        if model.startswith("self-check"):
            # In float32, once, over a few tokens.
            continue
        assert int(row["spilled"]) <= MOST_SPILLED.get(arch, 0), row
        if kernel == "chunk":
            assert TENSOR_CORES[arch] in row["products"], row
        elif kernel in ("decode", "split"):
            assert "mma.sync" in row["products"], row


def test_kernels_compile_as_in_the_table(tmp_path: Path) -> None:
    """A selection that covers every kernel, architecture and dtype."""
    assert {arch for arch, _, _ in QUICK} == set(ARCHITECTURES)
    # The interpreter takes more than the compiler does.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.execution.attention.compile_triton"],
        cwd=ROOT,
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
