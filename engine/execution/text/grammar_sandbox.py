"""A grammar is tried out in another process before this one touches it.

Law: a grammar that would take all memory, all time, or the process itself, takes the child with it. Run as a
program, this file is the child: it compiles what it is given over single bytes, which costs about what it
costs over a model's tokens. Imports nothing of ours, so that the child starts fast.
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

# The library's defaults, but for fewer items and states: the worst step stays below some tenth of a second,
# and the automaton of one output below some 40 MB.
LIMITS = LLParserLimits(step_max_items=10_000, max_lexer_states=20_000, verbose_errors=False)
TOO_LARGE = "the grammar is too large to compile; simplify it"


class GrammarSandbox:
    """Children that compile one grammar at a time; as many as there are calls at once, kept for the next.

    A child ends when it is asked for more than `seconds` or `max_bytes` of address space, and with whoever
    started it.
    """

    def __init__(self, seconds: float, max_bytes: int = 1 << 30) -> None:
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._idle: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _end_all, self._idle)

    def error_of(self, lark: str) -> str:
        """What is wrong with a grammar: the library's error, or that it costs too much; empty if nothing.

        Any thread may call.
        """
        child = self._take()
        answer = _ask(child, lark)
        if answer is not None:
            self._idle.append(child)
            return answer
        _end_all([child])
        if child.returncode == -signal.SIGPROF:
            return f"the grammar took more than {self._seconds:g} seconds to compile; simplify it"
        return TOO_LARGE

    def _take(self) -> "subprocess.Popen[bytes]":
        while True:
            try:
                child = self._idle.pop()
            except IndexError:
                return self._start()
            # One that somebody else has ended says nothing about the next grammar.
            if child.poll() is None:
                return child
            _end_all([child])

    def _start(self) -> "subprocess.Popen[bytes]":
        # -P: not our folder in front of the path, where names of libraries would be found.
        return subprocess.Popen(
            [sys.executable, "-P", __file__, str(self._seconds), str(self._max_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in a terminal is for the service, which then ends its children.
            start_new_session=True,
        )


def _ask(child: "subprocess.Popen[bytes]", lark: str) -> str | None:
    """The child's answer; None if it ended instead."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        _say(child.stdin, lark)
    except OSError:
        return None
    line = child.stdout.readline()
    return str(json.loads(line)) if line else None


def _end_all(children: "list[subprocess.Popen[bytes]]") -> None:
    for child in children:
        # What its end of the pipe would still take is lost on purpose.
        with suppress(OSError), child:
            child.kill()


def _say(file: IO[bytes], text: str) -> None:
    file.write(json.dumps(text).encode() + b"\n")
    file.flush()


def main() -> None:
    """The child: for each line of JSON, a grammar, such a line with its error or an empty string."""
    seconds, max_bytes = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin.buffer:
        # Nobody handles this signal: it ends the process, also inside the library and without a parent.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _say(sys.stdout.buffer, matcher.get_error())


if __name__ == "__main__":
    main()
