"""A batch loses and doubles no line, whichever process is killed while it runs."""

import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import free_port, start_redis
from tests.live_service import LiveService, wait_for
from tests.tiny_models import save_model

NUM_LINES = 400
NUM_ANSWERED = 360
NUM_TOKENS = 32
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


class KillableRedis:
    """A server that starts again with its data."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server = start_redis(directory, free_port())

    @property
    def url(self) -> str:
        return self._server.url

    def kill(self) -> None:
        self._server.process.kill()
        self._server.process.wait()

    def restart(self) -> None:
        self.kill()
        self._server = start_redis(self._directory, self._server.port)


@pytest.fixture
def killable(tmp_path: Path) -> Iterator[KillableRedis]:
    server = KillableRedis(tmp_path)
    yield server
    server.kill()


def upload(service: LiveService, num_lines: int) -> str:
    """The id of a file with this many requests, some of which are refused."""
    rows = []
    for number in range(num_lines):
        body = {
            "prompt": f"{number}",
            "max_tokens": -5 if number % 10 == 9 else NUM_TOKENS,
            "ignore_eos": True,
        }
        rows.append({"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body})
    content = "\n".join(json.dumps(row) for row in rows)
    form = (
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--b\r\nContent-Disposition: form-data; name="file"; filename="in"\r\n\r\n'
        f"{content}\r\n--b--\r\n"
    )
    return str(post_form(service, form)["id"])


def post_form(service: LiveService, form: str) -> Any:
    request = urllib.request.Request(f"{service.api_url}/v1/files", form.encode())
    request.add_header("Content-Type", "multipart/form-data; boundary=b")
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


def start(service: LiveService) -> str:
    body = {
        "input_file_id": upload(service, NUM_LINES),
        "endpoint": COMPLETIONS,
        "completion_window": "24h",
    }
    return str(service.call("POST", "/v1/batches", body).json["id"])


def state(service: LiveService, batch_id: str) -> Any:
    """The batch; None while the service does not answer."""
    try:
        reply = service.call("GET", f"/v1/batches/{batch_id}")
    except OSError:
        return None
    assert reply.status in (200, 503), reply.body
    return reply.json if reply.status == 200 else None


def next_progress(service: LiveService, batch_id: str, done: int) -> int:
    """Wait for more than `done` lines that are completed. Returns their number; `NUM_ANSWERED` at the end."""

    def progress() -> int:
        batch = state(service, batch_id)
        if batch and batch["status"] not in ("validating", "in_progress"):
            return NUM_ANSWERED
        now = batch["request_counts"]["completed"] if batch else 0
        return now if now > done else 0

    return int(wait_for(progress, f"more than {done} lines are done"))


def rows_of(service: LiveService, file_id: str) -> list[Any]:
    return [json.loads(row) for row in service.call("GET", f"/v1/files/{file_id}/content").body.splitlines()]


def check(service: LiveService, batch_id: str) -> None:
    """Wait for the end of the batch. Each line has one result, and nothing of the run is left."""

    def ended() -> Any:
        batch = state(service, batch_id)
        return batch if batch and batch["status"] in ("completed", "failed", "expired") else None

    batch = wait_for(ended, "the batch ends")
    assert batch["status"] == "completed", batch
    answered, refused = (rows_of(service, batch[f"{kind}_file_id"]) for kind in ("output", "error"))
    expected = {str(number) for number in range(NUM_LINES)}
    failing = {name for name in expected if name.endswith("9")}
    counts = Counter(row["custom_id"] for row in [*answered, *refused])
    assert counts == dict.fromkeys(expected, 1)
    assert {row["custom_id"] for row in refused} == failing
    assert {row["response"]["body"]["usage"]["completion_tokens"] for row in answered} == {NUM_TOKENS}
    total = {"total": NUM_LINES, "completed": len(expected - failing), "failed": len(failing)}
    assert batch["request_counts"] == total
    names = {path.name for path in (service.directory / "files").iterdir()}
    kept = {batch[f"{kind}_file_id"] for kind in ("input", "output", "error")}
    assert {name for name in names - kept if not name.startswith("batch_")} == set()


def settings(tmp_path: Path) -> dict[str, str]:
    return {
        "TOKENMILL_DTYPE": "float32",
        "TOKENMILL_MAX_NUM_SEQS": "8",
        "TOKENMILL_LEASE_SECONDS": "2",
        "TOKENMILL_BATCH_WINDOW": "16",
        "TOKENMILL_FILES_URL": str(tmp_path / "files"),
    }


@pytest.mark.parametrize("victim", ["api", "worker", "redis"])
def test_a_process_is_killed_again_and_again(
    model_dir: Path, tmp_path: Path, killable: KillableRedis, victim: str
) -> None:
    with LiveService(model_dir, tmp_path, settings(tmp_path), killable.url) as service:
        batch_id = start(service)
        num_kills, done = 0, 0
        while num_kills < 3 and (done := next_progress(service, batch_id, done)) < NUM_ANSWERED:
            kill(service, killable, victim)
            num_kills += 1

        check(service, batch_id)
        assert num_kills


def kill(service: LiveService, killable: KillableRedis, victim: str) -> None:
    if victim == "api":
        service.restart_api()
    elif victim == "worker":
        service.kill_worker()
        service.start_worker()
    else:
        killable.restart()
