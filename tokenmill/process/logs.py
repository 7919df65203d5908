"""The logs of the API and of the workers: one pipeline for structlog and for libraries that use `logging`.

Each event is one line on standard error: JSON, or text for people. Invariants: no line holds a prompt, a text
of a model or a key; no caller waits for whoever reads the lines.
"""

import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from tokenmill.process.line_writer import LineWriter

LEVEL_VARIABLE = "TOKENMILL_LOG_LEVEL"
FORMAT_VARIABLE = "TOKENMILL_LOG_FORMAT"
LEVELS = ("debug", "info", "warning", "error")
FLUSH_SECONDS = 1.0
"""How long an ending process waits for its last lines to be read."""

_LIBRARIES: Mapping[str, int] = {
    # One line for each HTTP request of the process.
    "httpx": logging.WARNING,
    "httpcore": logging.WARNING,
    "urllib3": logging.WARNING,
    "filelock": logging.WARNING,
    "rq": logging.WARNING,
    "transformers": logging.ERROR,
    "huggingface_hub": logging.ERROR,
    "torch": logging.WARNING,
    "numba": logging.WARNING,
    "asyncio": logging.WARNING,
    # While all threads are busy it logs one line for each call, with the raw path.
    "waitress": logging.ERROR,
    "waitress.queue": logging.CRITICAL,
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

_writer: LineWriter | None = None


class _Handler(logging.Handler):
    """Renders in the calling thread, writes in the thread of `writer`."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a log line must not end what it reports on
            line = f"a line of {record.name} could not be written"
        self._writer.write(line)
        if record.levelno >= logging.CRITICAL:
            # The process may be about to end.
            self._writer.flush(FLUSH_SECONDS)


def start(process: str, environ: Mapping[str, str] = os.environ) -> None:
    """Set up the logs of this process, by `TOKENMILL_LOG_LEVEL` and `TOKENMILL_LOG_FORMAT`.

    An invalid value counts as not set: the settings report it. `process`: a field of each line.
    """
    global _writer  # the logs are the process's
    level = environ.get(LEVEL_VARIABLE, "")
    form: Literal["console", "json"] = "json" if environ.get(FORMAT_VARIABLE) == "json" else "console"
    configure(level if level in LEVELS else "info")
    _writer = LineWriter(sys.stderr)
    handler = _Handler(_writer)
    handler.setFormatter(_formatter(process, form, colour=_has_colour(environ)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_number(level if level in LEVELS else "info"))
    for name, lowest in _LIBRARIES.items():
        logging.getLogger(name).setLevel(max(lowest, root.level))
    logging.captureWarnings(True)
    warnings.simplefilter("default" if level == "debug" else "ignore")
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def bind(**fields: str) -> None:
    """Add fields to each line of this process from now on, such as `worker`."""
    _process_fields.update(fields)


def flush() -> None:
    """Wait a moment for the last lines. For the end of the process."""
    if _writer is not None:
        _writer.flush(FLUSH_SECONDS)


def configure(level: str) -> None:
    """Let structlog's loggers write to `logging`, without a handler."""
    structlog.configure(
        processors=[*_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(_number(level)),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def _number(level: str) -> int:
    return int(getattr(logging, level.upper()))


def _has_colour(environ: Mapping[str, str]) -> bool:
    return not environ.get("NO_COLOR") and sys.stderr is not None and sys.stderr.isatty()


def _formatter(process: str, form: str, *, colour: bool) -> logging.Formatter:
    def add_process_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        # Under `tokenmill serve` each line of text begins with the name of the process.
        return {**event, **_process_fields, **({"process": process} if form == "json" else {})}

    renderers: list[Processor]
    if form == "json":
        renderers = [
            structlog.processors.JSONRenderer(ensure_ascii=False, default=str),
        ]
    else:
        renderers = [
            _escape_controls,
            structlog.dev.ConsoleRenderer(
                colors=colour,
                pad_event_to=0,
                sort_keys=False,
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_SHARED,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            add_process_fields,
            *renderers,
        ],
    )


def _escape_controls(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A value must not begin a line of its own. Tracebacks have several lines."""
    return {
        name: _escape(value) if isinstance(value, str) and name != "exception" else value
        for name, value in event.items()
    }


def _escape(text: str) -> str:
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    _log.critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(caught: threading.ExceptHookArgs) -> None:
    if caught.exc_type is SystemExit:
        return
    name = caught.thread.name if caught.thread else "?"
    error = caught.exc_value or caught.exc_type()
    _log.error(
        "uncaught exception in a thread",
        thread=name,
        exc_info=(caught.exc_type, error, caught.exc_traceback),
    )


_process_fields: MutableMapping[str, str] = {}
_SHARED: list[Processor] = [
    # What the thread works on, such as `task`: see `structlog.contextvars.bound_contextvars`.
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]
_log = structlog.get_logger(__name__)
