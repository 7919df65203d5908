"""Colour is an addition, and a reader that went away does not stop the processes that write."""

import io
import json
import sys

import pytest

from tokenmill.cli.console import LinePrinter, use_colour


@pytest.mark.parametrize(
    ("environ", "wanted"), [({}, None), ({"NO_COLOR": ""}, None), ({"NO_COLOR": "1"}, False)]
)
def test_no_color_is_respected(environ: dict[str, str], wanted: bool | None) -> None:
    assert use_colour(environ) is wanted


def test_lines_carry_the_name_of_their_process(capfd: pytest.CaptureFixture[str]) -> None:
    printer = LinePrinter(colour=False)

    printer("api", "listening")
    printer("", "alone")

    printer.flush()
    assert capfd.readouterr().out == "api    | listening\nalone\n"


def test_a_reader_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    printer = LinePrinter(colour=False)

    printer("api", "one")
    printer.flush()
    printer("api", "two")
    printer.flush()


def test_lines_of_json_have_the_name_of_their_process(capfd: pytest.CaptureFixture[str]) -> None:
    """Also what is not JSON: what a library prints, and the lines of `serve` itself."""
    printer = LinePrinter(colour=False, as_json=True)

    printer("worker-1", '{"event": "task ended", "process": "worker", "task": "t1"}')
    printer("api", "Segmentation fault")
    printer("api", "17")
    printer("", "ready")
    printer.flush()

    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert lines[0] == {"event": "task ended", "process": "worker-1", "task": "t1"}
    assert [(one["process"], one["event"]) for one in lines[1:]] == [
        ("api", "Segmentation fault"), ("api", "17"), ("serve", "ready")
    ]  # fmt: skip
