"""Outputs, tokens and the end of a task, as read from its log."""

import json

from tokenmill.protocol.log import TaskOutput, has_ended, num_tokens_of, outputs_of, prompt_logprobs_of
from tokenmill.protocol.messages import LogEntry, TaskError, TokenEvent, Usage, decode, encode

ERROR = TaskError(type="server_error", code="engine_error", message='it "broke"')


def test_an_empty_log_is_one_empty_output() -> None:
    assert outputs_of(()) == [TaskOutput(index=0)]
    assert num_tokens_of(()) == 0
    assert prompt_logprobs_of(()) is None
    assert not has_ended(())


def test_interleaved_outputs_are_separated() -> None:
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
    assert num_tokens_of(entries) == 4, "an end is no token"
    assert not has_ended(entries)
    assert not has_ended(entries[:4]), "an output ended, not the task"


def test_the_end_of_a_task_has_all_members() -> None:
    usage = Usage(prompt_tokens=3, completion_tokens=0)
    end = LogEntry.of_end("", "error", usage=usage, error=ERROR)

    assert has_ended([end])
    assert end.parse_members() == {
        "finish_reason": "error",
        "done": True,
        "usage": usage.to_json(),
        "error": ERROR.to_json(),
    }
    assert LogEntry.of_token(1, "x").parse_members() == {}


def test_every_requested_output_exists() -> None:
    """vllm#10852: fewer outputs than n."""
    end = LogEntry.of_end("", "error", index=2, done=False, error=ERROR)
    entries = [LogEntry.of_token(7, "a", index=1), end]

    assert [output.index for output in outputs_of(entries, 4)] == [0, 1, 2, 3]
    assert outputs_of(entries, 4)[2].finish_reason == "error"
    assert end.parse_members() == {"finish_reason": "error", "error": ERROR.to_json()}


def test_logprobs_belong_to_their_tokens() -> None:
    first, second = {"logprob": -0.5}, {"logprob": -9999.0}
    entries = [
        LogEntry.of_token(1, "a", 1, {"logprobs": first}),
        LogEntry.of_token(2, "b", 0, {"logprobs": second, "prompt_logprobs": [None, {"id": 3}]}),
        LogEntry.of_token(3, "c", 1, {"logprobs": second}),
        LogEntry.of_end("", "stop", index=1, done=False),
    ]

    assert [output.logprobs for output in outputs_of(entries, 2)] == [[second], [first, second]]
    assert prompt_logprobs_of(entries) == [None, {"id": 3}]
    assert outputs_of(entries[3:], 2)[1].logprobs is None
    message = json.loads(encode(entries[1].to_event("t", 5)))
    assert message["logprobs"] == second
    assert decode(json.dumps(message)) == TokenEvent(
        id="t", seq=5, token=2, text="b", logprobs=second, prompt_logprobs=[None, {"id": 3}]
    )
