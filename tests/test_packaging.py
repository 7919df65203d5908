"""No other package uses the generic folder names, and everything is installed."""

import tomllib
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = ["api", "engine", "monitoring", "tokenmill", "worker"]


@pytest.mark.parametrize("name", ROOMS)
def test_no_other_package_has_the_name(name: str) -> None:
    """Other packages are called `api` and `worker` too. Installed here, they would overwrite files."""
    spec = find_spec(name)

    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).parent == ROOT / name
    assert set(packages_distributions().get(name, [])) <= {"tokenmill"}


def test_every_folder_of_python_is_a_package() -> None:
    """A folder without __init__.py would work here, but not be installed."""
    folders = {source.parent for room in ROOMS for source in (ROOT / room).rglob("*.py")}

    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_scripts_of_the_protocol_are_included() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["tokenmill.protocol.store"]
    folder = ROOT / "tokenmill" / "protocol" / "store"
    included = {path for pattern in patterns for path in folder.glob(pattern)}

    assert included == {path for path in folder.rglob("*") if path.suffix == ".lua"}
    assert included


def test_the_sources_of_the_native_operators_are_included() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["engine.execution"]
    folder = ROOT / "engine" / "execution"
    included = {path for pattern in patterns for path in folder.glob(pattern)}

    assert included == {path for path in (folder / "native").iterdir() if path.is_file()}
    assert included


def test_the_files_of_the_page_are_included() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["api"]
    folder = ROOT / "api"
    included = {path for pattern in patterns for path in folder.glob(pattern)}

    assert included == {path for path in (folder / "page").rglob("*") if path.is_file()}
    assert included


def test_tests_are_no_package() -> None:
    """With an __init__.py, tests/engine would shadow the package `engine`."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_nothing_can_be_uploaded() -> None:
    assert "Private :: Do Not Upload" in PROJECT["project"]["classifiers"]


def pinned_versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, version in pins.items()}


def requirements() -> list[Requirement]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [*PROJECT["project"]["dependencies"], *(text for extra in extras for text in extra)]
    return [needed for needed in map(Requirement, wanted) if needed.name != "tokenmill"]


def test_the_constraints_satisfy_every_requirement() -> None:
    """Each requirement of the project is pinned to a version within its range."""
    versions = pinned_versions()

    for needed in requirements():
        assert needed.specifier.contains(versions[needed.name.lower()]), needed


def test_subclassed_and_patched_libraries_are_capped_at_the_tested_version() -> None:
    capped = {
        "redis", "rq", "flask", "flask-openapi3", "prometheus-client", "pydantic", "pydantic-settings",
        "torch", "transformers", "triton",
    }  # fmt: skip
    versions = pinned_versions()
    found = set()

    for needed in requirements():
        if needed.name in capped:
            found.add(needed.name)
            major, minor = versions[needed.name].split(".")[:2]
            assert not needed.specifier.contains(f"{major}.{int(minor) + 1}.0"), needed
    assert found == capped
