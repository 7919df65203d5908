"""A step that hangs ends its worker; the supervisor restarts it and nothing is lost. A long step does not."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from transformers import AutoModelForCausalLM

from tests.comparer import Reference, assert_equal_tokens, reference
from tests.live_service import http, wait_for
from tests.tiny_models import save_model
from tests.tokenmill.serve.children import TIMEOUT_SECONDS
from tests.tokenmill.serve.hanging_worker import SERVE, hang_next_step
from tests.tokenmill.serve.served import Served
from tokenmill.client.streams import TokenStream
from tokenmill.client.sync_client import Client
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
    """Starts a service with a running task of `LENGTH` tokens for each of `PROMPTS`."""

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
        served = Served(tmp_path, SERVE, settings)
        stack.callback(served.end)
        client = stack.enter_context(Client(served.url))
        return Run(served.wait_until_ready(), client, hang_file)

    with ExitStack() as stack:
        yield start


class Run:
    """A service with running tasks, each with a reader."""

    def __init__(self, served: Served, client: Client, hang_file: Path) -> None:
        self.served = served
        self.client = client
        self._hang_file = hang_file
        url = served.state.address("redis-url")
        assert url is not None
        self.redis_url = url
        self.ids = {number: self._submit(prompt) for number, prompt in PROMPTS.items()}
        self.received: dict[int, list[Event]] = {number: [] for number in PROMPTS}
        self._readers = [threading.Thread(target=self._read, args=(n,), daemon=True) for n in PROMPTS]
        for reader in self._readers:
            reader.start()
        wait_for(lambda: all(self.received.values()), "every task has started")

    def hang(self, how: str) -> None:
        """Return when the step that hangs has started."""
        hang_next_step(self._hang_file, how)
        wait_for(lambda: not self._hang_file.exists(), f"a step hangs: {how}")

    def is_ready(self) -> bool:
        return http("GET", f"{self.served.url}/readyz").status == 200

    def attempts(self) -> list[int]:
        with redis.Redis.from_url(self.redis_url) as client:
            return [int(client.hget(keys.run(task_id), "attempt") or 0) for task_id in self.ids.values()]

    def restarts(self) -> list[str]:
        return [line for line in self.served.text() if "starting it again" in line]

    def assert_all_undisturbed(self, model_dir: Path) -> None:
        """Each reader received each message once, in order, with the tokens of an undisturbed run."""
        for reader in self._readers:
            reader.join(TIMEOUT_SECONDS)
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
        expected: dict[Hashable, Reference] = {
            number: reference(model, prompt, LENGTH) for number, prompt in PROMPTS.items()
        }
        found: dict[Hashable, list[int]] = {
            number: [event.token for event in events if isinstance(event, TokenEvent)]
            for number, events in self.received.items()
        }
        for number, events in self.received.items():
            assert [event.seq for event in events] == list(range(LENGTH + 1))
            assert self.client.get(self.ids[number]).status == "completed"
        assert_equal_tokens(found, expected)

    def _submit(self, prompt: list[int]) -> str:
        return self.client.submit(
            prompt_token_ids=prompt, max_tokens=LENGTH, temperature=0, ignore_eos=True
        ).id

    def _read(self, number: int) -> None:
        for event in TokenStream(self.redis_url, self.ids[number]):
            self.received[number].append(event)


@pytest.mark.parametrize("how", ["holding-gil", "releasing-gil"])
def test_a_hanging_step_ends_the_worker_and_the_next_one_resumes(
    serve: Callable[..., Run], model_dir: Path, how: str
) -> None:
    """transformers PR45898, docling-jobkit#102: an engine hung while its service looked healthy, or while it
    held the interpreter's lock, so that nothing in the process could notice.
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
        "the stack of the hanging step"
    )


def test_a_long_step_does_not_end_the_worker(
    serve: Callable[..., Run], model_dir: Path, tmp_path: Path
) -> None:
    """rq#756: a heartbeat from the working thread made long work look dead."""
    resume = tmp_path / "resume"
    # Long enough that no lease expires because the machine is busy.
    run = serve(stall_seconds="600", lease_seconds=120.0)
    run.hang(f"until {resume}")
    num_received = len(run.received[0])
    with redis.Redis.from_url(run.redis_url) as client:
        for _ in range(NUM_RENEWALS):
            before = leases(client)
            assert len(before) == len(PROMPTS)
            wait_for(partial(are_renewed, client, before), "all leases are renewed")
    wait_for(run.is_ready, "the service says that it is ready")
    assert len(run.received[0]) <= num_received + 1, "it is one step"
    resume.touch()
    run.assert_all_undisturbed(model_dir)
    assert set(run.attempts()) == {1}
    assert run.restarts() == []


def leases(client: redis.Redis) -> dict[bytes, float]:
    rows: Any = client.zrange(keys.LEASES, 0, -1, withscores=True)
    return dict(rows)


def are_renewed(client: redis.Redis, before: dict[bytes, float]) -> bool:
    now = leases(client)
    return all(now[task_id] > expires_at for task_id, expires_at in before.items())
