"""llguidance and xgrammar side by side: how fast, how strict, how safe. Runs with whichever is installed.

    python -m benchmarks.grammars MODEL_DIRECTORY [RESULT.json]

Both get the same tokens as bytes and take turns. Hostile cases run in a process of their own.
"""

import gc
import json
import os
import resource
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grammar_cases import BAD, CASES, FEATURES, HOSTILE, Case
from benchmarks.grammar_libraries import Library, has, installed
from engine.execution.text.tokenizer import Tokenizer

REPEATS = 3
CHILD_SECONDS = 20
CHILD_BYTES = 4 << 30


def load(directory: str) -> tuple[Tokenizer, list[bytes]]:
    """The tokenizer, and its tokens as bytes with one more for the end."""
    tokenizer = Tokenizer.load(Path(directory))
    special = tokenizer.special_ids
    tokens = [b"" if one in special else tokenizer.token_bytes(one) for one in range(tokenizer.vocab_size)]
    return tokenizer, [*tokens, b"</end>"]


def speed(libraries: list[Library], tokenizer: Tokenizer) -> dict[str, Any]:
    """For each case and library: milliseconds to compile, and microseconds per mask."""
    rows: dict[str, Any] = {}
    for case in CASES:
        for library in libraries * REPEATS:
            row = rows.setdefault(case.name, {}).setdefault(library.name, {"compile": [], "mask": []})
            _measure(library, case, tokenizer.encode(case.text), row)
        rows[case.name] = {name: _summary(row) for name, row in rows[case.name].items()}
        print(case.name, rows[case.name])
    return rows


def _measure(library: Library, case: Case, token_ids: list[int], row: dict[str, Any]) -> None:
    try:
        start = time.perf_counter()
        factory = library.compile(case.kind, case.grammar)
        row["compile"].append(time.perf_counter() - start)
        matcher = factory()
        for token_id in token_ids:
            start = time.perf_counter()
            mask = matcher.fill()
            row["mask"].append(time.perf_counter() - start)
            if not has(mask, token_id) or not matcher.accept(token_id):
                raise ValueError(f"token {token_id} of a valid text is not allowed")
        if not matcher.may_end():
            raise ValueError("a valid text may not end")
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the result
        row["error"] = str(error).strip()[:200]


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    if "error" in row:
        return {"error": row["error"]}
    masks = sorted(row["mask"])
    return {
        "compile_ms": round(statistics.median(row["compile"]) * 1e3, 2),
        "mask_us_median": round(statistics.median(masks) * 1e6, 1),
        "mask_us_p99": round(masks[int(len(masks) * 0.99)] * 1e6, 1),
        "mask_us_max": round(masks[-1] * 1e6, 1),
    }


def verdict(library: Library, kind: str, grammar: str, forbidden: str | None = None) -> str:
    """ "refused" for a grammar that does not compile; else whether it is "enforced" or "ignored"."""
    try:
        matcher = library.compile(kind, grammar)()
        if forbidden is None:
            return "accepted" if matcher.fill().any() else "accepted, allows nothing"
    except Exception:  # noqa: BLE001 - whatever a library raises is the result
        return "refused"
    tokens = {bytes([byte]): token_id for byte, token_id in _byte_ids.items()}
    accepted = all(matcher.accept(tokens[bytes([byte])]) for byte in forbidden.encode())
    return "ignored" if accepted and matcher.may_end() else "enforced"


_byte_ids: dict[int, int] = {}


def longest_pause(library: Library) -> float:
    """Milliseconds for which another thread is blocked while the largest schema compiles."""
    case = next(case for case in CASES if case.name == "120 fields")
    done, pauses = threading.Event(), [0.0]

    def tick() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.0002)
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    for _ in range(REPEATS):
        library.compile(case.kind, case.grammar)
    done.set()
    thread.join()
    return round(max(pauses) * 1e3, 1)


def memory(library: Library) -> dict[str, float]:
    """MB that 200 schemas take, while kept and after."""
    before = _resident()
    kept = []
    for index in range(200):
        schema = json.loads(next(case.grammar for case in CASES if case.name == "nested"))
        schema["properties"][f"extra_{index}"] = {"type": "string"}
        kept.append(library.compile("json", json.dumps(schema)))
    full = _resident()
    kept.clear()
    gc.collect()
    return {"kept": round(full - before, 1), "dropped": round(_resident() - before, 1)}


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def hostile(library: Library, kind: str, grammar: str) -> str:
    """Compile, then draw 200 tokens; runs in a process of its own."""
    before, start = _resident(), time.perf_counter()
    slowest, outcome, draw = 0.0, "served", np.random.default_rng(0)
    try:
        matcher = library.compile(kind, grammar)()
        compiled = time.perf_counter() - start
        for _ in range(200):
            begin = time.perf_counter()
            mask = matcher.fill()
            slowest = max(slowest, time.perf_counter() - begin)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
            token_id = int(draw.choice(allowed)) if len(allowed) else library.eos
            if token_id == library.eos or not matcher.accept(token_id):
                break
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the result
        compiled, outcome = time.perf_counter() - start, f"refused: {str(error).strip()[:60]!r}"
    peak = max(0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before)
    return f"{outcome}; compiled in {compiled:.2f} s, slowest mask {slowest * 1e3:.1f} ms, {peak:.0f} MB more"


def in_fork(function: Callable[[], Any]) -> Any:
    """The result of a function in a forked process with limits, or how the process ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
        signal.alarm(CHILD_SECONDS)
        os.write(writer, json.dumps(function()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        answer = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGALRM:
        return f"not done after {CHILD_SECONDS} s"
    return json.loads(answer) if answer and not status else f"ended the process: {status}"


def size(library: Library) -> dict[str, Any]:
    """Installed MB of the library and of its own dependencies, and its requirements."""
    total, needs = 0, []
    for package in library.packages:
        try:
            files = distribution(package).files or []
            total += sum(
                Path(file.locate()).stat().st_size for file in files if Path(file.locate()).is_file()
            )
            needs += [one for one in distribution(package).requires or [] if "extra ==" not in one]
        except PackageNotFoundError:
            needs.append(f"{package} (missing)")
    version = distribution(library.packages[0]).version
    return {"version": version, "mb": round(total / 2**20, 1), "requires": needs}


def main(directory: str, result: str | None = None) -> None:
    tokenizer, tokens = load(directory)
    _byte_ids.update({token[0]: token_id for token_id, token in enumerate(tokens) if len(token) == 1})
    libraries = installed(tokens)
    report: dict[str, Any] = {"speed": speed(libraries, tokenizer)}
    report["features"] = {
        name: {
            one.name: in_fork(partial(verdict, one, "json", json.dumps(schema), text)) for one in libraries
        }
        for name, (schema, text) in FEATURES.items()
    }
    report["bad"] = {
        name: {one.name: in_fork(partial(verdict, one, *bad)) for one in libraries}
        for name, bad in BAD.items()
    }
    report["longest_pause_ms"] = {one.name: longest_pause(one) for one in libraries}
    report["size"] = {one.name: size(one) for one in libraries}
    report["memory_mb"] = {one.name: in_fork(partial(memory, one)) for one in libraries}
    report["hostile"] = {
        name: {one.name: in_fork(partial(hostile, one, *case)) for one in libraries}
        for name, case in HOSTILE.items()
    }
    text = json.dumps(report, indent=1, ensure_ascii=False)
    print(text)
    if result:
        Path(result).write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
