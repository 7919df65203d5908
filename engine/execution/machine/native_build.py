"""Compiles the native operators on the machine that runs them, once, into a cache directory.

Law: a library that is handed out is whole, and its name says what it was made of: the sources, the compiler,
its flags, and what this CPU can do. So another version or another machine never loads it, and processes that
build at once all get a whole one. This file does not know what the library does.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from engine.execution.machine.atomic_files import written_atomically

SOURCES = Path(__file__).parents[1] / "native"
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    "-fPIC", "-shared",
)  # fmt: skip
"""Not -ffast-math: a NaN must stay one, and a sum must keep its order. No -fopenmp either: the threads are
torch's, reached through a function that the caller hands over, so no second OpenMP runtime is linked."""
COMPILERS = ("c++", "g++", "clang++")
BUILD_SECONDS = 300
"""It takes about ten; a compiler that hangs must not hold a worker for ever."""
_CPUINFO = Path("/proc/cpuinfo")


class CannotBuild(Exception):
    """There is no library; the message says why."""


def built_library(cache_directory: Path, progress: Callable[[str], None]) -> Path:
    """The compiled library under `cache_directory`, made if it is not there. Raises `CannotBuild`."""
    compiler = find_compiler()
    library = native_directory(cache_directory) / f"operators-{_key(compiler)}.so"
    if library.exists():
        if _is_whole(library):
            return library
        progress(f"{library} is damaged; it is made again")
    build(compiler, library, progress)
    return library


def native_directory(cache_directory: Path) -> Path:
    """Where everything lies that was made for machines such as this one."""
    return cache_directory / "native"


def build(compiler: str, library: Path, progress: Callable[[str], None]) -> None:
    """Compile into `library`, whether it is there or not. Raises `CannotBuild`."""
    progress("compiling the native operators once, which takes some seconds")
    try:
        with written_atomically(library) as unfinished:
            _compile(compiler, unfinished)
            seal(unfinished)
    except OSError as error:
        raise CannotBuild(f"{library.parent} cannot be written: {error}") from error


def seal(library: Path) -> None:
    """Write a checksum behind the content, where no loader looks, and both to the disk.

    A library that a crash or a full disk cut short can be opened, and kills the process that touches what is
    missing.
    """
    checksum = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as file:
        file.write(checksum)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def find_compiler() -> str:
    """The path of a C++ compiler: the one that CXX names, or the first that is there."""
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        if found := shutil.which(name):
            return found
    wanted = f"CXX names {named!r}, which is not there" if named else f"none of {', '.join(COMPILERS)}"
    raise CannotBuild(f"no C++ compiler was found ({wanted}); on Debian and Ubuntu: apt install g++")


def _compile(compiler: str, output: Path) -> None:
    sources = sorted(map(str, SOURCES.glob("*.cpp")))
    said = _run([compiler, *compiler_flags(), *sources, "-o", str(output)])
    if not output.is_file():
        raise CannotBuild(f"{compiler} made no library: {said}")


def compiler_flags() -> tuple[str, ...]:
    """Tokenmill's flags, then those of CXXFLAGS, which win: -march=x86-64-v3 builds for AVX2 alone."""
    return (*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", "")))


def _run(command: list[str]) -> str:
    """What a command prints. Raises `CannotBuild` with the end of it if the command fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=BUILD_SECONDS,
            check=False,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]} could not be run: {error}") from error
    if done.returncode != 0:
        raise CannotBuild(f"{command[0]} failed with {done.returncode}: {done.stdout.strip()[-500:]}")
    return done.stdout


def _key(compiler: str) -> str:
    """What the library is made of, as a name."""
    key = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        key.update(f"{source.name}\0".encode() + source.read_bytes())
    key.update("\0".join([compiler, _run([compiler, "--version"]), *compiler_flags(), cpu_facts()]).encode())
    return key.hexdigest()[:16]


def cpu_facts() -> str:
    """What decides what -march=native means: the machine's kind, and the features and model of its CPU."""
    known = {"flags", "Features", "model name", "model", "cpu family", "CPU part"}
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        # A system without /proc, such as macOS.
        return f"{platform.machine()} {platform.processor()}"
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    return platform.machine() + "".join(
        sorted(name.strip() + value for name, value in facts.items() if name.strip() in known)
    )
