"""A file of the storage is visible with its whole content or not at all."""

from pathlib import Path

import pytest

from api.file_storage import FileStorage, UnusableStorage


@pytest.fixture(params=["directory", "objects"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> FileStorage:
    return FileStorage(str(tmp_path / "files") if request.param == "directory" else f"memory:/{tmp_path}")


def write(storage: FileStorage, name: str, content: bytes) -> None:
    with storage.create(name) as file:
        file.write(content)
        file.commit()


def test_a_committed_file_is_read(storage: FileStorage) -> None:
    write(storage, "a", b"one")

    with storage.open("a") as file:
        assert file.read() == b"one"
    assert storage.size("a") == 3
    assert list(storage.older_than(0)) == ["a"]
    assert list(storage.older_than(3600)) == []
    storage.delete("a")
    storage.delete("a")
    with pytest.raises(FileNotFoundError):
        storage.open("a")


def test_a_file_that_was_not_committed_is_not_there(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))
    with storage.create("a") as file:
        file.write(b"one")
        with pytest.raises(FileNotFoundError):
            storage.open("a")

    assert list(storage.older_than(0)) == []


def test_a_file_replaces_another_at_once(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))
    write(storage, "a", b"one")
    with storage.create("a") as file:
        file.write(b"two")
        with storage.open("a") as before:
            assert before.read() == b"one"
        file.commit()

    with storage.open("a") as after:
        assert after.read() == b"two"


def test_what_a_killed_process_left_is_found(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))
    with storage.create("a") as file:
        # As of a process that ends here.
        (part,) = tmp_path.iterdir()
        (tmp_path / f"{part.name}0").write_bytes(b"one")
        file.commit()
    storage.delete("a")

    (name,) = storage.older_than(0)
    assert name.startswith("a.part-")
    storage.delete(name)
    assert list(tmp_path.iterdir()) == []


def test_files_are_private(tmp_path: Path) -> None:
    write(FileStorage(str(tmp_path / "files")), "a", b"one")

    assert (tmp_path / "files").stat().st_mode & 0o077 == 0
    assert (tmp_path / "files" / "a").stat().st_mode & 0o077 == 0


def test_a_place_that_cannot_be_used_is_named() -> None:
    with pytest.raises(UnusableStorage, match="TOKENMILL_FILES_URL"):
        FileStorage("nonsense://bucket")
