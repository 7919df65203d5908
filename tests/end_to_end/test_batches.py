"""Batches of OpenAI's own client against the whole service."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.live_service import LiveService, wait_for
from tests.tiny_models import save_model

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
MESSAGES: Any = [{"role": "user", "content": "hello world"}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    directory = tmp_path_factory.mktemp("service")
    limits = {
        "TOKENMILL_DTYPE": "float32",
        "TOKENMILL_MAX_NUM_SEQS": "8",
        "TOKENMILL_LEASE_SECONDS": "2",
        "TOKENMILL_FILES_URL": str(directory / "files"),
        "TOKENMILL_MAX_FILE_BYTES": str(1024 * 1024),
        # A file may be larger than other bodies.
        "TOKENMILL_MAX_BODY_BYTES": str(64 * 1024),
    }
    with LiveService(save_model(tmp_path_factory.mktemp("model")), directory, limits) as running:
        yield running


@pytest.fixture
def client(service: LiveService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.api_url}/v1", api_key="any", max_retries=0) as client:
        yield client


def request(custom_id: str, endpoint: str = CHAT, **body: Any) -> dict[str, Any]:
    inputs: dict[str, Any] = {CHAT: {"messages": MESSAGES}, "/v1/completions": {"prompt": "one"}}
    values = {**inputs.get(endpoint, {"input": "hello"}), **body}
    return {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": values}


def upload(client: openai.OpenAI, *lines: Any) -> str:
    """The id of a file with these lines: objects, or texts as they are."""
    rows = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return client.files.create(file=("in.jsonl", "\n".join(rows).encode()), purpose="batch").id


def start(client: openai.OpenAI, *lines: Any, endpoint: Any = CHAT, window: Any = "24h") -> Any:
    return client.batches.create(
        input_file_id=upload(client, *lines), endpoint=endpoint, completion_window=window
    )


def wait_batch(client: openai.OpenAI, batch_id: str) -> Any:
    def ended() -> Any:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ENDED else None

    return wait_for(ended, f"batch {batch_id} ends")


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of a file of results by their custom_id, each of which appears once."""
    if file_id is None:
        return {}
    rows = [json.loads(row) for row in client.files.content(file_id).text.splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_file_is_kept_listed_and_deleted(client: openai.OpenAI) -> None:
    content = b'{"a": 1}\r\n' * 100_000
    file = client.files.create(
        file=("names.jsonl", content),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    other = upload(client, "x")

    assert (file.bytes, file.filename, file.purpose) == (len(content), "names.jsonl", "batch")
    assert file.expires_at == file.created_at + 7200
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    first, second = (each.id for each in list(client.files.list(limit=1))[:2])
    assert [first, second] == [other, file.id]
    assert [each.id for each in client.files.list(purpose="batch_output", after=file.id)] == []
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    assert client.files.content(other).content == b"x"


@pytest.mark.parametrize("num_bytes", [1024 * 1024 + 1, 2 * 1024 * 1024])
def test_a_file_that_is_too_large_is_refused(
    client: openai.OpenAI, service: LiveService, num_bytes: int
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("in.jsonl", b"x" * num_bytes), purpose="batch")
    assert refused.value.status_code == 413
    assert not [path for path in files_of(service) if ".part-" in path.name]


def files_of(service: LiveService) -> list[Path]:
    return list((service.directory / "files").iterdir())


@pytest.mark.parametrize("purpose", ["fine-tune", "nonsense"])
def test_other_purposes_are_refused(client: openai.OpenAI, service: LiveService, purpose: Any) -> None:
    before = files_of(service) if (service.directory / "files").exists() else []
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("in.jsonl", b"{}"), purpose=purpose)
    assert files_of(service) == before


def test_each_line_is_answered_as_by_its_route(client: openai.OpenAI) -> None:
    asked: Any = {"max_tokens": 6, "seed": 1, "temperature": 0.7, "logprobs": True}
    lines = [request(str(number), **{**asked, "seed": number}) for number in range(30)]
    batch = start(client, *lines)
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", CHAT)

    done = wait_batch(client, batch.id)

    assert (done.status, done.error_file_id) == ("completed", None)
    assert done.request_counts.model_dump() == {"total": 30, "completed": 30, "failed": 0}
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at <= done.expires_at
    found = results(client, done.output_file_id)
    assert found.keys() == {str(number) for number in range(30)}
    model = client.models.list().data[0].id
    direct: Any = client.chat.completions.create(model=model, messages=MESSAGES, **asked)
    (choice,) = found["1"]["response"]["body"]["choices"]
    (expected,) = direct.model_dump(exclude_unset=True)["choices"]
    assert choice.keys() == expected.keys()
    assert choice["message"] == expected["message"]
    assert choice["finish_reason"] == expected["finish_reason"]
    tokens = [[token["token"] for token in one["logprobs"]["content"]] for one in (choice, expected)]
    assert tokens[0] == tokens[1]
    assert found["1"]["response"]["body"]["usage"]["completion_tokens"] == 6
    assert found["1"]["response"]["status_code"] == 200
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert done.id in [each.id for each in client.batches.list()]


def test_texts_and_responses(client: openai.OpenAI) -> None:
    text = start(
        client,
        request("t", "/v1/completions", prompt=["one", "two"], n=2, max_tokens=3),
        endpoint="/v1/completions",
    )
    response = start(client, request("r", "/v1/responses", max_output_tokens=3), endpoint="/v1/responses")

    body = results(client, wait_batch(client, text.id).output_file_id)["t"]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 12
    body = results(client, wait_batch(client, response.id).output_file_id)["r"]["response"]["body"]
    assert (body["object"], body["status"]) == ("response", "incomplete")


def test_requests_that_are_refused_are_in_the_file_of_errors(client: openai.OpenAI) -> None:
    done = wait_batch(
        client,
        start(
            client,
            request("good", max_tokens=1),
            request("stream", stream=True),
            request("field", temperature=-1),
            request("long", messages=[{"role": "user", "content": "word " * 2000}]),
        ).id,
    )

    assert done.request_counts.model_dump() == {"total": 4, "completed": 1, "failed": 3}
    errors = results(client, done.error_file_id)
    assert results(client, done.output_file_id).keys() == {"good"}
    assert {name: row["response"]["status_code"] for name, row in errors.items()} == dict.fromkeys(
        ("stream", "field", "long"), 400
    )
    assert errors["field"]["response"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("lines", "errors"),
    [
        ([], [("empty_file", None)]),
        (["{", request("a"), request("a")], [("invalid_json_line", 1), ("duplicate_custom_id", 3)]),
        ([request("a"), "", request("b", "/v1/completions")], [("invalid_url", 3)]),
        ([request("a", model="other")], [("model_not_found", 1)]),
        ([{**request("a"), "method": "GET"}], [("invalid_method", 1)]),
        ([{"custom_id": "a", "method": "POST", "url": CHAT}], [("missing_required_parameter", 1)]),
    ],
)
def test_a_file_that_is_not_valid_fails_the_batch(
    client: openai.OpenAI, lines: list[Any], errors: list[Any]
) -> None:
    done = wait_batch(client, start(client, *lines).id)

    assert done.status == "failed"
    assert [(error.code, error.line) for error in done.errors.data] == errors
    assert done.failed_at
    assert client.files.delete(done.input_file_id).deleted


def test_a_batch_that_is_cancelled_keeps_its_results(client: openai.OpenAI) -> None:
    quick = [request(f"quick-{number}", max_tokens=1) for number in range(4)]
    slow = [request(f"slow-{number}", max_tokens=200, ignore_eos=True) for number in range(400)]
    batch = start(client, *quick, *slow)
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 4, "some lines are done")  # type: ignore[union-attr]
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)

    assert client.batches.cancel(batch.id).status == "cancelling"

    done = wait_batch(client, batch.id)
    found = results(client, done.output_file_id)
    assert (done.status, bool(done.cancelled_at)) == ("cancelled", True)
    assert len(found) == done.request_counts.completed < 404
    assert {f"quick-{number}" for number in range(4)} <= found.keys()
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_a_batch_that_expires_names_every_line(client: openai.OpenAI) -> None:
    lines = [request(str(number), max_tokens=200, ignore_eos=True) for number in range(300)]
    done = wait_batch(client, start(client, *lines, window="3s").id)

    assert done.status == "expired"
    found, errors = results(client, done.output_file_id), results(client, done.error_file_id)
    assert found.keys() | errors.keys() == {str(number) for number in range(300)}
    assert not found.keys() & errors.keys()
    assert {row["error"]["code"] for row in errors.values()} == {"batch_expired"}
    assert done.request_counts.total == 300 == len(found) + done.request_counts.failed
