"""Compiles the native operators on the machine that runs them, once, into a cache directory.

A library's name is a hash of the sources, the compiler, its flags and the CPU's features, so another version
or another machine does not load it. Processes may build concurrently: a library is renamed when complete.
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
"""No -ffast-math: NaN must propagate and sums must keep their order. No -fopenmp: the caller passes a
function of torch's OpenMP runtime, so no second runtime is linked."""
COMPILERS = ("c++", "g++", "clang++")
BUILD_SECONDS = 300
"""Timeout of a compilation, which takes about ten seconds."""
_CPUINFO = Path("/proc/cpuinfo")


class CannotBuild(Exception):
    """The library or one of its operators cannot be used; the message is the reason."""


def built_library(cache_directory: Path, progress: Callable[[str], None]) -> Path:
    """The compiled library under `cache_directory`, built if absent. Raises `CannotBuild`."""
    compiler = find_compiler()
    library = cache_directory / "native" / f"operators-{_key(compiler)}.so"
    if library.exists():
        if _has_checksum(library):
            return library
        progress(f"{library} is damaged; compiling it again")
    build(compiler, library, progress)
    return library


def build(compiler: str, library: Path, progress: Callable[[str], None]) -> None:
    """Compile into `library`, replacing it. Raises `CannotBuild`."""
    progress("compiling the native operators; this takes some seconds, once")
    try:
        with written_atomically(library) as unfinished:
            _compile(compiler, unfinished)
            seal(unfinished)
    except OSError as error:
        raise CannotBuild(f"{library.parent} cannot be written: {error}") from error


def seal(library: Path) -> None:
    """Append a checksum, which the loader ignores, and flush the file to disk.

    A library truncated by a crash or a full disk can be opened, but accessing the missing part kills the
    process.
    """
    checksum = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as file:
        file.write(checksum)
        file.flush()
        os.fsync(file.fileno())


def _has_checksum(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def find_compiler() -> str:
    """The path of a C++ compiler: $CXX, or the first of `COMPILERS`. Raises `CannotBuild`."""
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        if found := shutil.which(name):
            return found
    tried = f"CXX is {named!r}" if named else f"tried {', '.join(COMPILERS)}"
    raise CannotBuild(f"no C++ compiler was found ({tried}); on Debian and Ubuntu: apt install g++")


def _compile(compiler: str, output: Path) -> None:
    sources = sorted(map(str, SOURCES.glob("*.cpp")))
    printed = _run([compiler, *compiler_flags(), *sources, "-o", str(output)])
    if not output.is_file():
        raise CannotBuild(f"{compiler} made no library: {printed}")


def compiler_flags() -> tuple[str, ...]:
    """`FLAGS`, then $CXXFLAGS, which take precedence: -march=x86-64-v3 builds for AVX2."""
    return (*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", "")))


def _run(command: list[str]) -> str:
    """The output of a command. Raises `CannotBuild`, with the end of the output, if it fails."""
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
    """A hash of everything that the library depends on."""
    key = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        key.update(f"{source.name}\0".encode() + source.read_bytes())
    key.update("\0".join([compiler, _run([compiler, "--version"]), *compiler_flags(), _cpu_facts()]).encode())
    return key.hexdigest()[:16]


def _cpu_facts() -> str:
    """Everything that -march=native depends on: architecture, CPU model and features."""
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
