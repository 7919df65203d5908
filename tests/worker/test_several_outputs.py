"""Several outputs, time limits and logprobs through the whole worker: claimed, run, taken over, cancelled."""

import json
import threading
import time
from functools import partial
from typing import Any

import pytest
import redis
from rq.job import Job
from rq.serializers import JSONSerializer

from tests.worker.fakes import (
    SLUG,
    FakeRunner,
    build_engine,
    end_of,
    ended,
    expected_tokens,
    log_length,
    submit,
    tokens_of,
    until,
)
from tests.worker.running import running
from tests.worker.test_lost_and_cancelled import reap_what_is_held
from tokenmill.protocol import keys
from tokenmill.protocol.limits import timeout_error
from tokenmill.protocol.messages import Event, FinishedEvent, TokenEvent
from tokenmill.protocol.store.task_store import TaskStore


def of_index(events: list[Event], index: int) -> list[Event]:
    return [event for event in events if event.index == index]


def assert_expected_outputs(events: list[Event], num_outputs: int, num_tokens: int) -> None:
    for index in range(num_outputs):
        expected = expected_tokens([1, 2, 3], num_tokens, index)
        own = of_index(events, index)
        assert tokens_of(own) == expected, index
        assert "".join(event.text for event in own) == "".join(f"<{token}>" for token in expected)


class Gate:
    """A runner that takes one step for each permit."""

    def __init__(self, client: "redis.Redis", task: str) -> None:
        self.runner = FakeRunner()
        self._client, self._task = client, task
        self._permits = threading.Semaphore(0)
        self.runner.before_step = self._permits.acquire

    def step_until(self, length: int) -> None:
        """Step until the log has `length` messages."""
        for _ in range(length + 1):
            if (before := log_length(self._client, self._task)) >= length:
                return
            self._permits.release()
            until(partial(self._is_longer, before), "a step is published")
        raise AssertionError(f"the log has fewer than {length} messages")

    def nudge_until(self, length: int) -> None:
        """The same if a step may have no result, as after the loss of an attempt."""
        for _ in range(10_000):
            if log_length(self._client, self._task) >= length:
                return
            self._permits.release()
            time.sleep(0.01)
        raise AssertionError(f"the log has fewer than {length} messages")

    def open(self) -> None:
        self._permits.release(10_000)

    def _is_longer(self, before: int) -> bool:
        return log_length(self._client, self._task) > before


def test_every_output_is_generated_and_ends(redis_url: str, redis_client: "redis.Redis") -> None:
    """vllm#10852: a request with n outputs returned fewer."""
    task = submit(redis_client, sampling={"n": 4, "max_tokens": 6})
    others = [submit(redis_client, prompt_token_ids=(n + 50,)) for n in range(3)]

    with running(redis_url):
        events = ended(redis_client, task)
        for number, other in enumerate(others):
            assert tokens_of(ended(redis_client, other)) == expected_tokens([number + 50], 5)

    assert_expected_outputs(events, 4, 6)
    end = events[-1]
    assert isinstance(end, FinishedEvent)
    assert end.usage == {"prompt_tokens": 3, "completion_tokens": 24, "total_tokens": 27, "cached_tokens": 0}
    job = Job.fetch(task, connection=redis_client, serializer=JSONSerializer)
    result: Any = job.return_value()
    assert [one["index"] for one in result["outputs"]] == [0, 1, 2, 3]
    assert sum(len(one["token_ids"]) for one in result["outputs"]) == result["usage"]["completion_tokens"]
    totals = TaskStore(redis_client).queue_stats(SLUG).totals
    assert totals["completion_tokens"] == 24 + 3 * 5


@pytest.mark.parametrize("num_messages", range(2, 16, 3))
def test_a_task_that_is_taken_over_continues_in_every_output(
    redis_url: str, redis_client: "redis.Redis", num_messages: int
) -> None:
    """Published tokens are not generated again, and ended outputs do not end again."""
    stop = expected_tokens([1, 2, 3], 3, 1)[2]
    task = submit(redis_client, sampling={"n": 3, "max_tokens": 5, "stop_token_ids": [stop]})
    gate = Gate(redis_client, task)

    with running(redis_url, build_engine(gate.runner)):
        gate.step_until(num_messages)
        reap_what_is_held(redis_client, task)
        gate.open()
        events = ended(redis_client, task)

    lengths = [len(tokens_of(of_index(events, index))) for index in range(3)]
    assert lengths == [5, 3, 5]
    assert [tokens_of(of_index(events, index)) for index in range(3)] == [
        expected_tokens([1, 2, 3], length, index) for index, length in enumerate(lengths)
    ]
    end = events[-1]
    assert isinstance(end, FinishedEvent)
    assert end.usage is not None
    assert end.usage["completion_tokens"] == 13


