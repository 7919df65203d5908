"""What a check has found."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`subject`: what was checked. `remedy`: how to mend it; "" if nothing is wrong."""

    subject: str
    state: State
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    return Finding(subject, "ok", text)


def warn(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, "warn", text, remedy)


def fail(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, "fail", text, remedy)


def human_bytes(count: float) -> str:
    """As 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
