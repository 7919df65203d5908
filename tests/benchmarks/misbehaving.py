"""Parts of a run that end in every way. Without torch, which each of their processes would import."""

import os
import signal
import sys
from typing import Any

from benchmarks.gpu.parts import Absent, Options


def fine(_: Options, number: int) -> dict[str, Any]:
    return {"number": number}


def broken(_: Options) -> dict[str, Any]:
    raise ValueError("no such kernel")


def absent(_: Options) -> dict[str, Any]:
    raise Absent("not on this machine")


def killed(_: Options) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leaving(_: Options) -> dict[str, Any]:
    sys.exit(3)


def endless(_: Options) -> dict[str, Any]:
    signal.pause()
    return {}


def rated(_: Options) -> dict[str, Any]:
    return {"bytes_per_second": 5.0}


def rate(options: Options) -> dict[str, Any]:
    return {"rate": options.copy_rate}
