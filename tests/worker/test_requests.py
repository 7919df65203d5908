"""Requests through the whole worker: valid ones are served, invalid ones fail alone with a reason."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.job import Job
from rq.serializers import JSONSerializer

from engine.sequence import Sequence
from tests.worker.fakes import (
    MODEL,
    SLUG,
    FakeRunner,
    WordTokenizer,
    build_engine,
    end_of,
    ended,
    expected_tokens,
    job_data,
    served_model,
    submit,
    tokens_of,
    until,
)
from tests.worker.running import running
from tokenmill.protocol import keys
from tokenmill.protocol.messages import FinishedEvent
from tokenmill.protocol.records import Write
from tokenmill.protocol.store.task_store import TaskStore


def test_requests_end_with_text_and_result(redis_url: str, redis_client: "redis.Redis") -> None:
    tasks = [submit(redis_client, prompt_token_ids=(n + 1, 2), sampling={"max_tokens": 7}) for n in range(20)]

    with running(redis_url):
        logs = [ended(redis_client, task) for task in tasks]

    for number, (task, events) in enumerate(zip(tasks, logs, strict=True)):
        expected = expected_tokens([number + 1, 2], 7)
        assert tokens_of(events) == expected
        job = Job.fetch(task, connection=redis_client, serializer=JSONSerializer)
        assert job.get_status() == "finished"
        assert job.return_value() == {
            "outputs": [
                {
                    "index": 0,
                    "text": "".join(f"<{token}>" for token in expected),
                    "token_ids": expected,
                    "finish_reason": "length",
                    "logprobs": None,
                }
            ],
            "usage": {
                "prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9, "cached_tokens": 0,
            },
            "prompt_logprobs": None,
        }  # fmt: skip


def test_one_worker_serves_many_requests_at_once(redis_url: str, redis_client: "redis.Redis") -> None:
    """More requests than slots: all finish, and no step runs more than the slots."""
    engine = build_engine(max_num_seqs=4)
    tasks = [submit(redis_client, prompt_token_ids=(n + 1,)) for n in range(30)]

    with running(redis_url, engine):
        for number, task in enumerate(tasks):
            assert tokens_of(ended(redis_client, task)) == expected_tokens([number + 1], 5)


def test_bad_prompts_fail_alone_and_name_the_field(redis_url: str, redis_client: "redis.Redis") -> None:
    """vllm PR9634, vllm#7283, aider#3693: a request that cannot be computed must not affect its batch."""
    greedy = {"max_tokens": 5}
    bad = {
        "prompt_token_ids": [
            submit(redis_client, prompt_token_ids=ids)
            for ids in ((1, -1), (1, 1000), (5279552648203111001,), (1, 1.5), (True,), ())
        ],
        "prompt": [
            submit(redis_client, prompt="a \ud83d b"),
            submit(redis_client, prompt=""),
            submit(redis_client, prompt="a " * 200),
        ],
        "messages": [
            submit(redis_client, messages=()),
            submit(redis_client, messages=({"role": "user", "content": "\udc00"},)),
            submit(redis_client, messages=({"role": "pirate", "content": "ahoy"},)),
            submit(redis_client, messages=({"role": "user"},)),
        ],
        "temperature": [submit(redis_client, sampling={"temperature": -1})],
        "stop_token_ids": [submit(redis_client, sampling={"stop_token_ids": [99999]})],
        "max_tokens": [submit(redis_client, sampling={"max_tokens": "5"})],
        "stop": [submit(redis_client, sampling={"stop": ["\ud83d"]})],
        "best_of": [submit(redis_client, sampling={"best_of": 3})],
    }
    good = [submit(redis_client, prompt="some words here", sampling=greedy) for _ in range(4)]

    with running(redis_url):
        for param, tasks in bad.items():
            for task in tasks:
                end = end_of(redis_client, task)
                assert (end.seq, end.finish_reason) == (0, "error")
                assert end.error is not None
                assert (end.error["param"], end.error["type"]) == (param, "invalid_request_error")
                job = Job.fetch(task, connection=redis_client, serializer=JSONSerializer)
                assert job.get_status() == "failed"
                result = job.latest_result()
                assert result is not None
                assert str(end.error["message"]) in str(result.exc_string)
        for task in good:
            assert tokens_of(ended(redis_client, task)) == expected_tokens([4, 5, 4], 5)


def test_messages_are_rendered_by_the_template(redis_url: str, redis_client: "redis.Redis") -> None:
    task = submit(redis_client, messages=({"role": "user", "content": "four"},))

    with running(redis_url):
        assert tokens_of(ended(redis_client, task)) == expected_tokens([1, 4, 2], 5)


