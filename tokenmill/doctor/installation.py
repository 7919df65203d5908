"""Checks Python, the packages and their versions."""

import sys
from importlib.metadata import PackageNotFoundError, version

from tokenmill.doctor.finding import Finding, fail, ok

INSTALL = "pip install 'tokenmill[serve]'"
PACKAGES = {
    "API": ("flask", "rq", "redis", "pydantic"),
    "worker": ("torch", "transformers", "numpy", "redis"),
}
OLDEST_PYTHON = (3, 11)


def check_installation() -> list[Finding]:
    return [_python(), *(_packages(part, names) for part, names in PACKAGES.items())]


def _python(found: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    shown = ".".join(map(str, found))
    if found < OLDEST_PYTHON:
        return fail("python", f"Python {shown}", "use Python 3.11 or newer")
    return ok("python", f"Python {shown}, tokenmill {_version('tokenmill') or _version('tokenmill-client')}")


def _packages(part: str, names: tuple[str, ...]) -> Finding:
    versions = {name: _version(name) for name in names}
    if missing := [name for name, found in versions.items() if found is None]:
        return fail(
            "packages",
            f"{', '.join(missing)} not installed, which the {part} needs",
            f"{INSTALL}; to use a service elsewhere they are not needed",
        )
    return ok("packages", f"{part}: " + ", ".join(f"{name} {found}" for name, found in versions.items()))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
