"""`GET /v1/tasks`, `?include=prompt`, `DELETE`, `GET /v1/queue` and `GET /v1/workers`."""

from typing import Any

import pytest
import redis

from api.schemas.replies import Queue, TaskList, WorkerList
from tests.api.api_client import ApiClient, client_of
from tests.api.conftest import HandWorker, MakeApp, Submit
from tokenmill.protocol import keys
from tokenmill.settings.declarations import ApiSettings

KEYS = "a:key-of-tenant-a-0123456789,b:key-of-tenant-b-0123456789"


def ids_of(reply: Any) -> list[str]:
    assert reply.status_code == 200
    TaskList.model_validate(reply.json)
    return [task["id"] for task in reply.json["data"]]


def test_the_newest_tasks_come_first(client: ApiClient, submit: Submit, worker: HandWorker) -> None:
    ids = [submit(metadata={"n": n}) for n in range(3)]
    worker.run("a", "b")
    reply = client.get("/v1/tasks")
    assert ids_of(reply) == ids[::-1]
    assert (reply.json["has_more"], reply.json["next"]) == (False, None)
    ended = reply.json["data"][2]
    polled = client.get(f"/v1/tasks/{ids[0]}").json
    assert ended == {name: value for name, value in polled.items() if name in ended}
    assert ended["status"] == "completed"
    assert ended["usage"]["completion_tokens"] == 2
    assert "outputs" not in ended


def test_pages(client: ApiClient, submit: Submit) -> None:
    ids = [submit() for _ in range(5)]
    seen: list[str] = []
    after = ""
    while True:
        reply = client.get(f"/v1/tasks?limit=2{after}")
        found = ids_of(reply)
        assert len(found) <= 2
        seen += found
        if not reply.json["has_more"]:
            break
        after = f"&after={reply.json['next']}"
    assert seen == ids[::-1]


def test_filters(client: ApiClient, submit: Submit) -> None:
    plain = submit()
    red = submit(metadata={"colour": "red", "n": 1})
    blue = submit(metadata={"colour": "blue", "n": 1})
    client.post(f"/v1/tasks/{blue}/cancel")
    assert ids_of(client.get("/v1/tasks?status=cancelled")) == [blue]
    assert ids_of(client.get("/v1/tasks?status=queued")) == [red, plain]
    assert ids_of(client.get("/v1/tasks?metadata.colour=red")) == [red]
    assert ids_of(client.get("/v1/tasks?metadata.n=1")) == [blue, red]
    assert ids_of(client.get("/v1/tasks?metadata.n=1&metadata.colour=blue&status=queued")) == []
    created = client.get(f"/v1/tasks/{red}").json["created_at"]
    assert plain not in ids_of(client.get(f"/v1/tasks?created_after={created}"))
    assert ids_of(client.get(f"/v1/tasks?created_before={created - 1}")) == []
    model = client.get(f"/v1/tasks/{red}").json["model"]
    assert len(ids_of(client.get("/v1/tasks", query_string={"model": model}))) == 3
    assert ids_of(client.get("/v1/tasks?model=another")) == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("status=running", "status"),
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("after=5", "after"),
        ("created_after=soon", "created_after"),
        ("created_before=nan", "created_before"),
        ("state=queued", "state"),
        ("metadata.=x", "metadata."),
        ("metadata.a=1&metadata.a=2", "metadata.a"),
        ("status=queued&status=failed", "status"),
    ],
)
def test_bad_queries_are_refused_by_name(client: ApiClient, query: str, param: str) -> None:
    reply = client.get(f"/v1/tasks?{query}")
    assert reply.status_code == 400
    assert reply.json["error"]["param"] == param


def test_a_call_looks_at_a_bounded_number_of_tasks(
    client: ApiClient, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.routes.task_list.MAX_EXAMINED", 10)
    wanted = submit(metadata={"wanted": True})
    for _ in range(12):
        submit()
    first = client.get("/v1/tasks?metadata.wanted=true")
    assert ids_of(first) == []
    assert first.json["has_more"]
    second = client.get(f"/v1/tasks?metadata.wanted=true&after={first.json['next']}")
    assert ids_of(second) == [wanted]
    assert not second.json["has_more"]


def test_a_tenant_sees_and_deletes_its_own_tasks_only(make_app: MakeApp, redis_url: str) -> None:
    client = client_of(make_app(ApiSettings(redis_url=redis_url, api_keys=KEYS)))
    a = {"Authorization": "Bearer key-of-tenant-a-0123456789"}
    b = {"Authorization": "Bearer key-of-tenant-b-0123456789"}
    task_id = client.post("/v1/tasks", json={"prompt": "x"}, headers=a).json["id"]
    assert ids_of(client.get("/v1/tasks", headers=a)) == [task_id]
    assert ids_of(client.get("/v1/tasks", headers=b)) == []
    assert client.delete(f"/v1/tasks/{task_id}", headers=b).status_code == 404
    for path in ("/v1/tasks", "/v1/queue", "/v1/workers"):
        assert client.get(path).status_code == 401


def test_the_request_is_returned_on_demand(client: ApiClient) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    task_id = client.post("/v1/tasks", json={"messages": messages, "max_tokens": 5, "seed": 3}).json["id"]
    assert client.get(f"/v1/tasks/{task_id}").json["request"] is None
    found = client.get(f"/v1/tasks/{task_id}?include=prompt").json["request"]
    assert found["messages"] == messages
    assert (found["max_tokens"], found["seed"]) == (5, 3)
    assert "prompt" not in found
    assert client.get(f"/v1/tasks/{task_id}?include=all").status_code == 400


def test_delete_cancels_a_task_and_erases_an_ended_one(
    client: ApiClient, submit: Submit, redis_client: redis.Redis
) -> None:
    task_id = submit()
    reply = client.delete(f"/v1/tasks/{task_id}")
    assert (reply.status_code, reply.json["status"]) == (200, "cancelled")
    reply = client.delete(f"/v1/tasks/{task_id}")
    assert (reply.status_code, reply.data) == (204, b"")
    assert not redis_client.exists(keys.run(task_id), keys.log(task_id))
    for call in (client.get, client.delete):
        assert call(f"/v1/tasks/{task_id}").status_code == 404
    assert client.get(f"/v1/tasks/{task_id}/events").status_code == 404


def test_the_queue(client: ApiClient, submit: Submit, worker: HandWorker) -> None:
    empty = client.get("/v1/queue").json
    assert (empty["waiting"], empty["running"], empty["oldest_seconds"]) == (0, 0, None)
    submit(max_tokens=10), submit(priority=0, max_tokens=10)
    worker.report("ready")
    worker.claim()
    queue = Queue.model_validate(client.get("/v1/queue").json)
    assert (queue.waiting, queue.running, queue.ready_workers) == (1, 1, 1)
    assert queue.waiting_by_priority == {"0": 0, "1": 0, "2": 1, "3": 0, "4": 0}
    assert queue.waiting_tokens > 10
    assert queue.oldest_seconds is not None


def test_the_workers(client: ApiClient, worker: HandWorker) -> None:
    assert client.get("/v1/workers").json == {"object": "list", "data": []}
    worker.report("loading")
    (found,) = WorkerList.model_validate(client.get("/v1/workers").json).data
    assert found.state == "loading"
