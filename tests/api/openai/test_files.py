"""Files and batches of tenants: who sees what, limits, and what is deleted when."""

import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from api.batches.runners import Sweeper
from api.file_storage import FileStorage
from tests.api.api_client import ApiClient, ApiReply, client_of
from tests.api.conftest import MakeApp
from tokenmill.protocol.batch_records import BatchRequest
from tokenmill.protocol.store.batch_store import (
    MAX_OPEN_BATCHES,
    BatchLost,
    BatchStore,
    Progress,
    is_done,
)
from tokenmill.protocol.store.file_index import FileIndex
from tokenmill.settings.declarations import ApiSettings

ANN, BOB = ({"Authorization": f"Bearer {key}"} for key in ("key-of-ann-0123456789", "key-of-bob-0123456789"))
KEYS = "ann:key-of-ann-0123456789,bob:key-of-bob-0123456789"
CREATE = {"endpoint": "/v1/completions", "completion_window": "24h"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "files"


@pytest.fixture
def client(redis_url: str, make_app: MakeApp, directory: Path) -> ApiClient:
    settings = ApiSettings(redis_url=redis_url, api_keys=KEYS, files_url=str(directory))
    return client_of(make_app(settings))


@pytest.fixture
def index(redis_client: redis.Redis) -> FileIndex:
    return FileIndex(redis_client)


@pytest.fixture
def batches(redis_client: redis.Redis) -> BatchStore:
    return BatchStore(redis_client)


def upload(client: ApiClient, headers: Any = ANN, content: bytes = b"{}", **fields: Any) -> ApiReply:
    form = {"purpose": "batch", "file": (io.BytesIO(content), "in.jsonl"), **fields}
    given = {name: value for name, value in form.items() if value is not None}
    return client.post("/v1/files", data=given, headers=headers, content_type="multipart/form-data")


def test_files_and_batches_belong_to_their_tenant(client: ApiClient) -> None:
    file_id = upload(client).json["id"]
    created = client.post("/v1/batches", json={**CREATE, "input_file_id": file_id}, headers=ANN)
    assert created.status_code == 200, created.text
    batch_id = created.json["id"]

    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{batch_id}"):
        assert client.get(path, headers=ANN).status_code == 200
        assert client.get(path, headers=BOB).status_code == 404
        assert client.get(path).status_code == 401
    assert client.post(f"/v1/batches/{batch_id}/cancel", headers=BOB).status_code == 404
    assert client.delete(f"/v1/files/{file_id}", headers=BOB).status_code == 404
    refused = client.post("/v1/batches", json={**CREATE, "input_file_id": file_id}, headers=BOB)
    assert (refused.status_code, refused.json["error"]["param"]) == (404, "input_file_id")
    for path in ("/v1/files", "/v1/batches"):
        assert client.get(path, headers=BOB).json["data"] == []
        assert len(client.get(path, headers=ANN).json["data"]) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": None}, "purpose"),
        ({"file": None}, "file"),
        ({"expires_after[seconds]": "7200"}, "expires_after.anchor"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "created_at"}, "expires_after.seconds"),
    ],
)
def test_a_form_that_is_not_valid_is_refused(
    client: ApiClient, directory: Path, fields: dict[str, Any], param: str
) -> None:
    reply = upload(client, **fields)

    assert (reply.status_code, reply.json["error"]["param"]) == (400, param)
    assert not directory.exists() or not list(directory.iterdir())


def test_other_bodies_are_refused(client: ApiClient) -> None:
    assert client.post("/v1/files", json={}, headers=ANN).status_code == 415
    broken = client.post(
        "/v1/files", data=b"--x\r\n", headers=ANN, content_type="multipart/form-data; boundary=y"
    )
    assert broken.status_code == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("completion_window", "soon"),
        ("completion_window", "8d"),
        ("completion_window", "0s"),
        ("endpoint", "/v1/embeddings"),
        ("metadata", {"a": 1}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 1}),
    ],
)
def test_a_batch_that_is_not_valid_is_refused(client: ApiClient, field: str, value: Any) -> None:
    body = {**CREATE, "input_file_id": upload(client).json["id"], field: value}
    reply = client.post("/v1/batches", json=body, headers=ANN)

    assert reply.status_code == 400
    assert reply.json["error"]["param"].startswith(field)


