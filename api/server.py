"""The API under gunicorn: one process of threads, configured from here alone.

Law: a stop is answered in time. Open streams and waits are told to end at once, and their clients reconnect.
"""

import errno
import logging
import socket
from types import FrameType
from typing import Any

from gunicorn.app.base import BaseApplication
from gunicorn.workers.gthread import ThreadWorker

from api.app import ApiApp, create_app
from api.housekeeping import start_checks, start_deliverer, start_reaper
from api.presence import Shutdown
from api.settings import ApiSettings

BACKLOG = 2048
# As gunicorn writes its own lines.
LOG_FORMAT = "%(asctime)s [%(process)d] [%(levelname)s] %(name)s: %(message)s"
LOG_DATES = "[%Y-%m-%d %H:%M:%S %z]"


class CannotListen(Exception):
    """The address cannot be had; the message names the settings."""


def listen(settings: ApiSettings) -> int:
    """The file descriptor of a bound socket; port 0 takes any free one. Raises `CannotListen`."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG).detach()
    # UnicodeError: of a name that cannot be one, as `a..b`.
    except (OSError, UnicodeError) as error:
        raise CannotListen(_why_not(settings, error)) from error


def _why_not(settings: ApiSettings, error: OSError | UnicodeError) -> str:
    where = f"cannot listen on {settings.host} port {settings.port}"
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return f"{where}: it is taken; set TOKENMILL_PORT to one that is free"
    if number == errno.EACCES:
        return f"{where}: that is not allowed; set TOKENMILL_PORT to one above 1023"
    reason = getattr(error, "strerror", None) or error
    return f"{where}: {reason}; set TOKENMILL_HOST to an address of this machine"


class ApiServer(BaseApplication):  # type: ignore[misc]  # gunicorn ships no types
    """gunicorn's application. What its users set in GUNICORN_CMD_ARGS goes before what is set here."""

    def __init__(self, settings: ApiSettings, listener: int) -> None:
        self._settings = settings
        self._listener = listener
        self.shutdown = Shutdown()
        super().__init__()

    def load_config(self) -> None:
        settings = self._settings
        chosen: dict[str, Any] = {
            "bind": f"fd://{self._listener}",
            "worker_class": StreamWorker,
            # Counters and the hub belong to a process: one holds all of them.
            "workers": 1,
            "threads": settings.http_threads,
            # Idle connections that are kept alive do not take a thread.
            "worker_connections": settings.http_threads * 4,
            "graceful_timeout": max(1, round(settings.http_grace_seconds)),
            "proc_name": "tokenmill-api",
            # gunicorn would open a socket for commands in the home directory.
            "control_socket_disable": True,
        }
        for name, value in {**chosen, **self._from_environment()}.items():
            self.cfg.set(name, value)

    def load(self) -> ApiApp:
        """Called in the worker process, after the fork."""
        app = create_app(self._settings, self.shutdown)
        start_reaper(self._settings, app.extensions["reap_failures"])
        start_checks(app.extensions["redis_checks"])
        start_deliverer(self._settings, app.extensions["webhook_metrics"], self.shutdown)
        return app

    def _from_environment(self) -> dict[str, Any]:
        given = self.cfg.parser().parse_args(self.cfg.get_cmd_args_from_env())
        return {name: value for name, value in vars(given).items() if value is not None and name != "args"}


class StreamWorker(ThreadWorker):  # type: ignore[misc]  # gunicorn ships no types
    """gunicorn's worker of threads, which tells the streams when it has to end."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.app.shutdown.requested = True
        super().handle_exit(sig, frame)

    def handle_quit(self, sig: int, frame: FrameType | None) -> None:
        self.app.shutdown.requested = True
        super().handle_quit(sig, frame)

    def is_parent_alive(self) -> bool:
        """Asked once a second. A worker without a master ends; open streams would hold it, and the port."""
        alive = bool(super().is_parent_alive())
        if not alive:
            self.app.shutdown.requested = True
        return alive


def serve(settings: ApiSettings) -> None:
    """Answer calls until a signal ends it. Raises `CannotListen`."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt=LOG_DATES)
    # The server owns the descriptor from here on, and closes it in each of its processes.
    ApiServer(settings, listen(settings)).run()
