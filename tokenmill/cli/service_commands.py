"""`tokenmill serve`, `worker` and `api`: start processes, with every setting as a flag."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from tokenmill.cli.console import LinePrinter, use_colour
from tokenmill.process.startup_signals import blocked_signals
from tokenmill.protocol.redis_url import hide_password
from tokenmill.serve.checks import check_server
from tokenmill.serve.service import process_command
from tokenmill.serve.service import serve as run_service
from tokenmill.serve.state_directory import StateDirectory
from tokenmill.settings.declarations import (
    ALL,
    ApiCommandSettings,
    ServeSettings,
    StateSettings,
    WorkerCommandSettings,
)
from tokenmill.settings.setting import Purpose, Setting, settings_of
from tokenmill.settings.sources import Settings, SettingsFile, find_file

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Settings = TypeVar("_Settings", bound=Settings)
_METAVARS: dict[object, str] = {int: "NUMBER", float: "NUMBER", bool: "true|false"}


def setting_flags(settings_class: type[Settings]) -> Callable[[_Command], _Command]:
    """A flag for each setting of the class, by purpose, and --config."""
    purposes = list(Purpose)
    declared = sorted(settings_of(settings_class).values(), key=lambda one: purposes.index(one.purpose))

    def decorate(command: _Command) -> _Command:
        for setting in reversed(declared):
            command = _flag(setting)(command)
        return click.option(
            "--config", "config_file", metavar="FILE", help="TOML file of settings [default: tokenmill.toml]"
        )(command)

    return decorate


def _flag(setting: Setting) -> Callable[[_Command], _Command]:
    metavar = "|".join(setting.words) or _METAVARS.get(setting.kind, "TEXT")
    help_text = f"{setting.help_text} [{setting.variable}; default: {setting.shown_default}]"
    return click.option(setting.flag, setting.name, metavar=metavar, help=help_text)


def load_settings(
    settings_class: type[_Settings], flags: Mapping[str, Any], config_file: str | None
) -> _Settings:
    """The settings of this command line. Raises `SettingError`."""
    path = find_file(config_file, Path.cwd())
    return settings_class.load(os.environ, flags, SettingsFile(path, ALL) if path else None)


def state_of(settings: StateSettings) -> StateDirectory:
    return StateDirectory(Path(settings.state_dir))


@click.command()
@setting_flags(ServeSettings)
def serve(config_file: str | None, **flags: str | None) -> None:
    """Run everything: Redis, the API, and one worker for each CUDA device, or one on the CPU.

    Uses the Redis server that REDIS_URL names, else starts one of its own with its data in .tokenmill/, so
    that unfinished tasks resume at the next start. Ctrl-C stops the API, the workers and Redis in that order;
    a worker finishes what it can within the grace period. A second Ctrl-C ends the API and makes the workers
    return unfinished tasks, a third kills what is left. No accepted task is lost.

    \b
    Examples:
      tokenmill serve
      tokenmill serve --model ./my-model --port 8080
      tokenmill serve --workers 2 --metrics-port 9400
      TOKENMILL_MAX_NUM_SEQS=16 tokenmill serve
      REDIS_URL=redis://localhost:6379/0 tokenmill serve
    """
    settings = load_settings(ServeSettings, flags, config_file)
    printer = LinePrinter(use_colour(), as_json=settings.log_format == "json")
    try:
        run_service(state_of(settings), settings, os.environ, printer)
    finally:
        printer.flush()


@click.command()
@setting_flags(WorkerCommandSettings)
def worker(config_file: str | None, **flags: str | None) -> None:
    """Run one worker alone, for a Redis server that is already running.

    Without a Redis URL it joins the `tokenmill serve` of this directory, if one runs.

    \b
    Examples:
      tokenmill worker --redis-url redis://queue.internal:6379/0 --model ./my-model
      tokenmill worker --metrics-port 0
    """
    _execute("worker", load_settings(WorkerCommandSettings, flags, config_file))


@click.command()
@setting_flags(ApiCommandSettings)
def api(config_file: str | None, **flags: str | None) -> None:
    """Run the API alone, for a Redis server that is already running.

    Without a Redis URL it joins the `tokenmill serve` of this directory, if one runs.

    \b
    Examples:
      tokenmill api --redis-url redis://queue.internal:6379/0 --host 0.0.0.0
      tokenmill api --port 8001
    """
    _execute("api", load_settings(ApiCommandSettings, flags, config_file))


def _execute(name: str, settings: ApiCommandSettings | WorkerCommandSettings) -> None:
    """Replace this process, so that signals and exit codes are those of the API or the worker."""
    check_server()
    variables = settings.to_environment()
    if "redis_url" not in settings.model_fields_set and (url := state_of(settings).address("redis-url")):
        click.echo(f"joining the tokenmill serve of this directory: Redis at {hide_password(url)}", err=True)
        variables[ALL["redis_url"].variable] = url
    command = process_command(name)
    with blocked_signals():
        os.execve(command[0], command, {**os.environ, **variables})  # noqa: S606 - a fixed command; a shell is not wanted
