"""Polling a task, waiting for it, cancelling it, and tasks that do not exist."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from api.schemas.replies import Task
from tests.api.api_client import ApiClient, client_of
from tests.api.conftest import HandWorker, MakeApp, Submit
from tokenmill.protocol import keys, naming
from tokenmill.protocol.messages import TaskError
from tokenmill.settings.declarations import ApiSettings

ERROR = TaskError(type="server_error", code="engine_error", message="it broke", param="prompt")


def test_a_waiting_task_shows_its_position(client: ApiClient, submit: Submit, worker: HandWorker) -> None:
    """Position, tokens ahead and reason, while the task is queued in Redis."""
    first, second, urgent = submit(max_tokens=10), submit(max_tokens=20), submit(priority=0, max_tokens=30)
    worker.report("ready")
    queues = {name: client.get(f"/v1/tasks/{name}").json["queue"] for name in (first, second, urgent)}
    assert [queues[name]["position"] for name in (urgent, first, second)] == [0, 1, 2]
    assert queues[urgent]["waiting_for"] == "capacity"
    assert queues[second]["waiting_for"] == "behind"
    assert queues[second]["tokens_ahead"] > queues[first]["tokens_ahead"] > 0
    # No task has run yet, so there is no rate to estimate a time from.
    assert queues[second]["eta_seconds"] is None


def test_the_eta_comes_from_the_rate(client: ApiClient, submit: Submit, worker: HandWorker) -> None:
    submit(max_tokens=60), submit(max_tokens=10)
    worker.report("ready")
    worker.run("x")
    submit(max_tokens=10)
    last = submit(max_tokens=10)
    snapshot = worker.store.inspect(last)
    eta = client.get(f"/v1/tasks/{last}").json["queue"]["eta_seconds"]
    assert snapshot is not None
    assert snapshot.tokens_ahead
    assert snapshot.drain_rate
    assert eta == pytest.approx(snapshot.tokens_ahead / snapshot.drain_rate, abs=0.001)
    worker.report("draining")
    assert client.get(f"/v1/tasks/{last}").json["queue"]["eta_seconds"] is None


def test_a_claimed_task_shows_the_reason_of_the_scheduler(
    client: ApiClient, submit: Submit, worker: HandWorker
) -> None:
    task_id = submit()
    worker.claim()
    facts = {"waiting_for": "kv_blocks", "position": "3", "tokens_ahead": "70"}
    worker.store.publish([worker.write(task_id, facts=facts)])
    task = client.get(f"/v1/tasks/{task_id}").json
    assert task["status"] == "queued"
    assert (task["queue"]["position"], task["queue"]["tokens_ahead"]) == (3, 70)
    assert task["queue"]["waiting_for"] == "kv_blocks"


def test_a_task_that_was_handed_back_shows_its_position_again(
    client: ApiClient, submit: Submit, worker: HandWorker
) -> None:
    """It was scheduled once but waits again until a worker claims it."""
    task_id = submit()
    worker.claim()
    worker.start(task_id)
    worker.say(task_id, "half")
    worker.store.hand_back({task_id: worker.owned[task_id].owner})
    task = client.get(f"/v1/tasks/{task_id}").json
    assert (task["queue"]["position"], task["queue"]["waiting_for"]) == (0, "worker")
    assert task["outputs"][0]["text"] == "half"
    worker.claim()
    worker.start(task_id)
    assert client.get(f"/v1/tasks/{task_id}").json["queue"] is None


def test_a_task_that_was_preempted_shows_its_position_again(
    client: ApiClient, submit: Submit, worker: HandWorker
) -> None:
    task_id = submit()
    worker.claim()
    worker.start(task_id)
    facts = {"waiting_for": "kv_blocks", "position": "0", "tokens_ahead": "0"}
    worker.store.publish([worker.write(task_id, facts=facts)])
    queue = client.get(f"/v1/tasks/{task_id}").json["queue"]
    assert (queue["position"], queue["waiting_for"]) == (0, "kv_blocks")


def test_a_task_that_ended_while_it_waited_has_no_position(
    client: ApiClient, submit: Submit, worker: HandWorker
) -> None:
    task_id = submit()
    worker.claim()
    facts = {"waiting_for": "behind", "position": "3", "tokens_ahead": "70"}
    worker.store.publish([worker.write(task_id, facts=facts)])
    assert client.delete(f"/v1/tasks/{task_id}").json["queue"] is None


def test_a_running_task_shows_its_text_so_far(client: ApiClient, submit: Submit, worker: HandWorker) -> None:
    task_id = submit()
    worker.claim()
    worker.start(task_id, prompt_tokens=3)
    worker.say(task_id, "Hel", "lo \u4f60", "\n\U0001f600")
    reply = client.get(f"/v1/tasks/{task_id}")
    task = reply.json
    assert (task["status"], task["queue"], task["error"]) == ("in_progress", None, None)
    assert task["outputs"] == [
        {
            "index": 0,
            "text": "Hello \u4f60\n\U0001f600",
            "token_ids": [0, 1, 2],
            "finish_reason": None,
            "logprobs": None,
        }
    ]
    assert task["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "cached_tokens": 0,
    }  # fmt: skip
    assert task["timings"]["ttft_seconds"] >= task["timings"]["queue_seconds"] >= 0
    assert task["timings"]["total_seconds"] is None
    assert reply.headers["Retry-After"] == "1"
    assert reply.headers["Cache-Control"] == "no-store"


def test_a_finished_task_is_complete(client: ApiClient, submit: Submit, worker: HandWorker) -> None:
    """rq#1724: a status that says finished before the result is there."""
    task_id = submit()
    worker.run("a", "b")
    reply = client.get(f"/v1/tasks/{task_id}")
    assert reply.json["status"] == "completed"
    assert reply.json["outputs"] == [
        {"index": 0, "text": "ab", "token_ids": [0, 1], "finish_reason": "stop", "logprobs": None}
    ]
    assert reply.json["usage"]["completion_tokens"] == 2
    timings = reply.json["timings"]
    assert timings["total_seconds"] >= timings["ttft_seconds"] >= timings["queue_seconds"] >= 0
    assert "Retry-After" not in reply.headers
    Task.model_validate(reply.json, strict=True)


