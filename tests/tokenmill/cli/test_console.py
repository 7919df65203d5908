"""Colour is an addition, and a reader that went away does not stop the processes that write."""

import sys

import pytest

from tokenmill.cli.console import LinePrinter, use_colour


@pytest.mark.parametrize(
    ("environ", "wanted"), [({}, None), ({"NO_COLOR": ""}, None), ({"NO_COLOR": "1"}, False)]
)
def test_no_color_is_respected(environ: dict[str, str], wanted: bool | None) -> None:
    assert use_colour(environ) is wanted


def test_lines_carry_the_name_of_their_process(capsys: pytest.CaptureFixture[str]) -> None:
    printer = LinePrinter(colour=False)

    printer("api", "listening")
    printer("", "alone")

    assert capsys.readouterr().out == "api    | listening\nalone\n"


def test_a_reader_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        encoding = "utf-8"

        def write(self, _: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    printer = LinePrinter(colour=False)

    printer("api", "one")
    printer("api", "two")
