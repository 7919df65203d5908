"""`tokenmill-client` installs the package `tokenmill` alone, and is complete with its requirements.

It is built and installed without an index: the packages that it requires are linked from this environment.
"""

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.live_service import LiveService
from tests.tiny_models import save_model

ROOT = Path(__file__).parent.parent
SERVER = tomllib.loads((ROOT / "pyproject.toml").read_text())
CLIENT = tomllib.loads((ROOT / "distributions" / "client" / "pyproject.toml").read_text())
SERVER_ROOMS = ("api", "engine", "monitoring", "worker")
KEY = "a-key"

USERS_PROGRAM = """
import asyncio
import sys

from tokenmill import AsyncClient, Client
from tokenmill.client import NotFound, Task, TokenEvent


def blocking(url: str, key: str) -> str:
    with Client(url, key) as client:
        task: Task = client.submit("the quick brown fox", max_tokens=8, temperature=0, ignore_eos=True)
        text = ""
        for event in task.stream():
            if isinstance(event, TokenEvent):
                token: int = event.token
                assert token >= 0
            text += event.text
        done = task.result(timeout=600)
        assert done.usage is not None
        assert done.usage.completion_tokens == 8
        try:
            client.get("0" * 32)
        except NotFound as error:
            assert error.status in (404, 410)
        assert done.text == text
        return text


async def concurrent(url: str, key: str) -> str:
    async with AsyncClient(url, key) as client:
        task = await client.submit("the quick brown fox", max_tokens=8, temperature=0, ignore_eos=True)
        return "".join([event.text async for event in task.stream()])


texts = blocking(*sys.argv[1:]), asyncio.run(concurrent(*sys.argv[1:]))
assert texts[0] == texts[1]
print(texts[0])
"""

WRONG_PROGRAM = """
from tokenmill import Client

with Client() as client:
    client.submit("a", temprature=1)
    client.submit("a", max_tokens="five")
    number: int = client.get("a").text
    client.list(status="done")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because the build writes into its tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("tokenmill", "distributions"):
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, ignore=ignored, symlinks=True)
    shutil.copy(ROOT / "LICENSE", source)
    target = tmp_path_factory.mktemp("wheel")
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target)]
    succeed([sys.executable, "-m", "pip", "wheel", "-q", *options, str(source / "distributions" / "client")])
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and with what it requires, and nothing else."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, symlinks=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    for required in requirements_of(CLIENT["project"]["dependencies"]):
        link(required, packages)
    python = str(directory / "bin" / "python")
    options = ["--python", python, "--disable-pip-version-check"]
    succeed([sys.executable, "-m", "pip", *options, "install", "-q", "--no-index", str(wheel)])
    succeed([sys.executable, "-m", "pip", *options, "check"])
    return directory


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    model = save_model(tmp_path_factory.mktemp("model"))
    keys = {"TOKENMILL_API_KEYS": f"tests:{KEY}", "TOKENMILL_DTYPE": "float32"}
    with LiveService(model, tmp_path_factory.mktemp("service"), keys) as running:
        yield running


def requirements_of(needed: list[str]) -> list[Distribution]:
    """The distributions that the requirements lead to, in this environment."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(text) for text in needed]
    while waiting:
        requirement = waiting.pop()
        if requirement.name in found or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        found[requirement.name] = distribution(requirement.name)
        waiting += [Requirement(text) for text in found[requirement.name].requires or ()]
    return list(found.values())


def link(installed: Distribution, packages: Path) -> None:
    names = {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}
    for name in names:
        if not (packages / name).exists():
            (packages / name).symlink_to(Path(str(installed.locate_file(name))))


def run(environment: Path, *command: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program of the environment, in an empty directory and without this one's variables."""
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("TOKENMILL", "PY"))
    }
    program = str(environment / "bin" / command[0])
    return subprocess.run(
        [program, *command[1:]], capture_output=True, text=True, env=variables, timeout=300, **options
    )