def test_a_failed_task_keeps_what_was_generated(
    client: ApiClient, submit: Submit, worker: HandWorker
) -> None:
    task_id = submit()
    worker.claim()
    worker.start(task_id)
    worker.say(task_id, "half")
    worker.finish(task_id, "error", ERROR)
    task = client.get(f"/v1/tasks/{task_id}").json
    assert task["status"] == "failed"
    assert task["error"] == ERROR.to_json()
    assert (task["outputs"][0]["text"], task["outputs"][0]["finish_reason"]) == ("half", "error")


class TestWaiting:
    def test_the_reply_comes_when_the_task_ends(
        self, client: ApiClient, submit: Submit, worker: HandWorker
    ) -> None:
        task_id = submit()
        worker.claim()
        worker.start(task_id)
        replies = []
        thread = threading.Thread(target=lambda: replies.append(client.get(f"/v1/tasks/{task_id}?wait=60")))
        thread.start()
        worker.say(task_id, "a")
        worker.finish(task_id)
        thread.join()
        assert replies[0].json["status"] == "completed"

    def test_a_wait_times_out(self, client: ApiClient, submit: Submit) -> None:
        reply = client.get(f"/v1/tasks/{submit()}?wait=0.2")
        assert (reply.status_code, reply.json["status"]) == (200, "queued")

    def test_a_lost_terminal_message_does_not_prolong_a_wait(
        self, client: ApiClient, submit: Submit, worker: HandWorker, redis_client: redis.Redis
    ) -> None:
        """The log is read after the silence, or at the latest when the wait ends."""
        task_id = submit()
        worker.claim()
        thread_replies = []
        thread = threading.Thread(
            target=lambda: thread_replies.append(client.get(f"/v1/tasks/{task_id}?wait=3"))
        )
        thread.start()
        redis_client.client_kill_filter(_type="pubsub")
        worker.finish(task_id)
        thread.join()
        assert thread_replies[0].json["status"] == "completed"

    @pytest.mark.parametrize("wait", ["-1", "soon", "nan", "inf", "1e400", "", "[]"])
    def test_a_bad_wait_is_refused(self, client: ApiClient, submit: Submit, wait: Any) -> None:
        reply = client.get(f"/v1/tasks/{submit()}?wait={wait}")
        assert reply.status_code == 400
        assert reply.json["error"]["param"] == "wait"

    def test_a_wait_without_a_slot_is_a_poll(self, redis_url: str, make_app: MakeApp) -> None:
        client = client_of(make_app(ApiSettings(redis_url=redis_url, max_streams=1)))
        task_id = client.post("/v1/tasks", json={"prompt": "x"}).json["id"]
        stream = client.get(f"/v1/tasks/{task_id}/events", buffered=False)
        next(stream.iter_encoded())
        assert client.get(f"/v1/tasks/{task_id}?wait=60").json["status"] == "queued"
        stream.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda client, url: client.post(f"{url}/cancel"),
        lambda client, url: client.post(f"{url}/cancel", json={}),
        lambda client, url: client.post(f"{url}/cancel", data=b"{", content_type="application/json"),
    ],
)
class TestCancelling:
    def test_a_waiting_task(self, client: ApiClient, submit: Submit, worker: HandWorker, call: Any) -> None:
        task_id = submit()
        for _ in range(2):
            reply = call(client, f"/v1/tasks/{task_id}")
            assert (reply.status_code, reply.json["status"]) == (200, "cancelled")
            assert reply.json["outputs"][0]["finish_reason"] == "cancelled"
            assert reply.json["error"] is None
        assert worker.claim() == []

    def test_a_running_task(self, client: ApiClient, submit: Submit, worker: HandWorker, call: Any) -> None:
        task_id = submit()
        worker.claim()
        worker.start(task_id)
        worker.say(task_id, "kept")
        reply = call(client, f"/v1/tasks/{task_id}")
        assert (reply.json["status"], reply.json["outputs"][0]["text"]) == ("cancelled", "kept")
        worker.say(task_id, "refused")
        assert client.get(f"/v1/tasks/{task_id}").json["outputs"][0]["text"] == "kept"

    def test_a_finished_task_stays_finished(
        self, client: ApiClient, submit: Submit, worker: HandWorker, call: Any
    ) -> None:
        task_id = submit()
        worker.run("a")
        assert call(client, f"/v1/tasks/{task_id}").json["status"] == "completed"