@pytest.mark.parametrize("num_messages", [0, 1, 5])
def test_a_cancel_ends_every_output_once(
    redis_url: str, redis_client: "redis.Redis", num_messages: int
) -> None:
    task = submit(redis_client, sampling={"n": 3, "max_tokens": 50})
    gate = Gate(redis_client, task)
    engine = build_engine(gate.runner)

    with running(redis_url, engine) as run:
        until(lambda: redis_client.hget(keys.run(task), "owner"), "it is claimed")
        gate.step_until(num_messages)
        assert TaskStore(redis_client).cancel(task) == "cancelled"
        gate.open()
        events = ended(redis_client, task)
        until(lambda: not engine.has_work, "the engine drops it")
        until(lambda: not run.context.owned_tasks, "no task is owned")

    assert {event.index for event in events if isinstance(event, FinishedEvent)} == {0, 1, 2}
    assert len(TaskStore(redis_client).read_log(task)) == len(events)


def test_one_output_that_fails_leaves_the_others(redis_url: str, redis_client: "redis.Redis") -> None:
    runner = FakeRunner()

    def fault(sequence: Any) -> None:
        if sequence.index == 1 and sequence.num_output_tokens == 2:
            raise ValueError("no such token")

    runner.sample_fault = fault
    task = submit(redis_client, sampling={"n": 3, "max_tokens": 5})

    with running(redis_url, build_engine(runner)):
        events = ended(redis_client, task)

    assert [len(tokens_of(of_index(events, index))) for index in range(3)] == [5, 2, 5]
    end = events[-1]
    assert isinstance(end, FinishedEvent)
    assert end.error is not None
    assert end.error["code"] == "engine_error"
    snapshot = TaskStore(redis_client).inspect(task)
    assert snapshot is not None
    assert snapshot.status == "failed"


def test_as_many_outputs_as_were_accepted(redis_url: str, redis_client: "redis.Redis") -> None:
    """The scripts end as many outputs as were submitted. With another number readers would wait for ever."""
    task = submit(redis_client, sampling={"n": 2})
    redis_client.hset(keys.run(task), "n", 3)

    with running(redis_url):
        assert (end_of(redis_client, task).error or {})["param"] == "n"


def test_usage_is_the_number_of_tokens_whatever_their_text(
    redis_url: str, redis_client: "redis.Redis"
) -> None:
    """vllm#7262: tokens that a stop string hides, or that have no text, count too."""
    first = expected_tokens([1, 2, 3], 6)
    hidden = f"<{first[3]}><{first[4]}>"
    task = submit(redis_client, sampling={"n": 2, "max_tokens": 8, "stop": [hidden]})

    with running(redis_url):
        events = ended(redis_client, task)

    end = events[-1]
    assert isinstance(end, FinishedEvent)
    assert end.usage is not None
    assert hidden not in "".join(event.text for event in of_index(events, 0))
    assert tokens_of(of_index(events, 0)) == first[:5]
    assert end.usage["completion_tokens"] == sum(isinstance(event, TokenEvent) for event in events) == 5 + 8


