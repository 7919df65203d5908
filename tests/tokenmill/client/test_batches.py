"""Both clients upload files, follow batches and read each result once, and repeat only what is safe."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tokenmill.cli.fake_service import Answer, FakeService, problem
from tests.tokenmill.client.either_client import Clock
from tokenmill.client.errors import Broken, NotFound, ServiceFailed, WaitTimedOut

pytestmark = pytest.mark.usefixtures("clean_environment")

Connect = Callable[..., Any]
AWAY = Answer(problem("store_unavailable", "away"), 503)
FILE = {
    "id": "file-1", "object": "file", "bytes": 9, "created_at": 5, "filename": "in.jsonl", "purpose": "batch",
}  # fmt: skip


def batch(status: str = "in_progress", **members: Any) -> dict[str, Any]:
    return {
        "id": "batch-1", "object": "batch", "endpoint": "/v1/completions", "errors": None, "status": status,
        "input_file_id": "file-1", "completion_window": "24h", "created_at": 5, "output_file_id": None,
        "error_file_id": None, "request_counts": {"total": 2, "completed": 1, "failed": 0}, **members,
    }  # fmt: skip


def line(custom_id: str, text: str) -> str:
    body = {"choices": [{"index": 0, "text": text}]}
    response = {"status_code": 200, "request_id": "r", "body": body}
    return json.dumps({"id": "x", "custom_id": custom_id, "response": response, "error": None}) + "\n"


def uploaded_lines(call: Any) -> list[dict[str, Any]]:
    """The lines of the file in a form."""
    assert call.headers["content-type"].startswith("multipart/form-data")
    assert b'name="purpose"\r\n\r\nbatch\r\n' in call.body
    content = next(part for part in call.body.split(b"\r\n") if part.startswith(b"{"))
    return [json.loads(found) for found in content.splitlines()]


def test_a_file_is_uploaded_from_a_path(service: FakeService, client: Any, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a"}\n{"custom_id": "b"}\n')
    service.will_answer(Answer(FILE), Answer(batch("validating")))

    created = client.batches.create(tmp_path / "in.jsonl", endpoint="/v1/completions", metadata={"job": "7"})

    assert (created.id, created.status, created.has_ended) == ("batch-1", "validating", False)
    assert uploaded_lines(service.calls[0]) == [{"custom_id": "a"}, {"custom_id": "b"}]
    assert b'filename="in.jsonl"' in service.calls[0].body
    assert service.calls[1].body == {
        "input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h",
        "metadata": {"job": "7"},
    }  # fmt: skip


def test_lines_are_completed(service: FakeService, client: Any) -> None:
    """A body alone gets its number as `custom_id`."""
    whole = {"custom_id": "mine", "method": "POST", "url": "/v1/completions", "body": {"prompt": "ä"}}
    service.will_answer(Answer(FILE), Answer(batch()))

    client.batches.create(iter([{"prompt": "a"}, whole]), endpoint="/v1/completions")

    first = {"custom_id": "0", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    assert uploaded_lines(service.calls[0]) == [first, whole]


def test_a_refused_upload_is_repeated_from_its_start(service: FakeService, client: Any) -> None:
    service.will_answer(AWAY, Answer(FILE), AWAY, Answer(batch()))

    client.batches.create([{"prompt": "a"}])

    first, second = service.calls[:2]
    assert uploaded_lines(first) == uploaded_lines(second)
    assert len(service.calls) == 4


@pytest.mark.parametrize("num_before", [0, 1])
def test_what_may_have_taken_effect_is_not_repeated(
    service: FakeService, client: Any, num_before: int
) -> None:
    """The upload, and the creation of the batch."""
    service.will_answer(*[Answer(FILE)] * num_before, Answer(FILE, breaks=True))

    with pytest.raises(Broken):
        client.batches.create([{"prompt": "a"}])

    assert len(service.calls) == num_before + 1


def test_a_missing_file_is_an_error_of_the_system(client: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        client.files.create(tmp_path / "missing")


def test_a_batch_is_a_handle(service: FakeService, client: Any, clock: Clock) -> None:
    service.will_answer(
        Answer(batch()),
        Answer(batch("validating")),
        AWAY,
        Answer(batch("in_progress")),
        Answer(batch("completed")),
        Answer(batch("cancelling")),
    )

    created = client.batches.get("batch-1")
    done = created.refresh().wait()

    assert (done.status, done.has_ended, done.request_counts.completed) == ("completed", True, 1)
    assert done.cancel().status == "cancelling"
    assert [(call.method, call.path) for call in service.calls[-2:]] == [
        ("GET", "/v1/batches/batch-1"),
        ("POST", "/v1/batches/batch-1/cancel"),
    ]
    assert len(clock.slept) == 2


def test_waiting_for_a_batch_has_a_timeout(service: FakeService, client: Any, clock: Clock) -> None:
    service.will_answer(*[Answer(batch())] * 20)

    with pytest.raises(WaitTimedOut, match="the batch has not ended after 7 seconds"):
        client.batches.wait("batch-1", timeout=7)

    assert clock() == 7


def test_the_results_are_those_of_both_files(service: FakeService, client: Any) -> None:
    failed = {"id": "y", "custom_id": "c", "response": None, "error": {"code": "expired", "message": "late"}}
    service.will_answer(
        Answer(batch("completed", output_file_id="out", error_file_id="err")),
        Answer([line("b", "B"), line("a", "A").rstrip("\n")]),
        Answer([json.dumps(failed) + "\n"]),
    )

    results = list(client.batches.results("batch-1"))

    assert [(each.custom_id, each.text, each.succeeded) for each in results] == [
        ("b", "B", True), ("a", "A", True), ("c", None, False),
    ]  # fmt: skip
    assert results[2].error.code == "expired"
    assert [call.path for call in service.calls[1:]] == ["/v1/files/out/content", "/v1/files/err/content"]


def test_a_batch_without_results_yet_has_none(service: FakeService, client: Any) -> None:
    service.will_answer(Answer(batch()))

    assert list(client.batches.results("batch-1")) == []


def test_lines_are_read_once_across_broken_connections(service: FakeService, client: Any) -> None:
    service.will_answer(
        Answer(["one\ntwo\nthr"], breaks=True),
        AWAY,
        Answer(["one\n"], breaks=True),
        Answer(["one\ntwo\nthree\nfour"], breaks=True),
        Answer(["one\ntwo\nthree\nfour\n\nsix"]),
    )

    assert list(client.files.lines("file-1")) == [b"one", b"two", b"three", b"four", b"", b"six"]


def test_reading_ends_when_its_patience_is_over(service: FakeService, connect: Connect) -> None:
    service.will_answer(Answer(["one\ntw"], breaks=True), *[AWAY] * 50)
    lines = connect(service.url, patience=9).files.lines("file-1")

    assert next(lines) == b"one"
    with pytest.raises(ServiceFailed, match="away"):
        next(lines)


def test_each_outage_of_a_file_has_the_whole_patience(service: FakeService, connect: Connect) -> None:
    for number in range(4):
        lines = "".join(f"{each}\n" for each in range(number + 1))
        service.will_answer(*[AWAY] * 3, Answer([lines], breaks=True))
    service.will_answer(Answer(["0\n1\n2\n3\n"]))

    assert len(list(connect(service.url, patience=4).files.lines("file-1"))) == 4


def test_files_are_listed_read_and_deleted(service: FakeService, client: Any) -> None:
    service.will_answer(
        Answer({"object": "list", "data": [FILE, {**FILE, "id": "file-2"}], "has_more": True}),
        Answer({"object": "list", "data": [{**FILE, "id": "file-3"}], "has_more": False}),
        Answer(FILE),
        Answer({"id": "file-1", "object": "file", "deleted": True}),
        Answer(problem("file_not_found", "no such file"), 404),
    )

    assert [each.id for each in client.files.list(purpose="batch")] == ["file-1", "file-2", "file-3"]
    assert client.files.get("file-1").bytes == 9
    client.files.delete("file-1")
    with pytest.raises(NotFound):
        client.files.get("../x")

    assert [call.path for call in service.calls] == [
        "/v1/files?limit=100&purpose=batch", "/v1/files?limit=100&purpose=batch&after=file-2",
        "/v1/files/file-1", "/v1/files/file-1", "/v1/files/..%2Fx",
    ]  # fmt: skip


def test_batches_are_listed(service: FakeService, client: Any) -> None:
    second = {**batch(), "id": "batch-2"}
    service.will_answer(
        Answer({"object": "list", "data": [batch()], "has_more": True}),
        Answer({"object": "list", "data": [second], "has_more": False}),
        Answer(second),
    )

    found = list(client.batches.list())

    assert [each.id for each in found] == ["batch-1", "batch-2"]
    assert found[1].refresh().id == "batch-2"


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_an_id_that_would_be_another_path_is_refused(service: FakeService, client: Any, name: str) -> None:
    with pytest.raises(ValueError, match="is not an id"):
        client.batches.get(name)

    assert service.calls == []


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ([{"message": {"content": "hi"}}], "hi"),
        ([{"message": {"content": None, "tool_calls": []}}], None),
        ([{"text": ""}], ""),
        ([], None),
    ],
)
def test_the_text_of_a_result(
    service: FakeService, client: Any, choices: list[Any], text: str | None
) -> None:
    response = {"status_code": 200, "request_id": None, "body": {"choices": choices}}
    content = json.dumps({"custom_id": "a", "response": response, "error": None})
    service.will_answer(Answer(batch("completed", output_file_id="out")), Answer([content]))

    (result,) = client.batches.results("batch-1")

    assert result.text == text
