"""The API as a process: its socket, its signals and the threads beside the HTTP server.

Invariant: a stop is answered in time. Open streams and waits are ended at once, and their clients reconnect.
"""

import errno
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType

from api.app import create_app
from api.auditor import start_auditor
from api.housekeeping import start_checks, start_deliverer, start_reaper
from api.http.server import PROBE_CONNECTIONS, HttpServer, quiet_waitress
from api.settings import ApiSettings
from api.streams.presence import Shutdown

BACKLOG = 2048
CONNECTIONS_PER_THREAD = 4
"""Idle connections that are kept alive take no thread."""
SPARE_FILES = 64
"""Open files beside connections to clients and to Redis."""
EXIT_AT_ONCE = 1
LOG_FORMAT = "%(asctime)s [%(process)d] [%(levelname)s] %(name)s: %(message)s"
LOG_DATES = "[%Y-%m-%d %H:%M:%S %z]"

logger = logging.getLogger(__name__)


class CannotListen(Exception):
    """The address cannot be had; the message names the settings."""


def listen(settings: ApiSettings) -> socket.socket:
    """A bound socket; port 0 takes any free one. Raises `CannotListen`."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
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


def serve(settings: ApiSettings) -> None:
    """Answer calls until SIGTERM or SIGINT ends it. Raises `CannotListen`."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt=LOG_DATES)
    quiet_waitress()
    listener = listen(settings)
    shutdown = Shutdown()
    app = create_app(settings, shutdown)
    limit = _connection_limit(settings)
    server = HttpServer(app, settings, listener, shutdown, connection_limit=limit)
    stop_on_signals(server.wake, shutdown)
    start_reaper(settings, app.extensions["reap_failures"])
    start_checks(app.extensions["redis_checks"])
    start_auditor(settings)
    start_deliverer(settings, app.extensions["webhook_metrics"], shutdown)
    logger.info("Listening at: %s (%d)", _url(listener), os.getpid())
    server.run()
    logger.info("Stopped")


def _connection_limit(settings: ApiSettings) -> int:
    """Connections that may be open at once: as many as are useful, and as files may be open."""
    wanted = settings.http_threads * CONNECTIONS_PER_THREAD
    needed = wanted + PROBE_CONNECTIONS + settings.http_threads + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    possible = wanted if soft == resource.RLIM_INFINITY else soft - (needed - wanted)
    if possible < wanted:
        logger.warning("connections are limited to %d by the limit on open files (%d)", possible, soft)
    return max(1, min(wanted, possible))


def stop_on_signals(wake: Callable[[], None], shutdown: Shutdown) -> None:
    """The first signal asks open calls to end; a second one ends the process at once."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        if shutdown.requested:
            os._exit(EXIT_AT_ONCE)
        shutdown.requested = True
        wake()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