def succeed(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_the_package_tokenmill_is_installed(environment: Path, tmp_path: Path) -> None:
    (packages,) = environment.glob("lib/python*/site-packages")
    own = {path.name for path in packages.iterdir() if not path.is_symlink()}
    assert own == {"tokenmill", f"tokenmill_client-{SERVER['project']['version']}.dist-info"}

    names = [*SERVER_ROOMS, "torch", "flask", "rq"]
    code = f"from importlib.util import find_spec; print([name for name in {names} if find_spec(name)])"
    assert run(environment, "python", "-c", code, cwd=tmp_path).stdout == "[]\n"


def test_every_module_can_be_imported(environment: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, pkgutil, tokenmill\n"
        "names = [one.name for one in pkgutil.walk_packages(tokenmill.__path__, 'tokenmill.')]\n"
        "for name in names:\n"
        "    if name != 'tokenmill.__main__':\n"
        "        importlib.import_module(name)\n"
        "print(len(names) > 50)"
    )
    done = run(environment, "python", "-c", code, cwd=tmp_path)
    assert done.stdout == "True\n", done.stderr


def test_a_users_program_calls_the_service(environment: Path, service: LiveService, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(USERS_PROGRAM)

    done = run(environment, "python", str(program), service.api_url, KEY, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    flags = ["--url", service.api_url, "--api-key", KEY, "--max-tokens", "8", "--temperature", "0"]
    streamed = run(
        environment, "tokenmill", "submit", "--stream", *flags, "the quick brown fox", cwd=tmp_path
    )
    assert streamed.returncode == 0, streamed.stderr


@pytest.mark.parametrize("command", ["serve", "api", "worker"])
def test_the_server_is_reported_as_missing(environment: Path, tmp_path: Path, command: str) -> None:
    done = run(environment, "tokenmill", command, cwd=tmp_path)

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "Error: the server is not installed: this is tokenmill-client, the client alone; in another"
        " environment, run pip install '.[serve]' in a checkout of Tokenmill\n"
    )


def test_the_version_is_that_of_the_client(environment: Path, tmp_path: Path) -> None:
    done = run(environment, "tokenmill", "--version", cwd=tmp_path)

    assert (done.stdout, done.stderr) == (f"tokenmill, version {CLIENT['project']['version']}\n", "")


def test_both_distributions_are_noticed(environment: Path, tmp_path: Path) -> None:
    """The server's metadata is enough: its files may have been overwritten."""
    server = tmp_path / "tokenmill-9.0.dist-info"
    server.mkdir()
    (server / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenmill\nVersion: 9.0\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); from tokenmill.entry import main; main()"

    done = run(environment, "python", "-c", code, "status", "--help", cwd=tmp_path)

    assert done.returncode == 0
    assert done.stderr.startswith("Warning: tokenmill 9.0 and tokenmill-client 0.1.0 are both installed")


def check_types(environment: Path, program: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    (directory / "program.py").write_text(program)
    python = str(environment / "bin" / "python")
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "program.py"],
        cwd=directory,
        capture_output=True,
        text=True,
    )


def test_a_users_program_is_typed(environment: Path, tmp_path: Path) -> None:
    done = check_types(environment, USERS_PROGRAM, tmp_path)

    assert done.returncode == 0, done.stdout


def test_wrong_calls_are_found_by_a_type_checker(environment: Path, tmp_path: Path) -> None:
    done = check_types(environment, WRONG_PROGRAM, tmp_path)

    assert [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line] == [
        "5",
        "6",
        "7",
        "8",
    ]


def test_the_distributions_agree() -> None:
    for name in ("version", "license", "requires-python", "dependencies", "scripts"):
        assert CLIENT["project"][name] == SERVER["project"][name], name
    packaged = SERVER["tool"]["setuptools"]["package-data"].items()
    own = {name: patterns for name, patterns in packaged if name.partition(".")[0] == "tokenmill"}
    assert CLIENT["tool"]["setuptools"]["package-data"] == own
    assert CLIENT["build-system"] == SERVER["build-system"]