def test_logprobs_come_with_their_tokens(redis_url: str, redis_client: "redis.Redis") -> None:
    """sglang#3707: one for each token, also without top logprobs, in the log and in live events."""
    task = submit(redis_client, sampling={"n": 2, "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 0})
    bare = submit(redis_client, sampling={"max_tokens": 3, "logprobs": 0})
    none = submit(redis_client, sampling={"max_tokens": 3})

    with running(redis_url):
        events = ended(redis_client, task)
        (bare_tokens, none_tokens) = (
            [event for event in ended(redis_client, one) if isinstance(event, TokenEvent)]
            for one in (bare, none)
        )

    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert len(tokens) == 6
    for event in tokens:
        assert event.logprobs is not None
        assert event.logprobs["bytes"] == list(f"<{event.token}>".encode())
        assert [one["id"] for one in event.logprobs["top"]] == [event.token, 901]
        assert (event.logprobs["top"][1]["logprob"], event.logprobs["top"][1]["bytes"]) == (-9999.0, [0x81])
    with_prompt = [event for event in tokens if event.prompt_logprobs is not None]
    assert len(with_prompt) == 1
    assert with_prompt[0] is tokens[0]
    assert [one and (one["id"], one["logprob"]) for one in with_prompt[0].prompt_logprobs or ()] == [
        None, (2, -1.0), (3, -2.0),
    ]  # fmt: skip
    assert [event.logprobs and event.logprobs["top"] for event in bare_tokens] == [[], [], []]
    assert [event.logprobs for event in none_tokens] == [None, None, None]


@pytest.mark.parametrize("name", ["queue_timeout_seconds", "ttft_timeout_seconds", "timeout_seconds"])
def test_a_deadline_that_passed_before_the_claim_is_reported(
    redis_url: str, redis_client: "redis.Redis", name: str
) -> None:
    """If the reaper was slower than the claim, the engine ends it with the same error, without a step."""
    limit: dict[str, Any] = {name: 3600}
    task = submit(redis_client, **limit)
    redis_client.hincrby(keys.run(task), "accepted_us", -3600_000_000)
    runner = FakeRunner()

    with running(redis_url, build_engine(runner)):
        (end,) = ended(redis_client, task)

    assert isinstance(end, FinishedEvent)
    assert (end.finish_reason, end.error) == ("timeout", timeout_error(name, "3600").to_json())
    assert runner.num_steps == 0


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_deadline_that_passes_while_it_runs_keeps_the_generated_tokens(
    redis_url: str, redis_client: "redis.Redis", is_taken_over: bool
) -> None:
    """Also after a resume: time counts from acceptance, and the queue's deadline was met before."""
    task = submit(redis_client, sampling={"max_tokens": 190}, timeout_seconds=3600, queue_timeout_seconds=60)
    gate, passed = Gate(redis_client, task), [0.0]
    engine = build_engine(gate.runner, clock=lambda: time.monotonic() + passed[0])

    with running(redis_url, engine):
        gate.step_until(3)
        if is_taken_over:
            redis_client.hincrby(keys.run(task), "accepted_us", -1800_000_000)
            reap_what_is_held(redis_client, task)
            gate.nudge_until(6)
            passed[0] = 1801.0
        else:
            passed[0] = 3601.0
        gate.open()
        end = end_of(redis_client, task)

    assert (end.finish_reason, end.error) == ("timeout", timeout_error("timeout_seconds", "3600").to_json())
    assert end.usage is not None
    assert 3 <= end.usage["completion_tokens"] < 190
    snapshot = TaskStore(redis_client).inspect(task)
    assert snapshot is not None
    assert snapshot.status == "failed"


def test_an_invalid_field_is_named(redis_url: str, redis_client: "redis.Redis") -> None:
    """The worker checks fields that no API has checked."""
    bad: dict[str, dict[str, Any]] = {
        "n": {"sampling": {"n": 1.0}},
        "logit_bias": {"sampling": {"logit_bias": {"x": 1}}},
        "allowed_token_ids": {"sampling": {"allowed_token_ids": [5000]}},
        "bad_words": {"sampling": {"bad_words": ["\ud83d"]}},
        "structured_outputs": {"sampling": {"structured_outputs": {"xml": "a"}}},
        "prompt_logprobs": {
            "prompt_token_ids": (1,) * 12_000,
            "sampling": {"prompt_logprobs": 20},
        },
    }
    tasks = {field: submit(redis_client, **request) for field, request in bad.items()}

    with running(redis_url):
        for field, task in tasks.items():
            error = end_of(redis_client, task).error
            assert error is not None
            assert (error["param"], error["type"]) == (field, "invalid_request_error"), json.dumps(error)


def test_logit_bias_has_integer_keys_in_the_engine(redis_url: str, redis_client: "redis.Redis") -> None:
    """JSON has only strings as keys."""
    seen: list[Any] = []
    runner = FakeRunner()
    runner.sample_fault = lambda sequence: seen.append(sequence.params)
    sampling = {"max_tokens": 1, "logit_bias": {"17": 2.5}, "allowed_token_ids": [1, 17]}
    task = submit(redis_client, sampling=sampling)

    with running(redis_url, build_engine(runner)):
        ended(redis_client, task)

    assert dict(seen[0].logit_bias) == {17: 2.5}
    assert seen[0].allowed_token_ids == (1, 17)
