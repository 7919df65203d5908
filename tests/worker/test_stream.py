"""A task's messages as its owner says them: each output ends once, the last end is the task's. No Redis."""

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


def stream(num_outputs: int = 1, entries: tuple[LogEntry, ...] = (), **options: Any) -> Stream:
    ownership = Ownership("t", "o")
    return Stream(ownership, num_prompt_tokens=3, num_outputs=num_outputs, entries=entries, **options)


def say(given: Stream, index: int, token: int | None = None, **fields: Any) -> None:
    given.add(
        SequenceOutput(
            request_id="t:o", index=index, token_id=token, text=f"<{token}>" if token else "", **fields
        )
    )


def settled(given: Stream) -> tuple[Settlement, dict[str, Any]]:
    """The settlement, and the members of the last entry."""
    write = given.to_write()
    assert write.settlement is not None
    ends = [entry.parse_members() for entry in write.entries if entry.is_end]
    assert [bool(end.get("done")) for end in ends] == [False] * (len(ends) - 1) + [True]
    return write.settlement, ends[-1]


def test_the_last_of_several_ends_is_the_tasks() -> None:
    """vllm#8625: usage of one choice only. The prompt counts once, the tokens of all outputs count."""
    given = stream(3)
    for index in (0, 1, 2, 0, 1):
        say(given, index, 5)
    say(given, 1, finish_reason=STOP, num_cached_tokens=9)
    say(given, 0, 6, finish_reason=LENGTH, num_cached_tokens=2)
    assert not given.has_ended
    assert given.to_write().settlement is None
    say(given, 2, finish_reason=STOP, num_cached_tokens=9)

    settlement, end = settled(given)
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
def test_a_task_is_what_the_worst_of_its_outputs_is(
    reasons: tuple[FinishReason, ...], status: str, reason: str
) -> None:
    given = stream(2)
    for index, one in enumerate(reasons):
        say(given, index, finish_reason=one, error=f"of {index}" if one in (ERROR, TIMEOUT) else None)

    settlement, end = settled(given)

    assert (settlement.status, settlement.reason) == (status, reason)
    failed = [index for index, one in enumerate(reasons) if one in (ERROR, TIMEOUT)]
    assert (end["error"] or {}).get("message") == (f"of {failed[0]}" if failed else None), (
        "the first that failed"
    )
    assert bool(settlement.error_text) is (status == "failed")
    assert not settlement.is_client_error, "the engine failed, or the time was up"


def test_a_failure_ends_all_that_is_open() -> None:
    given = stream(3)
    say(given, 1, finish_reason=STOP)
    given.fail(invalid_value("prompt", "prompt: too long"))

    settlement, end = settled(given)

    outputs = outputs_of(given.to_write().entries, 3)
    assert [one.finish_reason for one in outputs] == ["error", "stop", "error"]
    assert (settlement.status, end["error"]["param"]) == ("failed", "prompt")
    assert settlement.is_client_error


def test_nothing_comes_after_the_end_of_an_output() -> None:
    given = stream(2)
    say(given, 0, finish_reason=STOP)
    say(given, 0, 5)
    say(given, 0, finish_reason=STOP)

    assert len(given.to_write().entries) == 1


def test_a_resumed_task_waits_for_the_outputs_that_are_left() -> None:
    entries = (
        LogEntry.of_token(5, "<5>", 0),
        LogEntry.of_end("", "error", index=1, done=False, error=invalid_value("n", "of 1")),
    )
    given = stream(2, entries, num_cached_tokens=2)
    assert not given.has_ended
    say(given, 0, 6)
    say(given, 0, finish_reason=STOP, num_cached_tokens=3)

    settlement, end = settled(given)

    assert (settlement.status, end["error"]["message"]) == ("failed", "of 1"), "an earlier attempt told it"
    assert end["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 3}
    assert given.to_write().first_seq == 2


def test_cached_tokens_of_an_earlier_attempt_are_told() -> None:
    """Its first output has ended; the others find their prompt computed by that one."""
    entries = (LogEntry.of_end("", "stop", index=0, done=False),)
    given = stream(2, entries, num_cached_tokens=2)
    say(given, 1, finish_reason=STOP, num_cached_tokens=3)

    assert settled(given)[1]["usage"]["cached_tokens"] == 2


def test_an_ended_log_of_several_outputs_is_settled() -> None:
    first = stream(2)
    say(first, 0, 5, finish_reason=LENGTH)
    say(first, 1, finish_reason=STOP)
    write = first.to_write()

    again = stream(2, write.entries)

    assert again.has_ended
    assert again.to_write().settlement == write.settlement
    assert again.num_unstored == 0


def test_logprobs_stand_in_the_messages_of_their_tokens() -> None:
    given = stream(logprobs=LETTERS)
    top = ((97, -0.5), (98, -math.inf))
    prompt = (None, TokenLogprobs(99, -1.5, ((99, -1.5),)))
    say(given, 0, 97, logprobs=TokenLogprobs(97, -0.5, top), prompt_logprobs=prompt)
    say(given, 0, 98, logprobs=TokenLogprobs(98, -math.inf, ()), finish_reason=STOP)

    settlement, _ = settled(given)
    entries = given.to_write().entries
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


def test_bytes_tell_tokens_apart_whose_texts_are_the_same() -> None:
    """sglang#32290: candidates that are each half a character were one entry under U+FFFD."""
    top = tuple((token_id, -1.0) for token_id in (0xE4, 0xBD, 0xA0, 0xF0, 0x9F))
    given = stream(logprobs=LETTERS)
    say(given, 0, 0xE4, logprobs=TokenLogprobs(0xE4, -1.0, top))

    told = given.to_write().entries[0].parse_members()["logprobs"]["top"]

    assert {one["token"] for one in told} == {"\ufffd"}
    assert [one["bytes"] for one in told] == [[token_id] for token_id, _ in top]


def test_nobody_asked_for_logprobs() -> None:
    given = stream(logprobs=LETTERS)
    say(given, 0, 97)

    assert given.to_write().entries == (LogEntry.of_token(97, "<97>"),)


def test_a_grammar_that_does_not_compile_is_the_clients_to_put_right() -> None:
    given = stream()
    say(given, 0, finish_reason=ERROR, error="structured_outputs: unbalanced parenthesis")

    error = settled(given)[1]["error"]

    assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")
