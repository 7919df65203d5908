"""Runs the API as a process: its socket, its signals, the HTTP server and the background threads.

A stop ends open streams and waits at once; their clients reconnect.
"""

import errno
import os
import resource
import signal
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType

import structlog

from api.app import ApiApp, create_app
from api.authentication import check_upload
from api.background.index_audit import start_index_audit
from api.background.reaper import start_reaper
from api.background.redis_checks import start_redis_checks
from api.background.webhook_delivery import start_webhook_delivery
from api.batches.runners import BatchRunners
from api.http.server import PROBE_CONNECTIONS, HttpServer
from api.http.uploads import Uploads
from api.shutdown import Shutdown
from tokenmill.settings.declarations import ApiSettings

BACKLOG = 2048
CONNECTIONS_PER_THREAD = 4
"""Idle keep-alive connections occupy no thread."""
SPARE_FILES = 64
"""Open files beside the connections to clients and Redis."""
EXIT_AT_ONCE = 1

_log = structlog.get_logger(__name__)


class CannotListen(Exception):
    """The address cannot be bound. The message names the settings to change."""


def listen(settings: ApiSettings) -> socket.socket:
    """A listening socket; port 0 chooses a free port. Raises `CannotListen`."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    # UnicodeError: the name cannot be encoded, such as `a..b`.
    except (OSError, UnicodeError) as error:
        raise CannotListen(_reason(settings, error)) from error


def _reason(settings: ApiSettings, error: OSError | UnicodeError) -> str:
    failure = f"cannot listen on {settings.host} port {settings.port}"
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return f"{failure}: the port is in use; set TOKENMILL_PORT to a free one"
    if number == errno.EACCES:
        return f"{failure}: permission denied; set TOKENMILL_PORT to a port above 1023"
    reason = getattr(error, "strerror", None) or error
    return f"{failure}: {reason}; set TOKENMILL_HOST to an address of this machine"


def serve(settings: ApiSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises `CannotListen`."""
    listener = listen(settings)
    shutdown = Shutdown()
    app = create_app(settings, shutdown)
    limit = _connection_limit(settings)
    server = HttpServer(
        app, settings, listener, shutdown, connection_limit=limit, uploads=_uploads(settings, app)
    )
    runners = BatchRunners(settings, shutdown)
    stop_on_signals(server.wake, shutdown)
    start_reaper(settings, app.parts.reap_failures)
    start_redis_checks(app.parts.redis_checks)
    start_index_audit(settings)
    start_webhook_delivery(settings, app.parts.webhook_metrics, shutdown)
    _log.info("listening", url=_url(listener), pid=os.getpid())
    runners.start()
    server.run()
    runners.join()
    _log.info("stopped")


def _uploads(settings: ApiSettings, app: ApiApp) -> Uploads:
    """Uploads are received into the directory of the files, if they have one."""
    return Uploads(
        max_file_bytes=settings.max_file_bytes,
        directory=app.parts.file_storage.directory,
        check=partial(check_upload, settings.keyring),
    )


def _connection_limit(settings: ApiSettings) -> int:
    """The limit on open connections. Raises the limit on open files where that is possible and needed."""
    wanted = settings.http_threads * CONNECTIONS_PER_THREAD
    needed = wanted + PROBE_CONNECTIONS + settings.http_threads + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    possible = wanted if soft == resource.RLIM_INFINITY else soft - (needed - wanted)
    if possible < wanted:
        _log.warning("the limit on open files allows few connections", open_files=soft, connections=possible)
    return max(1, min(wanted, possible))


def stop_on_signals(wake: Callable[[], None], shutdown: Shutdown) -> None:
    """Have the first signal end open calls, and a second one the process at once."""

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
