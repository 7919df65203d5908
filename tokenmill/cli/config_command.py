"""`tokenmill config show`: each setting, its value, and where the value comes from."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from tokenmill.cli.connection import json_flag
from tokenmill.cli.service_commands import setting_flags
from tokenmill.cli.text_streams import to_json, write_stdout
from tokenmill.protocol.redis_url import hide_password
from tokenmill.settings.declarations import ALL, ClientSettings, ServeSettings
from tokenmill.settings.setting import Purpose, Setting, to_text
from tokenmill.settings.sources import SettingsFile, find_file

MASK = "********"


class _EverySetting(ServeSettings, ClientSettings):
    """The settings of all commands."""


@click.group("config")
def config() -> None:
    """Show the settings.

    \b
    Examples:
      tokenmill config show
      tokenmill config show --changed
    """


@config.command()
@click.option("--changed", is_flag=True, help="only settings that are not at their defaults")
@json_flag
@setting_flags(_EverySetting)
def show(changed: bool, as_json: bool, config_file: str | None, **flags: str | None) -> None:
    """Show each setting, its value, and its source: a flag, the environment, the file, or the default.

    Secrets are masked. Values that cannot be used are reported as by the commands that read them.

    \b
    Examples:
      tokenmill config show
      tokenmill config show --changed
      TOKENMILL_PORT=8080 tokenmill config show --json
    """
    path = find_file(config_file, Path.cwd())
    file = SettingsFile(path, ALL) if path else None
    settings = _EverySetting.load(os.environ, flags, file)
    rows = [
        _row(one, getattr(settings, name), _source(one, flags, file))
        for name, one in _in_order()
        if not changed or name in settings.model_fields_set
    ]
    if as_json:
        write_stdout(to_json(rows))
    else:
        _print(rows)


def _in_order() -> list[tuple[str, Setting]]:
    purposes = list(Purpose)
    return sorted(ALL.items(), key=lambda item: purposes.index(item[1].purpose))


def _source(setting: Setting, flags: Mapping[str, object], file: SettingsFile | None) -> str:
    if flags.get(setting.name) is not None:
        return "flag"
    if os.environ.get(setting.variable, "").strip():
        return "environment"
    if file and setting.name in file.values:
        return str(file.path)
    return "default"


def _row(setting: Setting, value: object, source: str) -> dict[str, Any]:
    """The value as the environment carries it; of a default that is decided later, its words."""
    text = setting.shown_default if source == "default" else to_text(value)
    if setting.is_secret and source != "default":
        text = MASK
    elif setting.is_address:
        text = hide_password(text) if source != "default" else text
    return {
        "name": setting.name,
        "value": text,
        "source": source,
        "variable": setting.variable,
        "purpose": setting.purpose.value,
        "help": setting.help_text,
    }


def _print(rows: list[dict[str, Any]]) -> None:
    purpose = ""
    for row in rows:
        if row["purpose"] != purpose:
            purpose = row["purpose"]
            write_stdout(click.style(purpose, bold=True))
        is_default = row["source"] == "default"
        line = f"  {row['name']:<28} {row['value']:<44} {row['source']}"
        write_stdout(click.style(line, dim=is_default))
    if not rows:
        write_stdout("all settings are at their defaults")
