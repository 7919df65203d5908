"""The messages of a task: each output ends once, and the last end settles the task. No Redis."""

import json
import math
from typing import Any

import pytest

from engine.outputs import SequenceOutput, TokenLogprobs
from engine.sequence import FinishReason
from tokenmill.protocol.log import outputs_of, prompt_logprobs_of
from tokenmill.protocol.messages import LogEntry, encode
from tokenmill.protocol.records import Settlement
from worker.errors import invalid_value
from worker.ownership import Ownership
from worker.stream import MIN_LOGPROB, LogprobsWriter, Stream

STOP, LENGTH, ERROR, TIMEOUT = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ERROR,
    FinishReason.TIMEOUT,
)
LETTERS = LogprobsWriter(lambda token_id: bytes([token_id]))


def new_stream(num_outputs: int = 1, entries: tuple[LogEntry, ...] = (), **options: Any) -> Stream:
    ownership = Ownership("t", "o")
    return Stream(ownership, num_prompt_tokens=3, num_outputs=num_outputs, entries=entries, **options)


def say(stream: Stream, index: int, token: int | None = None, **fields: Any) -> None:
    stream.add(
        SequenceOutput(
            request_id="t:o", index=index, token_id=token, text=f"<{token}>" if token else "", **fields
        )
    )


def settled(stream: Stream) -> tuple[Settlement, dict[str, Any]]:
    """The settlement, and the members of the last entry."""
    write = stream.to_write()
    assert write.settlement is not None
    ends = [entry.parse_members() for entry in write.entries if entry.is_end]
    assert [bool(end.get("done")) for end in ends] == [False] * (len(ends) - 1) + [True]
    return write.settlement, ends[-1]


def test_the_last_end_settles_the_task() -> None:
    """vllm#8625: usage counted one choice. The prompt counts once, and the tokens of all outputs count."""
    stream = new_stream(3)
    for index in (0, 1, 2, 0, 1):
        say(stream, index, 5)
    say(stream, 1, finish_reason=STOP, num_cached_tokens=9)
    say(stream, 0, 6, finish_reason=LENGTH, num_cached_tokens=2)
    assert not stream.has_ended
    assert stream.to_write().settlement is None
    say(stream, 2, finish_reason=STOP, num_cached_tokens=9)

    settlement, end = settled(stream)
    usage = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9, "cached_tokens": 2}
    assert end == {"finish_reason": "stop", "done": True, "usage": usage, "error": None}
    assert (settlement.status, settlement.reason) == ("completed", "length")
    assert (settlement.prompt_tokens, settlement.completion_tokens) == (3, 6)
    result = json.loads(settlement.result)
    assert [one["token_ids"] for one in result["outputs"]] == [[5, 5, 6], [5, 5], [5]]
    assert result["usage"] == usage


@pytest.mark.parametrize(
    ("reasons", "status", "reason"),
    [
        ((STOP, STOP), "completed", "stop"),
        ((STOP, LENGTH), "completed", "length"),
        ((ERROR, STOP), "failed", "error"),
        ((STOP, ERROR), "failed", "error"),
        ((LENGTH, TIMEOUT), "failed", "timeout"),
        ((TIMEOUT, ERROR), "failed", "error"),
    ],
)
def test_a_task_ends_for_the_worst_reason_of_its_outputs(
    reasons: tuple[FinishReason, ...], status: str, reason: str
) -> None:
    stream = new_stream(2)
    for index, one in enumerate(reasons):
        say(stream, index, finish_reason=one, error=f"of {index}" if one in (ERROR, TIMEOUT) else None)

    settlement, end = settled(stream)

    assert (settlement.status, settlement.reason) == (status, reason)
    failed = [index for index, one in enumerate(reasons) if one in (ERROR, TIMEOUT)]
    assert (end["error"] or {}).get("message") == (f"of {failed[0]}" if failed else None), (
        "the first that failed"
    )
    assert bool(settlement.error_text) is (status == "failed")
    assert not settlement.is_client_error, "the engine failed, or a deadline passed"


def test_a_failure_ends_all_open_outputs() -> None:
    stream = new_stream(3)
    say(stream, 1, finish_reason=STOP)
    stream.fail(invalid_value("prompt", "prompt: too long"))

    settlement, end = settled(stream)

    outputs = outputs_of(stream.to_write().entries, 3)
    assert [one.finish_reason for one in outputs] == ["error", "stop", "error"]
    assert (settlement.status, end["error"]["param"]) == ("failed", "prompt")
    assert settlement.is_client_error


