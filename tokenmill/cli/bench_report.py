"""Writes the report of a load: a table for people, JSON for programs, a page with plots."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from tokenmill.bench.figures import per_request
from tokenmill.bench.outcomes import Load
from tokenmill.bench.page import report_page
from tokenmill.bench.tables import figure_tables
from tokenmill.cli.console import terminal
from tokenmill.cli.text_streams import to_json, write_stdout


def write_report(
    head: Mapping[str, str],
    figures: Mapping[str, Any],
    load: Load,
    *,
    json_file: str | None,
    html_file: str | None,
) -> None:
    """`head`: server, backend, model and load. Raises `click.FileError` if a file cannot be written."""
    fields = {
        "tokenmill": version("tokenmill"),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **head,
        **figures,
        "per_request": per_request(load),
    }
    tables = figure_tables(head, figures)
    if json_file == "-":
        write_stdout(to_json(fields))
    else:
        _print_tables(tables)
    if json_file not in (None, "-"):
        _write(str(json_file), json.dumps(fields, indent=2) + "\n")
    if html_file:
        _write(html_file, report_page(f"{head['model']}: {head['load']}", tables, load))


def _print_tables(tables: list[list[list[str]]]) -> None:
    console = terminal()
    for heading, *rows in tables:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for number, name in enumerate(heading):
            table.add_column(name, justify="left" if number == 0 or len(heading) < 4 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table, "")


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise click.FileError(path, error.strerror) from None
