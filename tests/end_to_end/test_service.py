"""The whole service as users run it: real processes, a small model, HTTP and pub/sub."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Hashable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from transformers import AutoModelForCausalLM

from tests.comparer import Reference, assert_equal_tokens, reference
from tests.live_service import TERMINAL, LiveService, wait_for
from tests.tiny_models import VOCAB_SIZE, save_model
from tokenmill.client.streams import TokenStream

MAX_BATCHED = 128
MAX_SEQS = 16
LIMITS = {
    "TOKENMILL_DTYPE": "float32",
    "TOKENMILL_MAX_NUM_BATCHED_TOKENS": str(MAX_BATCHED),
    "TOKENMILL_MAX_NUM_SEQS": str(MAX_SEQS),
    "TOKENMILL_LEASE_SECONDS": "2",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")


@pytest.fixture(scope="module")
def service(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    with LiveService(model_dir, tmp_path_factory.mktemp("service"), LIMITS) as running:
        yield running


def greedy(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def random_prompts(seed: int, number: int, longest: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [chance.randrange(5, VOCAB_SIZE) for _ in range(chance.randint(4, longest))] for _ in range(number)
    ]


def token_ids(task: Any) -> list[int]:
    (output,) = task["outputs"]
    return list(output["token_ids"])


def assert_ended_as_alone(model: Any, tasks: list[Any], prompts: list[list[int]], lengths: list[int]) -> None:
    expected: dict[Hashable, Reference] = {
        n: reference(model, prompt, length)
        for n, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    }
    assert [task["status"] for task in tasks] == ["completed"] * len(tasks)
    found: dict[Hashable, list[int]] = {n: token_ids(task) for n, task in enumerate(tasks)}
    assert_equal_tokens(found, expected)
    for task, prompt, length in zip(tasks, prompts, lengths, strict=True):
        usage = task["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), length)


def rq_info(service: LiveService) -> str:
    """Output of RQ's own command, as plain text."""
    return subprocess.run(
        [Path(sys.executable).parent / "rq", "info", "--url", service.redis_url, "--raw"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_concurrent_requests_equal_single_ones_and_rq_shows_them(service: LiveService, model: Any) -> None:
    prompts = random_prompts(1, 64, 90)
    lengths = [8 + n % 40 for n in range(64)]
    ids = [service.submit(**greedy(prompt, length)) for prompt, length in zip(prompts, lengths, strict=True)]
    long = service.submit(**greedy([5, 6, 7], 1900))  # so that a job still runs during `rq info`

    shown = wait_for(lambda: executing(rq_info(service)), "rq info shows jobs that execute")
    tasks = [service.wait_task(task_id) for task_id in ids]
    service.call("POST", f"/v1/tasks/{long}/cancel")

    assert 1 <= shown <= 65
    assert_ended_as_alone(model, tasks, prompts, lengths)


def executing(info: str) -> int:
    """Jobs that `rq info --raw` counts as executing: `queue <name> <waiting>, <executing> executing`."""
    return sum(int(number) for number in re.findall(r"(\d+) executing", info))


def waiting(info: str) -> int:
    return sum(int(number) for number in re.findall(r"^queue \S+ (\d+)", info, re.MULTILINE))


def test_a_long_prompt_does_not_block_other_decodes(service: LiveService) -> None:
    """vllm#10774: a very long prefill occupied every step."""
    with redis.Redis.from_url(service.redis_url) as client, client.pubsub() as pubsub:
        pubsub.psubscribe("tokenmill:tok:*")
        assert pubsub.get_message(timeout=30) is not None
        talking = service.submit(**greedy(list(range(5, 25)), 900))
        next_message(pubsub, talking)
        long = service.submit(**greedy(random_prompts(2, 1, 4)[0] + [7] * 1500, 3))
        seen: list[str] = []
        while not seen or seen[-1] != long:
            seen.append(next_message(pubsub, talking, long)["id"])
        service.call("POST", f"/v1/tasks/{talking}/cancel")

    # The prompt takes at least 1500 / 128 steps, and the other decodes in each of them.
    assert seen.count(talking) >= 1500 // MAX_BATCHED
    assert service.wait_task(long)["status"] == "completed"


def next_message(pubsub: Any, *task_ids: str) -> Any:
    def take() -> Any:
        message = pubsub.get_message(timeout=1)
        if message and message["type"] == "pmessage":
            event = json.loads(message["data"])
            return event if event["id"] in task_ids else None
        return None

    return wait_for(take, "a message of the tasks")


def test_polling_shows_text_position_and_why_a_task_waits(service: LiveService) -> None:
    running = [service.submit(**greedy([5 + n, 6, 7], 1500)) for n in range(3 * MAX_SEQS)]
    last = service.submit(**greedy([9, 9, 9], 4))

    waiting = service.task(last)
    partial = wait_for(lambda: with_text(service.task(running[0])), "text while it runs")

    assert waiting["status"] == "queued"
    assert waiting["queue"]["position"] >= 1
    assert waiting["queue"]["tokens_ahead"] > 0
    assert waiting["queue"]["waiting_for"]
    assert partial["status"] == "in_progress"
    assert partial["queue"] is None
    assert 0 < len(token_ids(partial)) <= 1500
    assert partial["timings"]["ttft_seconds"] is not None

    for task_id in reversed(running[1:]):
        assert service.call("POST", f"/v1/tasks/{task_id}/cancel").status == 200
    assert service.wait_task(last)["status"] == "completed"
    assert service.call("DELETE", f"/v1/tasks/{running[0]}").json["status"] == "cancelled"
    ended = [service.task(task_id) for task_id in running]
    assert {task["status"] for task in ended} == {"cancelled"}
    assert any(not token_ids(task) for task in ended), "none was cancelled before it started"
    kept = wait_for(lambda: service.task(running[0]), "the cancelled task")
    assert token_ids(kept)[: len(token_ids(partial))] == token_ids(partial)


def with_text(task: Any) -> Any:
    return task if task["outputs"] and task["outputs"][0]["text"] else None


def test_a_stream_and_a_poll_agree(service: LiveService) -> None:
    task_id = service.submit(
        messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=30, seed=4
    )

    live = list(TokenStream(service.redis_url, task_id))
    task = service.wait_task(task_id)
    replayed = list(TokenStream(service.redis_url, task_id))
    sse = service.call("GET", f"/v1/tasks/{task_id}/events").body.decode()

    assert live == replayed
    assert [event.seq for event in live] == list(range(len(live)))
    assert "".join(event.text for event in live) == task["outputs"][0]["text"]
    data = [json.loads(line[6:]) for line in sse.splitlines() if line.startswith("data: ")]
    assert [message["seq"] for message in data if "seq" in message][: len(live)] == [e.seq for e in live]


def test_a_seed_produces_the_same_output_in_any_batch(service: LiveService) -> None:
    """vllm#51226: a seeded request changed if another in the batch had no seed."""
    asked = {
        "prompt": "the quick brown",
        "max_tokens": 24,
        "temperature": 0.9,
        "seed": 42,
        "ignore_eos": True,
    }
    alone = token_ids(service.wait_task(service.submit(**asked)))

    mates = [service.submit(prompt=f"mate {n}", max_tokens=40, ignore_eos=True) for n in range(6)]
    copies = [service.submit(**asked) for _ in range(2)]

    assert [token_ids(service.wait_task(copy)) for copy in copies] == [alone, alone]
    assert all(service.wait_task(mate)["status"] == "completed" for mate in mates)


def test_bad_requests_fail_alone(service: LiveService) -> None:
    """vllm#7283, vllm#9634: an empty prompt or an id outside the vocabulary ended the engine."""
    bodies: list[dict[str, Any]] = [
        {"prompt": ""},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [VOCAB_SIZE]},
        {"messages": []},
    ]
    for body in bodies:
        assert service.call("POST", "/v1/tasks", body).status == 400
    too_long = service.submit(prompt="x" * 9000)
    good = service.submit(prompt="hello", max_tokens=2)

    failed = service.wait_task(too_long)
    assert failed["status"] == "failed"
    assert failed["error"]["param"] == "prompt"
    assert service.wait_task(good)["status"] == "completed"


@pytest.mark.parametrize("seed", [3, 4])
def test_the_next_worker_resumes_tasks_of_a_killed_one(
    model_dir: Path, model: Any, tmp_path: Path, seed: int
) -> None:
    """rq#1164: kill -9 left jobs started forever. Here each resumes after its last token."""
    prompts = random_prompts(seed, 24, 40)
    lengths = [40 + 5 * (n % 9) for n in range(24)]
    with (
        LiveService(model_dir, tmp_path, LIMITS) as service,
        redis.Redis.from_url(service.redis_url) as client,
    ):
        ids = [
            service.submit(**greedy(prompt, length)) for prompt, length in zip(prompts, lengths, strict=True)
        ]
        for kills in (20, 60 + seed):
            wait_for(partial(has_logged, client, ids, 2 * kills), "tokens are published")
            service.kill_worker()
            service.start_worker(wait=False)
        tasks = [service.wait_task(task_id) for task_id in ids]

        assert_ended_as_alone(model, tasks, prompts, lengths)
        assert {task["status"] for task in tasks} <= set(TERMINAL)
        for task_id, length in zip(ids, lengths, strict=True):
            entries = [entry.decode() for entry, _ in client.xrange(f"tokenmill:log:{task_id}")]
            assert entries == [f"0-{n + 1}" for n in range(length + 1)], "a gap or a duplicate"
        assert client.zcard("tokenmill:leases") == 0
        info = rq_info(service)
        assert (waiting(info), executing(info)) == (0, 0)


def has_logged(client: redis.Redis, ids: list[str], number: int) -> bool:
    """Whether the logs of the tasks have more than `number` entries together."""
    return sum(client.xlen(f"tokenmill:log:{task_id}") for task_id in ids) > number
