"""Steps of a worker in the Trace Event Format (Chrome, Perfetto)."""

from collections.abc import Iterable
from typing import Any

MICROSECONDS = 1e6


def trace_of(steps: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One slice for each step on thread 0, counters, and one thread for each named sequence.

    Consecutive steps of one state make one slice. Sequences without an id are left out.
    """
    events: list[dict[str, Any]] = [_thread_name(0, "steps")]
    threads: dict[tuple[str, int], int] = {}
    open_slices: dict[int, dict[str, Any]] = {}
    for step in steps:
        seconds = step["seconds"]["total"]
        begin, duration = (step["at"] - seconds) * MICROSECONDS, seconds * MICROSECONDS
        events.append(_slice(0, f"step {step['step']}", begin, duration, step["budget"] | step["seconds"]))
        events.append(_counter("tokens", begin, {"used": step["budget"]["used"]}))
        events.append(_counter("KV blocks", begin, {"used": step["kv"]["used"]}))
        for lane in step["lanes"]:
            if lane["task"] is None:
                continue
            name = (lane["task"], lane["index"])
            if name not in threads:
                threads[name] = len(threads) + 1
                events.append(_thread_name(threads[name], f"{lane['task']} [{lane['index']}]"))
            thread = threads[name]
            current = open_slices.get(thread)
            if current and current["name"] == lane["state"]:
                current["dur"] = begin + duration - current["ts"]
            else:
                current = _slice(thread, lane["state"], begin, duration, {"reason": lane["reason"]})
                open_slices[thread] = current
                events.append(current)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(thread: int, name: str, begin: float, duration: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": begin, "dur": duration, "args": args}


def _counter(name: str, begin: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "C", "pid": 1, "tid": 0, "name": name, "ts": begin, "args": args}


def _thread_name(thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}}
