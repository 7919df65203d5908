"""Prints the texts of tasks, and tells from their ends whether they completed."""

from collections.abc import Mapping
from typing import Any

from tokenmill.cli.text_streams import write_stderr, write_stdout
from tokenmill.client.errors import ClientError, Refused, ServiceFailed
from tokenmill.client.sync_client import Task
from tokenmill.client.texts import StreamedTexts
from tokenmill.protocol.messages import FinishedEvent, encode


class TaskNotCompleted(Exception):
    """The task ended, but did not complete."""


def print_stream(task: Task, num_outputs: int, *, after: int = -1, as_json: bool = False) -> None:
    """Print the texts while they are generated, or each event as a line of JSON.

    If that is interrupted, say how to continue: the task does. Raises `TaskNotCompleted`.
    """
    streamed = StreamedTexts(num_outputs)
    ends: list[FinishedEvent] = []
    try:
        for event in task.stream(after=after):
            for piece in [encode(event) + "\n"] if as_json else streamed.add(event):
                write_stdout(piece, end="")
            if isinstance(event, FinishedEvent):
                ends.append(event)
    except (KeyboardInterrupt, BrokenPipeError, ClientError) as error:
        if not isinstance(error, Refused) or isinstance(error, ServiceFailed):
            write_stderr(f"\nthe task continues; to go on: tokenmill watch {task.id}")
        raise
    if not as_json:
        write_stdout("")
    for end in ends:
        check_end(end.finish_reason, end.error)


def check_completed(task: Task) -> None:
    """Raises `TaskNotCompleted`."""
    reason = "stop" if task.status == "completed" else task.status
    check_end(reason, task.error.to_json() if task.error else None)


def check_end(reason: str, error: Mapping[str, Any] | None) -> None:
    """Raises `TaskNotCompleted`."""
    if error:
        raise TaskNotCompleted(f"the task failed: {error.get('message')} ({error.get('code')})")
    if reason not in ("stop", "length"):
        raise TaskNotCompleted(f"the task ended as {reason}")
