"""RQ 3's keys and constants that the scripts use. Tests compare each with RQ's own.

RQ is not imported, because clients do not need it. `RQ_KEY_PREFIX` must be unset.
"""

from typing import Final

QUEUES = "rq:queues"
"""Set: keys of the queues that `rq info` shows."""

RESULT_SUCCESSFUL: Final = 1
RESULT_FAILED: Final = 2
"""`rq.results.Result.Type`."""

MAX_RESULTS: Final = 10
"""The length of the stream of a job's results."""


def job(task_id: str) -> str:
    """Hash: RQ's record of a job."""
    return f"rq:job:{task_id}"


def queue(name: str) -> str:
    """List: ids of waiting jobs."""
    return f"rq:queue:{name}"


def wip(name: str) -> str:
    """Sorted set, StartedJobRegistry: `<job>:<execution>` -> expiry; `+inf` for Tokenmill's."""
    return f"rq:wip:{name}"


def finished(name: str) -> str:
    """Sorted set, FinishedJobRegistry: job -> expiry."""
    return f"rq:finished:{name}"


def failed(name: str) -> str:
    """Sorted set, FailedJobRegistry: job -> expiry."""
    return f"rq:failed:{name}"


def canceled(name: str) -> str:
    """Sorted set, CanceledJobRegistry: job -> expiry."""
    return f"rq:canceled:{name}"


def results(task_id: str) -> str:
    """Stream: the results of a job."""
    return f"rq:results:{task_id}"


def executions(task_id: str) -> str:
    """Sorted set: execution of a job -> expiry."""
    return f"rq:executions:{task_id}"


def execution(composite: str) -> str:
    """Hash: one execution, `<job>:<execution>`."""
    return f"rq:execution:{composite}"


def worker_executions(worker: str) -> str:
    """Set: `<job>:<execution>` of one worker."""
    return f"rq:worker:{worker}:executions"
