"""The slots that a call holds: one while it follows or waits, one while its reply is built.

Both raise `Problem` (503) if none is free.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from flask import Response

from api.authentication import current_tenant
from api.problems import Problem
from api.routes.task_services import TaskServices

BUSY_SECONDS = 5
"""Retry-After where no slot is free."""


@contextmanager
def stream_slot(services: TaskServices) -> Iterator[None]:
    """Hold a slot of the calls that follow or wait, and count the stream."""
    with services.stream_slots.acquire(current_tenant()) as acquired:
        if not acquired:
            detail = (
                "this process has as many open streams and waiting calls as it allows; try again, or poll "
                "the task"
            )
            raise Problem(503, "too_many_streams", detail, retry_after=BUSY_SECONDS)
        services.metrics.stream_opened()
        try:
            yield
        finally:
            services.metrics.stream_closed()


@contextmanager
def reply_slot(services: TaskServices) -> Iterator[None]:
    """Hold a slot of the threads that build replies. Waits for one."""
    with services.reply_slots.acquire(current_tenant()) as acquired:
        if not acquired:
            raise Problem(
                503, "busy", "too many replies are being built; try again", retry_after=BUSY_SECONDS
            )
        yield


def stream_reply(chunks: Iterable[bytes]) -> Response:
    """Server-sent events that no proxy delays or keeps. `call_on_close` gives slots back: a generator that is
    never started runs no clean-up.
    """
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Response(chunks, content_type="text/event-stream; charset=utf-8", headers=headers)
