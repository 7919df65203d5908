"""The errors of tasks that a script ends while no worker has them, as the scripts write them down.

Law: Lua makes no text; it puts seconds into what is made here. Knows no Redis.
"""

import json
from collections.abc import Iterator

from tokenmill.protocol import time_limits
from tokenmill.protocol.messages import TaskError
from tokenmill.protocol.store.packing import compressed

MAX_WAIT_ERROR = TaskError(
    type="timeout_error",
    code="queue_timeout",
    message="the task waited longer than TOKENMILL_MAX_TASK_SECONDS without being finished",
)
"""Why a task ended that no worker took in time."""

POISON_ERROR = TaskError(
    type="server_error",
    code="poison",
    message="this request ended its worker three times while it ran alone there; it is not tried again",
)
"""Why a task ended that is to blame for the deaths of several workers."""

LOST_ERROR = TaskError(
    type="server_error",
    code="lost",
    message="Redis lost the data of this task (evicted or deleted); submit it again",
)
"""Why a task ended whose keys vanished."""


def _told(error: TaskError) -> tuple[str, str]:
    """For readers as JSON, and for RQ as the text of an exception."""
    text = error.message.replace(time_limits.PLACE, "so many")
    return json.dumps(error.to_json(), separators=(",", ":")), compressed(text)


def _named() -> Iterator[str]:
    errors = {"": MAX_WAIT_ERROR, **{name: time_limits.timeout_error(name) for name in time_limits.NAMES}}
    for name, error in errors.items():
        yield from (name, *_told(error))


NO_ERROR = ("", "")
POISON = _told(POISON_ERROR)
"""As `hand_back.lua` takes it."""
LOST = _told(LOST_ERROR)
"""As `vanished.lua` writes it."""
NAMED = tuple(_named())
"""As `reap_overdue.lua` takes them: the name of the limit that has passed ("": waited too long), and its
error.
"""
