"""`GET /v1/workers/{name}/steps` and `/trace`: replay, live, other tenants, slots."""

import json
from typing import Any

import pytest
import redis

from tests.api.api_client import ApiClient
from tests.api.routes.test_streaming import Stream
from tokenmill.protocol import keys, steps
from tokenmill.protocol.records import WorkerRecord
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

URL = "/v1/workers/w/steps"
LANES = [["mine", 0, "decode", 1, "", "default"], ["theirs", 0, "waiting", 0, "behind", "other"]]
SECONDS = {"total": 0.01, "execute": 0.008}


def add(client: "redis.Redis", number: int) -> str:
    step = {
        "step": number,
        "at": 1000.0 + number,
        "budget": {"tokens": 64, "used": 1, "seqs": 1, "max_seqs": 4},
        "kv": {"used": 1, "total": 9},
        "seconds": SECONDS,
        "lanes": LANES,
    }
    entry: Any = client.xadd(keys.steps("w"), {steps.FIELD: steps.encode(step)})
    return str(entry.decode())


@pytest.fixture(autouse=True)
def worker(store: TaskStore, settings: ApiSettings) -> None:
    record = WorkerRecord(
        name="w",
        model=settings.public_model,
        slug=settings.slug,
        state="ready",
        started_at=0.0,
        running=0,
        waiting=0,
        max_num_seqs=4,
    )
    store.put_worker(record, ttl_seconds=60)


def numbers(frames: Any) -> list[int]:
    return [json.loads(frame.data)["step"] for frame in frames]


def test_recorded_steps_are_replayed_then_live_ones_follow(
    client: ApiClient, redis_client: "redis.Redis"
) -> None:
    for number in (1, 2, 3):
        add(redis_client, number)
    stream = Stream(client, f"{URL}?last=2")
    frames = stream.next(2)
    assert [frame.event for frame in frames] == ["step", "step"]
    assert numbers(frames) == [2, 3]
    assert redis_client.exists(keys.steps_watched("w"))

    last = add(redis_client, 4)
    (frame,) = stream.next(1)
    assert (frame.id, numbers([frame])) == (last, [4])
    stream.close()


def test_ids_of_other_tenants_are_hidden(client: ApiClient, redis_client: "redis.Redis") -> None:
    add(redis_client, 1)
    stream = Stream(client, URL)
    (frame,) = stream.next(1)
    assert json.loads(frame.data)["lanes"] == [
        {"task": "mine", "index": 0, "state": "decode", "tokens": 1, "reason": None},
        {"task": None, "index": 0, "state": "waiting", "tokens": 0, "reason": "behind"},
    ]
    assert "theirs" not in frame.data
    stream.close()


def test_a_client_resumes_after_its_last_event(client: ApiClient, redis_client: "redis.Redis") -> None:
    first, second = add(redis_client, 1), add(redis_client, 2)
    add(redis_client, 3)
    for url, headers in ((URL, {"Last-Event-ID": second}), (f"{URL}?after={second}", {})):
        stream = Stream(client, url, **headers)
        assert numbers(stream.next(1)) == [3]
        stream.close()
    stream = Stream(client, f"{URL}?after={second}", **{"Last-Event-ID": first})
    assert numbers(stream.next(2)) == [2, 3]
    stream.close()


def test_clients_share_one_connection(client: ApiClient, redis_client: "redis.Redis") -> None:
    add(redis_client, 1)
    streams = [Stream(client, URL)]
    assert numbers(streams[0].next(1)) == [1]
    alone: Any = redis_client.client_list()
    streams += [Stream(client, URL) for _ in range(5)]
    assert [numbers(stream.next(1)) for stream in streams[1:]] == [[1]] * 5
    together: Any = redis_client.client_list()
    assert {one["id"] for one in together} == {one["id"] for one in alone}
    for stream in streams:
        stream.close()


def test_an_unknown_worker_and_a_bad_id_are_refused(client: ApiClient) -> None:
    reply = client.get("/v1/workers/nobody/steps")
    assert (reply.status_code, reply.json["error"]["code"]) == (404, "worker_not_found")
    assert client.get(f"{URL}?after=x").status_code in (400, 422)
    assert client.get(URL, headers={"Last-Event-ID": "1;2"}).status_code in (400, 422)
    assert client.get(f"{URL}?last=-1").status_code in (400, 422)


def test_a_trace_merges_steps_of_one_state(client: ApiClient, redis_client: "redis.Redis") -> None:
    add(redis_client, 1)
    add(redis_client, 2)
    events = client.get("/v1/workers/w/trace").json["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [one["name"] for one in slices if one["tid"] == 0] == ["step 1", "step 2"]
    (lane,) = [one for one in slices if one["tid"] == 1]
    assert (lane["name"], round(lane["dur"])) == ("decode", 1_010_000)
    assert "theirs" not in json.dumps(events)
