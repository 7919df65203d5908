"""A choice is remembered for those who ask under the same conditions, for a while, and nothing else is."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.execution.machine.autotune_cache import DISTURBED_SECONDS, KEPT_SECONDS, AutotuneCache, Facts

SURROUNDINGS: Facts = {"cpu": "one of a kind", "library": "operators-0123", "torch": "2.0"}
FACTS: Facts = {"weight": [8, 4], "dtype": "float32", "bias": None, "threads": 2, "ways": ("plain", "fast")}
CHOICE = ("plain", "fast", "fast")


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def choices(directory: Path, surroundings: Facts = SURROUNDINGS) -> AutotuneCache:
    return AutotuneCache(directory / "choices", surroundings)


def only_file(directory: Path) -> Path:
    (path,) = (directory / "choices").iterdir()
    return path


def test_another_start_finds_what_was_kept(tmp_path: Path) -> None:
    assert choices(tmp_path).find(FACTS) is None
    choices(tmp_path).keep(FACTS, CHOICE)
    assert choices(tmp_path).find(FACTS) == CHOICE


@pytest.mark.parametrize(
    "other",
    [{"weight": [4, 8]}, {"dtype": "bfloat16"}, {"bias": "float32"}, {"threads": 1}, {"ways": ("plain",)}],
)
def test_other_facts_have_no_choice_and_keep_their_own(other: Facts, tmp_path: Path) -> None:
    choices(tmp_path).keep(FACTS, CHOICE)
    assert choices(tmp_path).find({**FACTS, **other}) is None
    choices(tmp_path).keep({**FACTS, **other}, ("plain",))
    assert choices(tmp_path).find({**FACTS, **other}) == ("plain",)
    assert choices(tmp_path).find(FACTS) == CHOICE


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_other_surroundings_have_no_choice(name: str, tmp_path: Path) -> None:
    choices(tmp_path).keep(FACTS, CHOICE)
    assert choices(tmp_path, {**SURROUNDINGS, name: "another"}).find(FACTS) is None


@pytest.mark.parametrize(("is_disturbed", "seconds"), [(False, KEPT_SECONDS), (True, DISTURBED_SECONDS)])
def test_a_choice_ends_sooner_if_its_measuring_was_disturbed(
    is_disturbed: bool, seconds: float, tmp_path: Path
) -> None:
    clock = Clock()
    remembered = AutotuneCache(tmp_path / "choices", SURROUNDINGS, clock)
    remembered.keep(FACTS, CHOICE, is_disturbed=is_disturbed)
    clock.now += seconds - 1
    assert remembered.find(FACTS) == CHOICE
    clock.now += 2
    assert remembered.find(FACTS) is None
    remembered.keep(FACTS, ("plain",))
    assert remembered.find(FACTS) == ("plain",)


def test_a_choice_from_the_future_is_not_believed(tmp_path: Path) -> None:
    clock = Clock()
    remembered = AutotuneCache(tmp_path / "choices", SURROUNDINGS, clock)
    remembered.keep(FACTS, CHOICE)
    clock.now -= 1
    assert remembered.find(FACTS) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b'{"choice": ["plain"]}',
        b'{"facts": 0, "choice": ["plain"], "chosen_at": 0, "holds_seconds": 1e99}',
    ],
)
def test_what_is_damaged_or_not_ours_counts_as_nothing(content: bytes, tmp_path: Path) -> None:
    choices(tmp_path).keep(FACTS, CHOICE)
    only_file(tmp_path).write_bytes(content)
    assert choices(tmp_path).find(FACTS) is None
    choices(tmp_path).keep(FACTS, CHOICE)
    assert choices(tmp_path).find(FACTS) == CHOICE


@pytest.mark.parametrize(
    ("field", "value"), [("choice", 3), ("choice", None), ("chosen_at", "then"), ("holds_seconds", None)]
)
def test_a_field_of_another_kind_counts_as_nothing(field: str, value: object, tmp_path: Path) -> None:
    choices(tmp_path).keep(FACTS, CHOICE)
    path = only_file(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert choices(tmp_path).find(FACTS) is None


def test_the_file_of_other_facts_in_its_place_counts_as_nothing(tmp_path: Path) -> None:
    choices(tmp_path).keep(FACTS, CHOICE)
    path = only_file(tmp_path)
    choices(tmp_path).keep({**FACTS, "threads": 1}, ("plain",))
    (other,) = (one for one in path.parent.iterdir() if one != path)
    other.replace(path)
    assert choices(tmp_path).find(FACTS) is None


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "choices").write_text("a file where the directory should be")
    choices(tmp_path).keep(FACTS, CHOICE)
    assert choices(tmp_path).find(FACTS) is None


def test_who_keeps_and_finds_at_once_sees_whole_choices(tmp_path: Path) -> None:
    written = [("plain",) * count for count in range(1, 9)]

    def keep_and_find(choice: tuple[str, ...]) -> list[tuple[str, ...] | None]:
        remembered = choices(tmp_path)
        found = []
        for _ in range(20):
            remembered.keep(FACTS, choice)
            found.append(remembered.find(FACTS))
        return found

    with ThreadPoolExecutor(4) as pool:
        found = {one for many in pool.map(keep_and_find, written) for one in many}
    assert found <= set(written)
    assert only_file(tmp_path).suffix == ".json"
