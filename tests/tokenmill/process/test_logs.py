"""One pipeline for structlog and `logging`: one event is one line, in the form that the settings name."""

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import logging, threading, warnings
import structlog
from tokenmill.process import logs
logs.start("worker")
logs.bind(worker="w1")
log = structlog.get_logger("one")
"""


def run(code: str, **environ: str) -> list[str]:
    """The lines that a process with this code logs."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + code + "\nlogs.flush()"], env=environ, capture_output=True, text=True
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def events(code: str, **environ: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(code, TOKENMILL_LOG_FORMAT="json", **environ)]


def test_a_line_of_json_has_the_fields_of_the_event_and_of_its_process() -> None:
    (event,) = events("log.info('task ended', task='t1', tokens=3)")

    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "event": "task ended", "level": "info", "logger": "one", "process": "worker",
        "task": "t1", "tokens": 3, "worker": "w1",
    }  # fmt: skip


def test_lines_of_libraries_have_the_same_form() -> None:
    (event,) = events("logging.getLogger('engine.x').warning('step %d failed', 3)")

    assert (event["event"], event["level"], event["logger"]) == ("step 3 failed", "warning", "engine.x")
    assert event["process"] == "worker"


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("", ["info", "warning", "error"]),
        ("nonsense", ["info", "warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_the_level_holds_for_both(level: str, shown: list[str]) -> None:
    both = "for name in ('debug', 'info', 'warning', 'error'): getattr(log, name)('x'); "
    both += "getattr(logging.getLogger('y'), name)('y')"

    found = events(both, TOKENMILL_LOG_LEVEL=level)

    assert [one["level"] for one in found if one["event"] == "x"] == shown
    assert [one["level"] for one in found if one["event"] == "y"] == shown


def test_chatty_libraries_are_heard_from_warnings_on() -> None:
    code = "[logging.getLogger(name).info('x') for name in ('httpx', 'rq', 'transformers', 'urllib3.pool')]"
    assert events(code, TOKENMILL_LOG_LEVEL="debug") == []


def test_a_traceback_is_part_of_its_event() -> None:
    code = "try: 1 / 0\nexcept ZeroDivisionError: log.exception('failed', task='t1')"
    (event,) = events(code)
    assert (event["event"], event["task"]) == ("failed", "t1")
    assert "ZeroDivisionError" in event["exception"]


def test_an_uncaught_exception_of_a_thread_names_its_task() -> None:
    code = """
def work():
    structlog.contextvars.bind_contextvars(task="t1")
    raise ValueError("broken")
thread = threading.Thread(target=work, name="webhook")
thread.start()
thread.join()
"""
    (event,) = events(code)

    assert (event["event"], event["thread"]) == ("uncaught exception in a thread", "webhook")
    assert event["task"] == "t1"
    assert "ValueError: broken" in event["exception"]


def test_an_uncaught_exception_is_one_event() -> None:
    (event,) = events("raise ValueError('broken')")
    assert (event["level"], event["event"]) == ("critical", "uncaught exception")
    assert "ValueError: broken" in event["exception"]


def test_a_value_cannot_begin_a_line_of_its_own() -> None:
    (line,) = run("log.info('call', path='/a\\n2026 [error] forged\\x1b[31m')")
    assert "path='/a\\\\n2026" in line or "path=/a\\n2026" in line
    assert "\x1b" not in line


def test_warnings_of_libraries_are_details() -> None:
    assert events("warnings.warn('old')") == []
    (event,) = events("warnings.warn('old')", TOKENMILL_LOG_LEVEL="debug")
    assert "UserWarning: old" in event["event"]


def test_a_closed_standard_error_stops_nothing() -> None:
    code = (
        PROGRAM
        + "import os; os.close(2); [log.critical('x') for _ in range(3)]; logs.flush(); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "alive\n"
