"""A step that hangs ends its worker, the supervisor starts the next, and nothing is lost; one that is merely
long is waited for.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from transformers import AutoModelForCausalLM

from tests.comparer import assert_equal_tokens, reference
from tests.live_service import http, wait_for
from tests.tiny_models import save_model
from tests.tokenmill.serve.children import TIMEOUT_SECONDS
from tests.tokenmill.serve.hanging_worker import SERVE, ask_for
from tests.tokenmill.serve.served import Served
from tokenmill.client.http import Client
from tokenmill.client.streams import TokenStream
from tokenmill.protocol import keys
from tokenmill.protocol.messages import Event, TokenEvent

LEASE_SECONDS = 1.0
PROMPTS = {number: [5 + number, 6, 7] for number in range(3)}
LENGTH = 300
NUM_RENEWALS = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def serve(model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., "Run"]]:
    """Starts a service with `LENGTH` tokens asked for each of `PROMPTS`, some of which have come."""
    runs: list[Served] = []

    def start(stall_seconds: str, lease_seconds: float = LEASE_SECONDS) -> Run:
        hang_file = tmp_path / "hang"
        settings = {
            "TOKENMILL_MODEL": str(model_dir),
            "TOKENMILL_DTYPE": "float32",
            "TOKENMILL_GRACE_SECONDS": "0",
            "TOKENMILL_LEASE_SECONDS": str(lease_seconds),
            "TOKENMILL_STALL_SECONDS": stall_seconds,
            "HANG_FILE": str(hang_file),
        }
        runs.append(Served(tmp_path, SERVE, settings))
        return Run(runs[-1].wait_until_ready(), hang_file)

    yield start
    for served in runs:
        served.end()


class Run:
    """A service with tasks under way, each followed by a reader."""

    def __init__(self, served: Served, hang_file: Path) -> None:
        self.served = served
        self.client = Client(url=served.url)
        self._hang_file = hang_file
        url = served.state.address("redis-url")
        assert url is not None
        self.redis_url = url
        self.ids = {number: self._submit(prompt) for number, prompt in PROMPTS.items()}
        self.heard: dict[int, list[Event]] = {number: [] for number in PROMPTS}
        self._readers = [threading.Thread(target=self._read, args=(n,), daemon=True) for n in PROMPTS]
        for reader in self._readers:
            reader.start()
        wait_for(lambda: all(self.heard.values()), "each has begun")

    def hang(self, what: str) -> None:
        """Returns when the step has begun that does it."""
        ask_for(self._hang_file, what)
        wait_for(lambda: not self._hang_file.exists(), f"the step {what}")

    def is_ready(self) -> bool:
        return http("GET", f"{self.served.url}/readyz").status == 200

    def attempts(self) -> list[int]:
        with redis.Redis.from_url(self.redis_url) as client:
            return [int(client.hget(keys.run(task_id), "attempt") or 0) for task_id in self.ids.values()]

    def restarts(self) -> list[str]:
        return [line for line in self.served.text() if "starting it again" in line]

    def assert_all_undisturbed(self, model_dir: Path) -> None:
        """Each reader got each message once, in order, and the tokens are those of a run alone."""
        for reader in self._readers:
            reader.join(TIMEOUT_SECONDS)
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
        expected = {number: reference(model, prompt, LENGTH) for number, prompt in PROMPTS.items()}
        for number, events in self.heard.items():
            assert [event.seq for event in events] == list(range(LENGTH + 1))
            assert self.client.task(self.ids[number])["status"] == "completed"
        assert_equal_tokens(
            {
                number: [event.token for event in events if isinstance(event, TokenEvent)]
                for number, events in self.heard.items()
            },
            expected,
        )

    def _submit(self, prompt: list[int]) -> str:
        body = {"prompt_token_ids": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
        return str(self.client.submit(body)["id"])

    def _read(self, number: int) -> None:
        for event in TokenStream(self.redis_url, self.ids[number]):
            self.heard[number].append(event)


@pytest.mark.parametrize("how", ["holding", "free"])
def test_a_hanging_step_ends_the_worker_and_the_next_goes_on(
    serve: Callable[..., Run], model_dir: Path, how: str
) -> None:
    """transformers PR45898, docling-jobkit#102: an engine that hung left its service looking healthy, or kept
    the interpreter's lock, so that nothing in the process could notice.
    """
    run = serve(stall_seconds="2")
    run.hang(how)
    wait_for(lambda: not run.is_ready(), "the service says that it is not ready")
    run.served.lines.wait_for("the worker ended with exit code 1; starting it again")
    run.assert_all_undisturbed(model_dir)
    wait_for(run.is_ready, "the service is ready again")
    assert set(run.attempts()) == {2}
    assert len(run.restarts()) == 1
    assert any("tests/tokenmill/serve/hanging_worker.py" in line for line in run.served.text()), (
        "where it hung"
    )


def test_a_step_that_is_merely_long_is_not_taken_for_one(
    serve: Callable[..., Run], model_dir: Path, tmp_path: Path
) -> None:
    """rq#756: a heartbeat that came from the thread that works made long work look dead."""
    go_on = tmp_path / "go-on"
    # No lease lapses because a busy machine runs nothing for a while.
    run = serve(stall_seconds="600", lease_seconds=120.0)
    run.hang(f"until {go_on}")
    held = len(run.heard[0])
    with redis.Redis.from_url(run.redis_url) as client:
        for _ in range(NUM_RENEWALS):
            before = leases(client)
            assert len(before) == len(PROMPTS)
            wait_for(lambda earlier=before: is_later(leases(client), earlier), "all are renewed")
    wait_for(run.is_ready, "the service says that it is ready")
    assert len(run.heard[0]) <= held + 1, "it is one step"
    go_on.touch()
    run.assert_all_undisturbed(model_dir)
    assert set(run.attempts()) == {1}
    assert run.restarts() == []


def leases(client: "redis.Redis") -> dict[bytes, float]:
    return dict(client.zrange(keys.LEASES, 0, -1, withscores=True))


def is_later(now: dict[bytes, float], before: dict[bytes, float]) -> bool:
    return all(now[task_id] > lapses for task_id, lapses in before.items())
