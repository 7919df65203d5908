"""The logs of a whole service: one line for each call and each end of a task, joined by the request id."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.live_service import LiveService, http, wait_for
from tests.tiny_models import save_model

KEY = "sentinel-key-5f0c2a"
PROMPT = "sentinelprompt"
SECRET = "whsec_c2VudGluZWxzZWNyZXQwMTIzNDU2Nzg5MDEyMw=="
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
SETTINGS = {
    "TOKENMILL_API_KEYS": f"alice:{KEY}",
    "TOKENMILL_LOG_FORMAT": "json",
    "TOKENMILL_LOG_LEVEL": "debug",
    "TOKENMILL_WEBHOOK_SECRET": SECRET,
    "TOKENMILL_WEBHOOK_ALLOW_PRIVATE": "true",
    "TOKENMILL_DEVICE": "cpu",
}


class Receiver:
    """Receives webhooks."""

    def __init__(self) -> None:
        received = self.received = list[tuple[dict[str, str], Any]]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.append((dict(self.headers), json.loads(body)))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/sentinelpath"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    model = save_model(tmp_path_factory.mktemp("model"))
    with LiveService(model, tmp_path_factory.mktemp("service"), SETTINGS) as running:
        yield running


def lines_of(log: Path) -> list[dict[str, Any]]:
    """Every line is an event."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def find(log: Path, **fields: Any) -> dict[str, Any]:
    """The one event with these fields, once it is written."""

    def matching() -> list[dict[str, Any]]:
        return [one for one in lines_of(log) if fields.items() <= one.items()]

    wait_for(matching, f"a line with {fields}")
    (event,) = matching()
    return event


def submit(service: LiveService, body: dict[str, Any], **headers: str) -> Any:
    reply = http("POST", f"{service.api_url}/v1/tasks", body, {**AUTHORIZED, **headers})
    assert reply.status in (200, 202), reply.body
    return reply


def api_log(service: LiveService) -> Path:
    assert service.api is not None
    return service.api.log


def test_a_request_id_leads_from_the_call_to_the_end_of_the_task(service: LiveService) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}
    reply = submit(service, body, **{"X-Request-ID": "req-1", "Prefer": "wait=60"})
    task = reply.json["id"]

    assert reply.headers["X-Request-ID"] == reply.json["request_id"] == "req-1"
    call = find(api_log(service), event="call", request_id="req-1")
    assert call["method"] == "POST"
    assert call["route"] == "/v1/tasks"
    assert (call["status"], call["tenant"], call["task"]) == (200, "alice", task)
    assert call["bytes"] == len(reply.body)
    assert call["client"] == "127.0.0.1"
    assert call["ms"] > 0
    end = find(service.worker.log, event="task ended", request_id="req-1")
    assert (end["task"], end["tenant"], end["status"]) == (task, "alice", "completed")
    assert (end["finish_reason"], end["completion_tokens"]) == ("length", 3)
    assert end["prompt_tokens"] == reply.json["usage"]["prompt_tokens"]
    assert 0 <= end["queue_seconds"] <= end["ttft_seconds"] <= end["total_seconds"]
    assert end["worker"]


def test_a_request_id_that_is_not_valid_is_replaced(service: LiveService) -> None:
    reply = submit(service, {"prompt": PROMPT, "max_tokens": 1}, **{"X-Request-ID": "a b" * 100})
    made = reply.headers["X-Request-ID"]
    assert made == reply.json["request_id"]
    assert " " not in made
    assert find(api_log(service), event="call", request_id=made)


def test_a_webhook_carries_the_request_id(service: LiveService, receiver: Receiver) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "webhook": {"url": receiver.url}}
    task = submit(service, body, **{"X-Request-ID": "req-webhook"}).json["id"]

    delivered = find(api_log(service), event="webhook delivered", task=task)
    assert delivered["request_id"] == "req-webhook"
    ((headers, event),) = receiver.received
    assert headers["X-Request-ID"] == event["data"]["request_id"] == "req-webhook"


def test_a_stream_is_logged_when_it_has_ended(service: LiveService) -> None:
    task = submit(service, {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}).json["id"]
    headers = {**AUTHORIZED, "X-Request-ID": "req-stream"}
    reply = http("GET", f"{service.api_url}/v1/tasks/{task}/events", headers=headers)

    call = find(api_log(service), event="call", request_id="req-stream")
    assert call["route"] == "/v1/tasks/<task_id>/events"
    assert (call["task"], call["bytes"]) == (task, len(reply.body))


def test_a_cancelled_task_has_one_end(service: LiveService) -> None:
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
    task = submit(service, body).json["id"]
    url = f"{service.api_url}/v1/tasks/{task}"
    wait_for(lambda: http("GET", url, headers=AUTHORIZED).json["status"] != "queued", "it runs")
    status = http("POST", f"{url}/cancel", headers=AUTHORIZED).json["status"]

    assert find(service.worker.log, event="task ended", task=task)["status"] == status


def test_probes_are_details(service: LiveService) -> None:
    http("GET", f"{service.api_url}/readyz", headers={"X-Request-ID": "req-probe"})
    assert find(api_log(service), event="call", request_id="req-probe")["level"] == "debug"


def test_a_refused_key_and_a_key_in_the_path_are_not_logged(service: LiveService) -> None:
    refused = http("GET", f"{service.api_url}/v1/tasks/x", headers={"Authorization": "Bearer sentinel-wrong"})
    assert refused.status == 401
    http("GET", f"{service.api_url}/v1/{KEY}?key={KEY}", headers={**AUTHORIZED, "X-Request-ID": "req-path"})
    assert find(api_log(service), event="call", request_id="req-path")["path"] == "/v1/***"


def test_no_log_has_a_prompt_a_text_a_key_or_a_secret(service: LiveService, receiver: Receiver) -> None:
    """Of calls that are served and refused, at debug level."""
    for body in ({"prompt": PROMPT, "nonsense": PROMPT}, {"prompt": [PROMPT]}, {"messages": PROMPT}):
        assert http("POST", f"{service.api_url}/v1/tasks", body, AUTHORIZED).status == 400
    hook = {"url": receiver.url}
    served = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "webhook": hook}
    reply = submit(service, served, Prefer="wait=60")
    task, text = reply.json["id"], reply.json["outputs"][0]["text"]
    find(service.worker.log, event="task ended", task=task)
    wait_for(lambda: receiver.received, "the webhook")

    logs = api_log(service).read_text() + service.worker.log.read_text()
    assert task in logs
    assert "sentinel" not in logs.lower()
    assert SECRET not in logs
    assert len(text) > 3
    assert text not in logs
    assert json.dumps(text)[1:-1] not in logs
