"""Starts a room whose import of one module never ends, so that a test can send it a signal meanwhile.

The module's name is the gate. At it the main thread waits in native code that no signal interrupts, as a
library does that reads a checkpoint; the interpreter's lock is free.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
_PROGRAM = """
import ctypes, importlib.abc, os, runpy, sys
class Gate(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {gate!r}:
            print('at the gate', flush=True)
            mutex, native = ctypes.create_string_buffer(256), ctypes.CDLL(None)
            native.pthread_mutex_lock(mutex)
            native.pthread_mutex_lock(mutex)
sys.meta_path.insert(0, Gate())
if {as_first}:
    os.getpid = lambda: 1
sys.argv = [{room!r}, *{arguments!r}]
runpy.run_module({room!r}, run_name='__main__', alter_sys=True)
"""


def start_at_gate(
    room: str,
    gate: str,
    *,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
    as_first: bool = False,
) -> "subprocess.Popen[bytes]":
    """`python -m room`, at the gate. `within`: a command that starts the one that is appended to it.

    `as_first`: like process 1, it loses signals for which it has no handler, and takes itself for process 1.
    """
    program = _PROGRAM.format(gate=gate, room=room, arguments=list(arguments), as_first=as_first)
    # Children inherit an ignored signal, and a shell or an init process would not look at it again.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN) if as_first else None
    try:
        process = subprocess.Popen(
            [*within, sys.executable, "-P", "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            process_group=0,
        )
    finally:
        if as_first:
            signal.signal(signal.SIGTERM, before)
    assert process.stdout is not None
    while line := process.stdout.readline():
        if b"at the gate" in line:
            return process
    raise AssertionError(f"{room} ended with {process.wait()} before it came to {gate}")


def end(process: "subprocess.Popen[bytes]") -> None:
    """Nothing of it is left."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