def test_messages_without_a_template_are_refused(redis_url: str, redis_client: "redis.Redis") -> None:
    """vllm PR45628: a model without a chat template is reported to the client, not as a server error."""
    tokenizer = WordTokenizer()
    tokenizer.has_chat_template = False
    task = submit(redis_client, messages=({"role": "user", "content": "hello"},))

    with running(redis_url, model=served_model(tokenizer)):
        end = end_of(redis_client, task)

    assert end.error is not None
    assert end.error["param"] == "messages"
    assert "chat template" in end.error["message"]


def test_an_unknown_function_is_refused_and_not_called(
    redis_url: str, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    """Anyone with access to Redis can name any importable function in JSON."""
    witness = tmp_path / "called"
    data = zlib.compress(json.dumps(["os.mkdir", None, [str(witness)], {}]).encode())
    foreign = submit(redis_client, data)
    broken = submit(redis_client, b"\x80\x05pickled")
    odd = submit(redis_client, job_data({"id": "x", "model": MODEL, "surprise": 1}))

    with running(redis_url):
        codes = [(end_of(redis_client, task).error or {})["code"] for task in (foreign, broken, odd)]

    assert codes == ["unknown_function", "unreadable_request", "unreadable_request"]
    assert not witness.exists()


def test_a_tokenizer_error_fails_only_its_request(
    redis_url: str, redis_client: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    class Panic(BaseException):
        """How Python sees a panic in Rust."""

    class Fragile(WordTokenizer):
        def encode(self, text: str) -> list[int]:
            if "boom" in text:
                raise Panic("secret detail")
            return super().encode(text)

    bad, good = submit(redis_client, prompt="boom"), submit(redis_client, prompt="fine")

    with running(redis_url, model=served_model(Fragile())):
        error = end_of(redis_client, bad).error
        assert tokens_of(ended(redis_client, good)) == expected_tokens([4], 5)

    assert error is not None
    assert error["code"] == "internal_error"
    assert "secret" not in json.dumps(error)
    assert "secret detail" in caplog.text


def test_a_sampler_error_fails_only_its_request(redis_url: str, redis_client: "redis.Redis") -> None:
    """mstar#207, vllm#5822: one request's exception must not fail the batch or kill the loop."""
    runner = FakeRunner()

    def fault(sequence: Sequence) -> None:
        if sequence.token_ids[0] == 66 and sequence.num_output_tokens == 2:
            raise ValueError("no such token")

    runner.sample_fault = fault
    mates = [submit(redis_client, prompt_token_ids=(n + 1,)) for n in range(3)]
    bad = submit(redis_client, prompt_token_ids=(66,))

    with running(redis_url, build_engine(runner)):
        events = ended(redis_client, bad)
        for number, mate in enumerate(mates):
            assert tokens_of(ended(redis_client, mate)) == expected_tokens([number + 1], 5)

    assert tokens_of(events) == expected_tokens([66], 2)
    end = events[-1]
    assert isinstance(end, FinishedEvent)
    assert end.finish_reason == "error"
    assert end.error is not None
    assert end.error["code"] == "engine_error"


def test_a_job_is_never_finished_without_a_result(redis_url: str, redis_client: "redis.Redis") -> None:
    """rq#1724: `finished` was visible before the result was."""
    tasks = [submit(redis_client, prompt_token_ids=(n + 1,)) for n in range(100)]
    waiting = set(tasks)

    with running(redis_url):

        def look() -> bool:
            for task in tuple(waiting):
                job = Job.fetch(task, connection=redis_client, serializer=JSONSerializer)
                if job.get_status() == "finished":
                    value: dict[str, Any] = job.return_value() or {}
                    assert value["outputs"][0]["finish_reason"] == "length"
                    assert value["usage"]["completion_tokens"] == 5
                    waiting.discard(task)
            return not waiting

        until(look, "all are finished")


def test_a_task_stores_what_it_is_run_with(redis_url: str, redis_client: "redis.Redis") -> None:
    """For its readers, and for a worker that resumes it."""
    task = submit(redis_client, sampling={"max_tokens": 10**9})
    with running(redis_url):
        ended(redis_client, task)

    run = redis_client.hgetall(keys.run(task))
    assert json.loads(run[b"output_limit"])["requested"] == 10**9
    assert json.loads(run[b"output_limit"])["bound_by"] == "output_size"
    assert json.loads(run[b"sampling_defaults"]) == {}


def test_a_claim_returns_the_defaults_of_the_first_attempt(redis_client: "redis.Redis") -> None:
    task = submit(redis_client)
    store = TaskStore(redis_client)
    first = store.claim(SLUG, worker="w", max_tasks=1, lease_seconds=60)[0]
    assert first.sampling_defaults == ""
    store.publish([Write(task_id=task, owner=first.owner, facts={"sampling_defaults": '{"top_k": 3}'})])
    store.hand_back({task: first.owner})
    again = store.claim(SLUG, worker="w", max_tasks=1, lease_seconds=60)[0]
    assert json.loads(again.sampling_defaults) == {"top_k": 3}
