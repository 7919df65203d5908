"""A log read back: outputs, tokens and the end, in whatever order the entries of several outputs come."""

from worker.protocol.messages import LogEntry, TaskError, Usage
from worker.protocol.outputs import TaskOutput, end_of, has_ended, outputs_of, token_ids_of

ERROR = TaskError(type="server_error", code="engine_error", message='it "broke"')


def test_nothing_yet_is_one_empty_output() -> None:
    assert outputs_of(()) == [TaskOutput(index=0)]
    assert token_ids_of(()) == []
    assert not has_ended(())


def test_entries_of_several_outputs_are_told_apart() -> None:
    entries = [
        LogEntry.of_token(7, "a", index=1),
        LogEntry.of_token(8, "\u2028", index=0),
        LogEntry.of_token(9, "", index=1),
        LogEntry.of_end("held", "stop", index=1, done=False),
        LogEntry.of_token(5, '"', index=0),
    ]

    assert outputs_of(entries) == [
        TaskOutput(index=0, text='\u2028"', token_ids=[8, 5]),
        TaskOutput(index=1, text="aheld", token_ids=[7, 9], finish_reason="stop"),
    ]
    assert token_ids_of(entries) == [7, 8, 9, 5]
    assert not has_ended(entries)
    assert not has_ended(entries[:4]), "an output ended, not the task"


def test_the_end_of_the_task_has_all_its_members() -> None:
    usage = Usage(prompt_tokens=3, completion_tokens=0)
    end = LogEntry.of_end("", "error", usage=usage, error=ERROR)

    assert has_ended([end])
    assert end_of(end) == {
        "finish_reason": "error",
        "done": True,
        "usage": usage.to_json(),
        "error": ERROR.to_json(),
    }
    assert end_of(LogEntry.of_token(1, "x")) == {}
