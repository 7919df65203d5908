"""The errors of tasks that a script ends without a worker.

Scripts compose no text: they only insert the seconds into messages made here.
"""

import json
from collections.abc import Iterator

from tokenmill.protocol.limits import SECONDS_PLACEHOLDER, TIME_LIMIT_NAMES, timeout_error
from tokenmill.protocol.messages import TaskError
from tokenmill.protocol.store.packing import compressed

MAX_WAIT_ERROR = TaskError(
    type="timeout_error",
    code="queue_timeout",
    message="the task waited longer than TOKENMILL_MAX_TASK_SECONDS without being finished",
)
"""No worker finished the task in time."""

POISON_ERROR = TaskError(
    type="server_error",
    code="poison",
    message="this request crashed its worker three times while it ran in isolation; it is not retried",
)
"""The task crashed several workers."""

LOST_ERROR = TaskError(
    type="server_error",
    code="lost",
    message="Redis lost the data of this task (evicted or deleted); submit it again",
)
"""Keys of the task are missing."""


def _forms(error: TaskError) -> tuple[str, str]:
    """JSON for readers, and the text of an exception for RQ."""
    text = error.message.replace(f" ({SECONDS_PLACEHOLDER} s)", "")
    return json.dumps(error.to_json(), separators=(",", ":")), compressed(text)


def _timeouts() -> Iterator[str]:
    errors = {"": MAX_WAIT_ERROR, **{name: timeout_error(name) for name in TIME_LIMIT_NAMES}}
    for name, error in errors.items():
        yield from (name, *_forms(error))


NO_ERROR = ("", "")
POISON = _forms(POISON_ERROR)
"""Arguments of `hand_back.lua` and `lapsed_leases.lua`."""
LOST = _forms(LOST_ERROR)
"""Constants of `lost_tasks.lua`."""
TIMEOUTS = tuple(_timeouts())
"""Arguments of `overdue_tasks.lua`: for each limit its name ("" for the maximum wait) and its error."""