def calls_on(task_id: str) -> Iterator[Any]:
    url = f"/v1/tasks/{task_id}"
    yield "GET", url
    yield "GET", f"{url}?wait=60"
    yield "GET", f"{url}/events"
    yield "POST", f"{url}/cancel"
    yield "DELETE", url


@pytest.mark.parametrize(
    "task_id",
    [
        "0" * 31,
        "0" * 32,
        "0" * 12 + "a" * 20,
        "x" * 32,
        "A" * 32,
        "f" * 32,
        pytest.param(naming.new_task_id(naming.EARLIEST_TASK_TIME - 1), id="before the first release"),
        pytest.param(naming.new_task_id(time.time() + 86400), id="of tomorrow"),
        pytest.param(naming.new_task_id(time.time() - 7200).upper(), id="in upper case"),
        "..",
        "%00",
        "1" * 5000,
        "%F0%9F%98%80",
        "a b",
    ],
    ids=lambda value: ascii(value[:12]),
)
def test_an_unknown_task_is_not_found(client: ApiClient, task_id: str) -> None:
    """arq PR364, tornado-celery PR59: unknown jobs were a 500, or were waited for forever."""
    for method, url in calls_on(task_id):
        reply = client.open(url, method=method)
        assert reply.status_code == 404
        assert reply.json["error"]["type"] == "invalid_request_error"


def test_an_expired_task_is_gone(client: ApiClient) -> None:
    """romm#3195: a result that had expired was a 500."""
    task_id = naming.new_task_id(time.time() - 3700)
    for method, url in calls_on(task_id):
        reply = client.open(url, method=method)
        assert (reply.status_code, reply.json["error"]["code"]) == (410, "task_expired")


class TestShortRetention:
    @pytest.fixture
    def settings(self, redis_url: str) -> Any:
        return ApiSettings(redis_url=redis_url).model_copy(update={"retention_seconds": 0.1})

    def test_a_task_goes_from_finished_to_gone(
        self, client: ApiClient, redis_client: redis.Redis, settings: ApiSettings
    ) -> None:
        """romm#3195: result, events and cancel of an expired task."""
        task_id = client.post("/v1/tasks", json={"prompt": "x"}).json["id"]
        assert client.delete(f"/v1/tasks/{task_id}").json["status"] == "cancelled"
        while redis_client.exists(keys.run(task_id)):
            pass
        assert {client.open(url, method=method).status_code for method, url in calls_on(task_id)} == {410}
        assert not redis_client.exists(keys.log(task_id))
