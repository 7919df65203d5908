"""`tokenmill serve`, `worker` and `api`: start processes, with every setting as a flag.

Law: a flag, a variable and a line in the file end up as the same environment variable of the same process.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from tokenmill import config
from tokenmill.cli.console import LinePrinter, colour_wanted
from tokenmill.config import Part, Setting
from tokenmill.process.startup_signals import blocked_signals
from tokenmill.protocol.redis_url import hide_password
from tokenmill.serve.service import room_command
from tokenmill.serve.service import serve as run_service
from tokenmill.serve.state import StateDirectory

_Command = TypeVar("_Command", bound=Callable[..., Any])
_METAVARS = {int: "NUMBER", float: "NUMBER", bool: "true|false", str: "TEXT"}


def setting_flags(*parts: Part) -> Callable[[_Command], _Command]:
    """A flag for each setting of `parts`, and --config."""

    def decorate(command: _Command) -> _Command:
        for setting in reversed(config.settings_of(*parts)):
            command = _flag(setting)(command)
        return click.option(
            "--config", "config_file", metavar="FILE", help="TOML file of settings [default: tokenmill.toml]"
        )(command)

    return decorate


def _flag(setting: Setting) -> Callable[[_Command], _Command]:
    help_text = f"{setting.help} [{setting.variable}; default: {setting.default}]"
    return click.option(setting.flag, setting.name, metavar=_METAVARS[setting.kind], help=help_text)


def resolved(flags: Mapping[str, Any], config_file: str | None) -> dict[str, str]:
    """The settings of this command line. Raises `ConfigError`."""
    return config.resolve(flags, os.environ, config.find_file(config_file, Path.cwd()))


def state_of(settings: Mapping[str, str]) -> StateDirectory:
    return StateDirectory(Path(settings.get("state_dir", config.BY_NAME["state_dir"].default)))


@click.command()
@setting_flags(Part.SERVE, Part.SUPERVISOR, Part.API, Part.WORKER)
def serve(config_file: str | None, **flags: str | None) -> None:
    """Run everything: Redis, one worker for each CUDA device (on a CPU one), the API.

    Uses the Redis server that REDIS_URL names, else starts one of its own with its data in .tokenmill/, so
    that unfinished tasks go on at the next start. Ctrl-C stops API, workers and Redis in that order; a
    worker finishes what it can within the grace period. A second Ctrl-C ends the API and makes the workers
    hand back unfinished tasks, a third kills what is left; no accepted task is lost.

    \b
    Examples:
      tokenmill serve
      tokenmill serve --model ./my-model --port 8080
      tokenmill serve --workers 2 --metrics-port 9400
      TOKENMILL_MAX_NUM_SEQS=16 tokenmill serve
      REDIS_URL=redis://localhost:6379/0 tokenmill serve
    """
    printer = LinePrinter(colour_wanted())
    settings = resolved(flags, config_file)
    run_service(state_of(settings), settings, os.environ, printer)


@click.command()
@setting_flags(Part.SERVE, Part.WORKER)
def worker(config_file: str | None, **flags: str | None) -> None:
    """Run one worker alone, for a Redis server that runs already.

    Without a Redis URL it joins the `tokenmill serve` of this directory, if one runs.

    \b
    Examples:
      tokenmill worker --redis-url redis://queue.internal:6379/0 --model ./my-model
      tokenmill worker --metrics-port 0
    """
    _become("worker", flags, config_file)


@click.command()
@setting_flags(Part.SERVE, Part.API)
def api(config_file: str | None, **flags: str | None) -> None:
    """Run the API alone, for a Redis server that runs already.

    Without a Redis URL it joins the `tokenmill serve` of this directory, if one runs.

    \b
    Examples:
      tokenmill api --redis-url redis://queue.internal:6379/0 --host 0.0.0.0
      tokenmill api --port 8001
    """
    _become("api", flags, config_file)


def _become(name: str, flags: Mapping[str, Any], config_file: str | None) -> None:
    """This process turns into the room, so that signals and exit codes are the room's own."""
    settings = resolved(flags, config_file)
    if "redis_url" not in settings and (url := state_of(settings).address("redis-url")):
        click.echo(f"joining the tokenmill serve of this directory: Redis at {hide_password(url)}", err=True)
        settings["redis_url"] = url
    command = room_command(name)
    environment = {**os.environ, **config.to_environment(settings)}
    with blocked_signals():
        os.execve(command[0], command, environment)  # noqa: S606 - a fixed command; a shell is not wanted
