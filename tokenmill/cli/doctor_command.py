"""`tokenmill doctor`: checks this machine and its settings before a start, or when something is wrong."""

import os
from collections.abc import Iterator
from dataclasses import asdict

import click

from tokenmill.cli.connection import json_flag
from tokenmill.cli.service_commands import load_settings, setting_flags
from tokenmill.cli.text_streams import to_json, write_stdout
from tokenmill.doctor.examination import examine
from tokenmill.doctor.finding import Finding
from tokenmill.settings.declarations import ServeSettings

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@json_flag
@setting_flags(ServeSettings)
@click.pass_context
def doctor(ctx: click.Context, /, config_file: str | None, as_json: bool, **flags: str | None) -> None:
    """Check what the service needs: packages, settings, Redis, device, model, ports, disk, clock.

    Each line says ok, warn or fail, and below it how to mend what is wrong. Takes the flags of `serve`.
    The exit code is 1 if something failed.

    \b
    Examples:
      tokenmill doctor
      tokenmill doctor --model ./my-model --port 8080
      tokenmill doctor --json
    """
    found = examine(lambda: load_settings(ServeSettings, flags, config_file), os.environ)
    findings = list(found if as_json else _printed(found))
    failed = sum(finding.state == "fail" for finding in findings)
    if as_json:
        write_stdout(to_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]}))
    elif failed:
        write_stdout(f"\n{failed} of {len(findings)} checks failed")
    ctx.exit(1 if failed else 0)


def _printed(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Print each as it comes: some take seconds."""
    for finding in findings:
        state = click.style(f"{finding.state:<4}", fg=_COLOURS[finding.state], bold=finding.state == "fail")
        write_stdout(f"{state}  {finding.subject:<9} {finding.text}")
        if finding.remedy:
            write_stdout(f"{'':<16}-> {finding.remedy}")
        yield finding
