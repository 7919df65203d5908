"""All fields of a body reach the worker, and all results appear in polls and streams."""

import json
import zlib
from typing import Any, cast

import redis

from api.schemas.requests import TaskBody
from api.submission import estimate_cost
from tests.api.api_client import ApiClient
from tests.api.conftest import CARD, HandWorker, Submit
from tokenmill.client.sse import frames as parse
from tokenmill.protocol import keys
from tokenmill.protocol.messages import GenerateRequest, LogEntry, TaskError, encode
from tokenmill.protocol.records import ModelCard, Write

FIELDS = {
    "n": 3, "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1,
    "seed": 7, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5,
    "logit_bias": {"12": -3.5}, "allowed_token_ids": [1, 12], "bad_words": ["x"],
    "structured_outputs": {"json": {"type": "object", "properties": {}}}, "stop": ["a"],
    "stop_token_ids": [5], "include_stop_str_in_output": True, "ignore_eos": True,
    "skip_special_tokens": False, "logprobs": 0, "prompt_logprobs": 2,
}  # fmt: skip
LIMITS = {"queue_timeout_seconds": 5, "ttft_timeout_seconds": 6.5, "timeout_seconds": 7}
LOGPROBS = {"logprob": -0.5, "token": "a", "bytes": [97], "top": []}


def stored(redis_client: redis.Redis, task_id: str) -> Any:
    data = zlib.decompress(cast(bytes, redis_client.hget(f"rq:job:{task_id}", "data")))
    _, _, (payload,), _ = json.loads(data)
    return GenerateRequest.from_payload(payload)


def write(worker: HandWorker, task_id: str, first: Any, *entries: Any) -> None:
    owner = worker.owned[task_id].owner
    worker.store.publish([Write(task_id=task_id, owner=owner, first_seq=first, entries=entries)])


def test_every_field_reaches_the_worker(submit: Submit, redis_client: redis.Redis) -> None:
    task_id = submit(**FIELDS, **LIMITS, cache_salt="s")
    request = stored(redis_client, task_id)
    assert request.sampling == FIELDS
    assert (request.cache_salt, request.timeout_seconds) == ("s", 7)
    run = redis_client.hgetall(keys.run(task_id))
    assert run[b"n"] == b"3"
    assert {name: float(run[name.encode()]) for name in LIMITS} == LIMITS


def test_unset_fields_are_not_sent(submit: Submit, redis_client: redis.Redis) -> None:
    request = stored(redis_client, submit(n=None, logit_bias=None, timeout_seconds=None))
    assert request.sampling.keys() == {"seed"}
    assert request.timeout_seconds is None


def test_the_cost_counts_each_output(card: ModelCard) -> None:
    def cost(**fields: Any) -> Any:
        return estimate_cost(TaskBody.model_validate({"prompt_token_ids": [1] * 10, **fields}), CARD)

    assert (cost(max_tokens=20), cost(max_tokens=20, n=3)) == (30, 70)
    assert cost(n=2) == 10 + 2 * 90, "with the prompt, which is one, neither is longer than the model"


def test_all_outputs_are_shown_from_the_start(client: ApiClient, submit: Submit, worker: HandWorker) -> None:
    """vllm#10852: fewer than n."""
    task_id = submit(n=3)
    assert [one["index"] for one in client.get(f"/v1/tasks/{task_id}").json["outputs"]] == [0, 1, 2]
    worker.claim()
    worker.start(task_id)
    failure = TaskError(type="server_error", code="engine_error", message="of 1")
    write(
        worker, task_id, 0, LogEntry.of_token(7, "a", 2, {"logprobs": LOGPROBS}),
        LogEntry.of_end("", "error", index=1, done=False, error=failure),
    )  # fmt: skip
    task = client.get(f"/v1/tasks/{task_id}").json
    assert [one["finish_reason"] for one in task["outputs"]] == [None, "error", None]
    assert (task["status"], task["error"]) == ("in_progress", None), "the task has not ended"
    assert task["usage"]["completion_tokens"] == 1
    assert [one["logprobs"] for one in task["outputs"]] == [None, None, [LOGPROBS]]


def test_a_stream_has_logprobs_and_the_end_of_each_output(
    client: ApiClient, submit: Submit, worker: HandWorker
) -> None:
    task_id = submit(n=2)
    worker.claim()
    prompt = [None, {"id": 5, **LOGPROBS}]
    failure = TaskError(type="server_error", code="engine_error", message="of 1")
    entries = [
        LogEntry.of_token(7, "a", 0, {"logprobs": LOGPROBS, "prompt_logprobs": prompt}),
        LogEntry.of_end("", "error", index=1, done=False, error=failure),
    ]
    write(worker, task_id, 0, *entries)
    client.post(f"/v1/tasks/{task_id}/cancel")
    body = client.get(f"/v1/tasks/{task_id}/events").data
    frames = list(parse(body.splitlines(keepends=True)))
    assert [frame.event for frame in frames] == ["token", "end", "finished"]
    for seq, entry in enumerate(entries):
        assert json.loads(frames[seq].data) == json.loads(encode(entry.to_event(task_id, seq)))
    assert client.get(f"/v1/tasks/{task_id}").json["prompt_logprobs"] == prompt
