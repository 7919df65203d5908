"""Compiles grammars in child processes first, so that a hostile one cannot harm this process.

A grammar that exhausts memory or time, or crashes the library, ends the child only. Run as a program, this
file is the child. It compiles over single bytes, which costs about as much as over a model's tokens. It
imports nothing of this project, so that the child starts fast.
"""

import json
import resource
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from typing import IO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# The library's defaults with fewer items and states: a step takes about 0.1 seconds at most, the automaton of
# one output about 40 MB.
LIMITS = LLParserLimits(step_max_items=10_000, max_lexer_states=20_000, verbose_errors=False)
TOO_LARGE = "the grammar is too large to compile; simplify it"


class GrammarSandbox:
    """A pool of children, each of which compiles one grammar at a time; it grows with concurrent calls.

    A child ends if a grammar takes more than `seconds` of CPU time or `max_bytes` of address space, and with
    its parent.
    """

    def __init__(self, seconds: float, max_bytes: int = 1 << 30) -> None:
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._idle: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _end_all, self._idle)

    def error_of(self, lark: str) -> str:
        """The library's error, or that the grammar costs too much; empty for a good grammar. Thread-safe."""
        child = self._acquire()
        answer = _ask(child, lark)
        if answer is not None:
            self._idle.append(child)
            return answer
        _end_all([child])
        if child.returncode == -signal.SIGPROF:
            return f"the grammar took more than {self._seconds:g} seconds to compile; simplify it"
        return TOO_LARGE

    def _acquire(self) -> "subprocess.Popen[bytes]":
        while True:
            try:
                child = self._idle.pop()
            except IndexError:
                return self._start()
            # A child that was killed meanwhile says nothing about this grammar.
            if child.poll() is None:
                return child
            _end_all([child])

    def _start(self) -> "subprocess.Popen[bytes]":
        # -P: this folder is not on the import path, where it would shadow libraries.
        return subprocess.Popen(
            [sys.executable, "-P", __file__, str(self._seconds), str(self._max_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in a terminal reaches the service only, which ends its children.
            start_new_session=True,
        )


def _ask(child: "subprocess.Popen[bytes]", lark: str) -> str | None:
    """The child's answer; None if it ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        _write_line(child.stdin, lark)
    except OSError:
        return None
    line = child.stdout.readline()
    return str(json.loads(line)) if line else None


def _end_all(children: "list[subprocess.Popen[bytes]]") -> None:
    for child in children:
        # Unwritten input is dropped.
        with suppress(OSError), child:
            child.kill()


def _write_line(file: IO[bytes], text: str) -> None:
    file.write(json.dumps(text).encode() + b"\n")
    file.flush()


def main() -> None:
    """The child: reads grammars, one JSON string a line, and writes the error of each, or an empty string."""
    seconds, max_bytes = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin.buffer:
        # The signal has no handler and ends the process, also inside the library.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write_line(sys.stdout.buffer, matcher.get_error())


if __name__ == "__main__":
    main()
