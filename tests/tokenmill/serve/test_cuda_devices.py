"""CUDA devices are counted from the driver's listing and the environment, as CUDA itself would."""

import os
import stat
import sys
from pathlib import Path

import pytest

from tokenmill.serve import cuda_devices
from tokenmill.serve.cuda_devices import find_cuda_devices, torch_has_cuda

TWO = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbb)
"""
DIVIDED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaa)
  MIG 3g.20gb     Device  0: (UUID: MIG-one)
  MIG 3g.20gb     Device  1: (UUID: MIG-two)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbb)
"""


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_devices, "torch_has_cuda", lambda: True)


@pytest.mark.parametrize(
    ("listing", "found"),
    [
        (TWO, ("GPU-aaa", "GPU-bbb")),
        (DIVIDED, ("MIG-one", "MIG-two", "GPU-bbb")),
        ("", ()),
        ("No devices found.\n", ()),
    ],
)
def test_devices_are_those_of_the_listing(listing: str, found: tuple[str, ...]) -> None:
    assert find_cuda_devices({}, lambda: listing) == found


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        ("", ()),
        ("1", ("1",)),
        ("1,0", ("1", "0")),
        (" 0 , 1 ", ("0", "1")),
        # CUDA ignores everything after an entry that names no device.
        ("0,-1,1", ("0",)),
        ("0,7,1", ("0",)),
        ("0,0", ("0",)),
        ("NoDevFiles", ()),
        ("GPU-bbb", ("GPU-bbb",)),
        ("MIG-x", ("MIG-x",)),
    ],
)
def test_the_environment_limits_the_devices(limit: str, found: tuple[str, ...]) -> None:
    assert find_cuda_devices({"CUDA_VISIBLE_DEVICES": limit}, lambda: TWO) == found


def test_the_environment_adds_no_device(tmp_path: Path) -> None:
    assert find_cuda_devices({"CUDA_VISIBLE_DEVICES": "0,1"}, lambda: None, tmp_path / "none") == ()
    assert find_cuda_devices({"CUDA_VISIBLE_DEVICES": "GPU-a"}, lambda: "") == ()


def test_without_the_program_the_driver_is_asked(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / name).mkdir()

    assert find_cuda_devices({}, lambda: None, tmp_path) == ("0", "1", "2")
    assert find_cuda_devices({"CUDA_VISIBLE_DEVICES": "2"}, lambda: None, tmp_path) == ("2",)


@pytest.mark.parametrize(("status", "found"), [(0, ("GPU-aaa", "GPU-bbb")), (9, ())])
def test_the_program_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, found: tuple[str, ...]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] || exit 3\ncat <<'END'\n{TWO}END\nexit {status}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    assert find_cuda_devices({}, proc=tmp_path / "none") == found


@pytest.mark.parametrize(
    ("record", "has_cuda"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
        ("cuda: Optional[str] = None\n", False),
        ("cuda = '12.8'\n", True),
        ("", False),
    ],
)
def test_torch_is_not_imported_to_know_its_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str, has_cuda: bool
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError\n")
    (tmp_path / "torch" / "version.py").write_text(record)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    assert torch_has_cuda() is has_cuda


def test_a_torch_without_cuda_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_devices, "torch_has_cuda", lambda: False)

    assert find_cuda_devices({}, lambda: TWO) == ()
