"""Which distribution this command comes from: `tokenmill`, or `tokenmill-client`, the client alone."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

SERVER, CLIENT = "tokenmill", "tokenmill-client"


def installed(version_of: Callable[[str], str] = version) -> dict[str, str]:
    """The versions of those that are installed, by name."""
    found = {}
    for name in (SERVER, CLIENT):
        try:
            found[name] = version_of(name)
        except PackageNotFoundError:
            continue
    return found


def conflict(versions: dict[str, str]) -> str | None:
    """A warning if both are installed: pip lets one overwrite the files of the other."""
    if len(versions) < 2:
        return None
    return (
        f"{SERVER} {versions[SERVER]} and {CLIENT} {versions[CLIENT]} are both installed and overwrite each"
        f" other's files: run pip uninstall {SERVER} {CLIENT}, and install one of them again"
    )