def test_a_tenant_may_have_so_many_open_batches(client: ApiClient) -> None:
    body = {**CREATE, "input_file_id": upload(client).json["id"]}
    for _ in range(MAX_OPEN_BATCHES):
        assert client.post("/v1/batches", json=body, headers=ANN).status_code == 200

    assert client.post("/v1/batches", json=body, headers=ANN).status_code == 429
    other = {**CREATE, "input_file_id": upload(client, BOB).json["id"]}
    assert client.post("/v1/batches", json=other, headers=BOB).status_code == 200


def test_pages_follow_one_another(client: ApiClient) -> None:
    ids = [upload(client, content=b"%d" % number).json["id"] for number in range(5)]
    seen: list[str] = []
    after = ""
    while True:
        page = client.get(f"/v1/files?limit=2&order=asc&after={after}", headers=ANN).json
        seen += [file["id"] for file in page["data"]]
        if not page["has_more"]:
            break
        after = page["last_id"]

    assert sorted(seen) == sorted(ids)


def test_files_expire(client: ApiClient, index: FileIndex, batches: BatchStore, directory: Path) -> None:
    sweeper = Sweeper(index, FileStorage(str(directory)), batches)
    gone, kept = (upload(client).json["id"] for _ in range(2))
    record = index.get(gone)
    assert record is not None
    index.put(replace(record, expires_at=time.time() - 1))

    assert client.get(f"/v1/files/{gone}", headers=ANN).status_code == 404
    assert [file["id"] for file in client.get("/v1/files", headers=ANN).json["data"]] == [kept]
    sweeper.delete_expired()
    assert [path.name for path in directory.iterdir()] == [kept]


def test_the_input_of_an_open_batch_does_not_expire(
    client: ApiClient, index: FileIndex, batches: BatchStore, directory: Path
) -> None:
    file_id = upload(client).json["id"]
    client.post("/v1/batches", json={**CREATE, "input_file_id": file_id}, headers=ANN)
    record = index.get(file_id)
    assert record is not None
    index.put(replace(record, expires_at=time.time() - 1))

    Sweeper(index, FileStorage(str(directory)), batches).delete_expired()

    assert [path.name for path in directory.iterdir()] == [file_id]


def test_content_without_a_record_is_deleted(
    client: ApiClient, index: FileIndex, batches: BatchStore, directory: Path
) -> None:
    file_id = upload(client).json["id"]
    for name in ("file-orphan", f"{file_id}.part-1", "batch_unknown.output.1"):
        (directory / name).write_bytes(b"x")
    sweeper = Sweeper(index, FileStorage(str(directory)), batches)

    sweeper.delete_orphans()
    assert len(list(directory.iterdir())) == 4
    sweeper.delete_orphans(age_seconds=0)

    assert [path.name for path in directory.iterdir()] == [file_id]


def make_batch(client: ApiClient, headers: Any = ANN) -> str:
    body = {**CREATE, "input_file_id": upload(client, headers).json["id"]}
    return str(client.post("/v1/batches", json=body, headers=headers).json["id"])


def test_one_runner_owns_a_batch(client: ApiClient, batches: BatchStore) -> None:
    batch_id = make_batch(client)
    taken = batches.take("first")
    assert taken is not None
    assert taken.request.id == batch_id
    assert batches.take("second") is None

    batches.update(batch_id, "first", Progress(lines=[0, 9], completed=2))
    with pytest.raises(BatchLost):
        batches.update(batch_id, "second", Progress(lines=[1], completed=1))
    batches.release(batch_id, "second")
    assert batches.take("second") is None
    batches.release(batch_id, "first")
    again = batches.take("second")

    assert again is not None
    assert again.completed == 2
    done = batches.done_lines(batch_id)
    assert [number for number in range(20) if is_done(done, number)] == [0, 9]
    with pytest.raises(BatchLost):
        batches.finish(batch_id, "first", 60, {"status": "completed"})


def test_tenants_take_turns(client: ApiClient, batches: BatchStore) -> None:
    """The second batch to be taken is that of the other tenant, although it was created last."""
    for _ in range(3):
        make_batch(client)
    last = make_batch(client, BOB)

    first, second = batches.take("1"), batches.take("2")

    assert first is not None
    assert second is not None
    assert second.request.id == last


def test_a_record_of_a_newer_version_is_read() -> None:
    request = BatchRequest(
        id="batch_1", tenant="t", tenant_name="t", input_file_id="f", endpoint="/v1/completions",
        completion_window="24h", created_at=1, expires_at=2, output_seconds=3,
    )  # fmt: skip

    assert BatchRequest.from_json(request.to_json()[:-1] + ', "newer": 1}') == request