def test_nothing_follows_the_end_of_an_output() -> None:
    stream = new_stream(2)
    say(stream, 0, finish_reason=STOP)
    say(stream, 0, 5)
    say(stream, 0, finish_reason=STOP)

    assert len(stream.to_write().entries) == 1


def test_a_resumed_task_waits_for_the_outputs_that_are_left() -> None:
    entries = (
        LogEntry.of_token(5, "<5>", 0),
        LogEntry.of_end("", "error", index=1, done=False, error=invalid_value("n", "of 1")),
    )
    stream = new_stream(2, entries, num_cached_tokens=2)
    assert not stream.has_ended
    say(stream, 0, 6)
    say(stream, 0, finish_reason=STOP, num_cached_tokens=3)

    settlement, end = settled(stream)

    assert (settlement.status, end["error"]["message"]) == ("failed", "of 1"), "of an earlier attempt"
    assert end["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 3}
    assert stream.to_write().first_seq == 2


def test_cached_tokens_of_an_earlier_attempt_are_reported() -> None:
    """Its first output has ended. The others find the prompt in the cache."""
    entries = (LogEntry.of_end("", "stop", index=0, done=False),)
    stream = new_stream(2, entries, num_cached_tokens=2)
    say(stream, 1, finish_reason=STOP, num_cached_tokens=3)

    assert settled(stream)[1]["usage"]["cached_tokens"] == 2


def test_an_ended_log_of_several_outputs_is_settled() -> None:
    first = new_stream(2)
    say(first, 0, 5, finish_reason=LENGTH)
    say(first, 1, finish_reason=STOP)
    write = first.to_write()

    again = new_stream(2, write.entries)

    assert again.has_ended
    assert again.to_write().settlement == write.settlement
    assert again.num_unstored == 0


def test_logprobs_are_in_the_messages_of_their_tokens() -> None:
    stream = new_stream(logprobs=LETTERS)
    top = ((97, -0.5), (98, -math.inf))
    prompt = (None, TokenLogprobs(99, -1.5, ((99, -1.5),)))
    say(stream, 0, 97, logprobs=TokenLogprobs(97, -0.5, top), prompt_logprobs=prompt)
    say(stream, 0, 98, logprobs=TokenLogprobs(98, -math.inf, ()), finish_reason=STOP)

    settlement, _ = settled(stream)
    entries = stream.to_write().entries
    (output,) = outputs_of(entries)

    a = {"logprob": -0.5, "token": "a", "bytes": [97]}
    b = {"logprob": MIN_LOGPROB, "token": "b", "bytes": [98]}
    assert output.logprobs == [{**a, "top": [{"id": 97, **a}, {"id": 98, **b}]}, {**b, "top": []}]
    c = {"logprob": -1.5, "token": "c", "bytes": [99]}
    assert prompt_logprobs_of(entries) == [None, {"id": 99, **c, "top": [{"id": 99, **c}]}]
    assert len(output.logprobs) == len(output.token_ids)
    result = json.loads(settlement.result, parse_constant=pytest.fail)
    assert result["outputs"][0]["logprobs"] == output.logprobs
    assert result["prompt_logprobs"] == prompt_logprobs_of(entries)
    for seq, entry in enumerate(entries):
        json.loads(encode(entry.to_event("t", seq)), parse_constant=pytest.fail)


def test_bytes_distinguish_tokens_with_the_same_text() -> None:
    """sglang#32290: tokens that are parts of characters were one entry under U+FFFD."""
    top = tuple((token_id, -1.0) for token_id in (0xE4, 0xBD, 0xA0, 0xF0, 0x9F))
    stream = new_stream(logprobs=LETTERS)
    say(stream, 0, 0xE4, logprobs=TokenLogprobs(0xE4, -1.0, top))

    top_tokens = stream.to_write().entries[0].parse_members()["logprobs"]["top"]

    assert {one["token"] for one in top_tokens} == {"\ufffd"}
    assert [one["bytes"] for one in top_tokens] == [[token_id] for token_id, _ in top]


def test_no_logprobs_without_a_request_for_them() -> None:
    stream = new_stream(logprobs=LETTERS)
    say(stream, 0, 97)

    assert stream.to_write().entries == (LogEntry.of_token(97, "<97>"),)


def test_a_grammar_that_does_not_compile_is_the_clients_error() -> None:
    stream = new_stream()
    say(stream, 0, finish_reason=ERROR, error="structured_outputs: unbalanced parenthesis")

    error = settled(stream)[1]["error"]

    assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")
