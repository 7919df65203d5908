"""Finds environment variables that are not settings, and suggests the setting with the nearest name."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from tokenmill.settings.setting import PREFIX


def unknown_variables(names: Iterable[str], known: Collection[str]) -> list[str]:
    """The environment variables of `names` with Tokenmill's prefix that are not in `known`."""
    return sorted(name for name in names if name.startswith(PREFIX) and name not in known)


def warnings(names: Iterable[str], known: Collection[str]) -> list[str]:
    """A line for each unknown variable, with the nearest known one."""
    return [
        f"{name} is not a setting and is ignored{nearest(name, known, PREFIX)}"
        for name in unknown_variables(names, known)
    ]


def nearest(name: str, known: Collection[str], prefix: str = "") -> str:
    """`; did you mean NAME?`, or "" if no known name is close. A common `prefix` brings no name closer."""
    near = get_close_matches(
        name.removeprefix(prefix), sorted(each.removeprefix(prefix) for each in known), n=1, cutoff=0.7
    )
    return f"; did you mean {prefix}{near[0]}?" if near else ""
