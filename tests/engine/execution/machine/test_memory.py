"""The free memory within the limits of machine, container and process."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.errors import InvalidParameter
from engine.execution.machine import memory

GIB = 1 << 30


def write_meminfo(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 4194304 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", directory / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", directory)


def test_available_memory_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_meminfo(tmp_path, monkeypatch)
    assert memory.free_bytes(torch.device("cpu")) == 4 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("12345\n")
    assert memory.free_bytes(torch.device("cpu")) == 4 * GIB


def test_the_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_meminfo(tmp_path, monkeypatch)
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{2 * GIB}\n")
    # A file that was read is counted as used, but given up when memory is wanted.
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 2}\n")
    assert memory.free_bytes(torch.device("cpu")) == GIB + GIB // 2


def test_the_limit_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -v` counts memory that is already mapped."""
    write_meminfo(tmp_path, monkeypatch)
    (tmp_path / "statm").write_text("1024 5 5 5 0 5 0\n")
    monkeypatch.setattr(memory, "_STATM", tmp_path / "statm")
    monkeypatch.setattr(resource, "getpagesize", lambda: 4096)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (GIB, GIB))
    assert memory.free_bytes(torch.device("cpu")) == GIB - (4 << 20)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, GIB))
    assert memory.free_bytes(torch.device("cpu")) == 0


def without_meminfo(directory: Path, monkeypatch: pytest.MonkeyPatch, sysconf: Callable[[str], int]) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", directory / "none")
    monkeypatch.setattr(memory, "_CGROUP", directory)
    monkeypatch.setattr(os, "sysconf", sysconf)


def test_a_system_without_proc_reports_its_total_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS reports the number of pages but not of free pages."""
    without_meminfo(
        tmp_path, monkeypatch, {"SC_PHYS_PAGES": 8 * GIB >> 14, "SC_PAGE_SIZE": 1 << 14}.__getitem__
    )
    assert memory.free_bytes(torch.device("cpu")) == 4 * GIB


def unknown_name(name: str) -> int:
    raise ValueError("unrecognized configuration name")


@pytest.mark.parametrize("sysconf", [unknown_name, lambda _: -1])
def test_a_system_that_does_not_report_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sysconf: Callable[[str], int]
) -> None:
    without_meminfo(tmp_path, monkeypatch, sysconf)
    with pytest.raises(InvalidParameter, match="num_kv_blocks: must be set here"):
        memory.free_bytes(torch.device("cpu"))
