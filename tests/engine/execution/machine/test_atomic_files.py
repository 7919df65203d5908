"""Files are complete when they appear, and a failed write keeps the old file."""

from pathlib import Path

import pytest

from engine.execution.machine.atomic_files import written_atomically


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write_half(path: Path) -> None:
    with written_atomically(path) as unfinished:
        unfinished.write_text("half")
        raise OSError("the disk is full")


def test_a_file_appears_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with written_atomically(path) as unfinished:
        unfinished.write_text("half")
        assert not path.exists()
        unfinished.write_text("whole")
    assert path.read_text() == "whole"
    assert names(path.parent) == ["file"]


def test_an_existing_file_is_replaced_or_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(OSError, match="full"):
        write_half(path)
    assert path.read_text() == "before"
    with written_atomically(path) as unfinished:
        unfinished.write_text("after")
    assert path.read_text() == "after"
    assert names(tmp_path) == ["file"]


def test_a_directory_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with written_atomically(path) as unfinished:
        unfinished.mkdir()
        (unfinished / "weights").write_text("1 2 3")
        assert not path.exists()
    assert (path / "weights").read_text() == "1 2 3"
