"""The worker as a whole, in this process: a real server, the real engine, a fake model."""

import json
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.command import send_shutdown_command, send_stop_job_command
from rq.job import Job
from rq.serializers import JSONSerializer

from engine.errors import DeviceLost
from engine.sequence import Sequence
from tests.conftest import free_port, start_redis
from tests.worker.running import running
from tests.worker.workshop import (
    MODEL,
    SLUG,
    FakeRunner,
    WordTokenizer,
    build_engine,
    end_of,
    ended,
    job_data,
    log_length,
    served_model,
    submit,
    tokens_of,
    undisturbed,
    until,
    wait_for_length,
)
from worker.loop import Load
from worker.protocol import keys
from worker.protocol.messages import FinishedEvent
from worker.protocol.naming import DEFAULT_TENANT, queue_name
from worker.protocol.store import TaskStore

LONG = {"max_tokens": 190}


def step_until_all_run(client: "redis.Redis", permits: threading.Semaphore, tasks: list[str]) -> None:
    """One step after another, each seen in the log, until every task has a token."""
    for _ in range(100):
        length = log_length(client, tasks[0])
        if all(log_length(client, task) for task in tasks):
            return
        permits.release()
        wait_for_length(client, tasks[0], length + 1)
    raise AssertionError("not all run")


def test_requests_end_with_text_and_result(redis_url: str, redis_client: "redis.Redis") -> None:
    tasks = [submit(redis_client, prompt_token_ids=(n + 1, 2), sampling={"max_tokens": 7}) for n in range(20)]

    with running(redis_url):
        logs = [ended(redis_client, task) for task in tasks]

    for number, (task, events) in enumerate(zip(tasks, logs, strict=True)):
        expected = undisturbed([number + 1, 2], 7)
        assert tokens_of(events) == expected
        job = Job.fetch(task, connection=redis_client, serializer=JSONSerializer)
        assert job.get_status() == "finished"
        assert job.return_value() == {
            "outputs": [
                {
                    "index": 0,
                    "text": "".join(f"<{token}>" for token in expected),
                    "token_ids": expected,
                    "finish_reason": "length",
                }
            ],
            "usage": {
                "prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9, "cached_tokens": 0,
            },
        }  # fmt: skip


def test_one_worker_many_at_once(redis_url: str, redis_client: "redis.Redis") -> None:
    """More requests than seats: all end, and no step ran more than the seats."""
    engine = build_engine(max_num_seqs=4)
    tasks = [submit(redis_client, prompt_token_ids=(n + 1,)) for n in range(30)]

    with running(redis_url, engine):
        for number, task in enumerate(tasks):
            assert tokens_of(ended(redis_client, task)) == undisturbed([number + 1], 5)


def test_bad_prompts_fail_alone_and_name_the_field(redis_url: str, redis_client: "redis.Redis") -> None:
    """vllm PR9634, vllm#7283, aider#3693: what cannot be computed must not hurt its batch mates."""
    greedy = {"max_tokens": 5}
    bad = {
        "prompt_token_ids": [
            submit(redis_client, prompt_token_ids=ids)
            for ids in ((1, -1), (1, 1000), (5279552648203111001,), (1, 1.5), (True,), ())
        ],
        "prompt": [
            submit(redis_client, prompt="a \ud83d b"),
            submit(redis_client, prompt=""),
            submit(redis_client, prompt="a " * 200),
        ],
        "messages": [
            submit(redis_client, messages=()),
            submit(redis_client, messages=({"role": "user", "content": "\udc00"},)),
            submit(redis_client, messages=({"role": "pirate", "content": "ahoy"},)),
            submit(redis_client, messages=({"role": "user"},)),
        ],
        "temperature": [submit(redis_client, sampling={"temperature": -1})],
        "stop_token_ids": [submit(redis_client, sampling={"stop_token_ids": [99999]})],
        "max_tokens": [submit(redis_client, sampling={"max_tokens": "5"})],
        "stop": [submit(redis_client, sampling={"stop": ["\ud83d"]})],
        "best_of": [submit(redis_client, sampling={"best_of": 3})],
    }
    good = [submit(redis_client, prompt="some words here", sampling=greedy) for _ in range(4)]

    with running(redis_url):
        for param, tasks in bad.items():
            for task in tasks:
                end = end_of(redis_client, task)
                assert (end.seq, end.finish_reason) == (0, "error")
                assert end.error is not None
                assert (end.error["param"], end.error["type"]) == (param, "invalid_request_error")
                job = Job.fetch(task, connection=redis_client, serializer=JSONSerializer)
                assert job.get_status() == "failed"
                assert str(end.error["message"]) in str(job.latest_result().exc_string)
        for task in good:
            assert tokens_of(ended(redis_client, task)) == undisturbed([4, 5, 4], 5)


def test_messages_are_rendered_by_the_template(redis_url: str, redis_client: "redis.Redis") -> None:
    task = submit(redis_client, messages=({"role": "user", "content": "four"},))

    with running(redis_url):
        assert tokens_of(ended(redis_client, task)) == undisturbed([1, 4, 2], 5)


def test_messages_without_a_template_are_refused(redis_url: str, redis_client: "redis.Redis") -> None:
    """vllm PR45628: a model without a chat template is the client's to know, not a server's error."""
    tokenizer = WordTokenizer()
    tokenizer.has_chat_template = False
    task = submit(redis_client, messages=({"role": "user", "content": "hello"},))

    with running(redis_url, model=served_model(tokenizer)):
        end = end_of(redis_client, task)

    assert end.error is not None
    assert end.error["param"] == "messages"
    assert "chat template" in end.error["message"]


def test_a_foreign_function_is_refused_and_not_called(
    redis_url: str, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    """JSON keeps nobody with access to Redis from naming any importable function."""
    witness = tmp_path / "called"
    data = zlib.compress(json.dumps(["os.mkdir", None, [str(witness)], {}]).encode())
    foreign = submit(redis_client, data)
    broken = submit(redis_client, b"\x80\x05pickled")
    odd = submit(redis_client, job_data({"id": "x", "model": MODEL, "surprise": 1}))

    with running(redis_url):
        codes = [(end_of(redis_client, task).error or {})["code"] for task in (foreign, broken, odd)]

    assert codes == ["unknown_function", "unreadable_request", "unreadable_request"]
    assert not witness.exists()


def test_a_tokenizer_that_breaks_fails_its_request_alone(
    redis_url: str, redis_client: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    class Panic(BaseException):
        """As a panic in Rust is seen by Python."""

    class Fragile(WordTokenizer):
        def encode(self, text: str) -> list[int]:
            if "boom" in text:
                raise Panic("secret detail")
            return super().encode(text)

    bad, good = submit(redis_client, prompt="boom"), submit(redis_client, prompt="fine")

    with running(redis_url, model=served_model(Fragile())):
        error = end_of(redis_client, bad).error
        assert tokens_of(ended(redis_client, good)) == undisturbed([4], 5)

    assert error is not None
    assert error["code"] == "internal_error"
    assert "secret" not in json.dumps(error)
    assert "secret detail" in caplog.text


def test_a_fault_in_the_sampler_fails_its_request_alone(redis_url: str, redis_client: "redis.Redis") -> None:
    """mstar#207, vllm#5822: one request's exception must not fail the batch or kill the loop."""
    runner = FakeRunner()

    def fault(sequence: Sequence) -> None:
        if sequence.token_ids[0] == 66 and sequence.num_output_tokens == 2:
            raise ValueError("no such token")

    runner.sample_fault = fault
    mates = [submit(redis_client, prompt_token_ids=(n + 1,)) for n in range(3)]
    bad = submit(redis_client, prompt_token_ids=(66,))

    with running(redis_url, build_engine(runner)):
        events = ended(redis_client, bad)
        for number, mate in enumerate(mates):
            assert tokens_of(ended(redis_client, mate)) == undisturbed([number + 1], 5)

    assert tokens_of(events) == undisturbed([66], 2)
    end = events[-1]
    assert isinstance(end, FinishedEvent)
    assert end.finish_reason == "error"
    assert end.error is not None
    assert end.error["code"] == "engine_error"


def test_a_dead_engine_hands_everything_back(redis_url: str, redis_client: "redis.Redis") -> None:
    """transformers PR45898: a worker whose engine is dead must not go on looking healthy."""
    runner = FakeRunner()

    def die() -> None:
        if runner.num_steps == 2:
            raise DeviceLost("the device is gone")

    runner.before_step = die
    tasks = [submit(redis_client, prompt_token_ids=(n + 1,)) for n in range(5)]

    with running(redis_url, build_engine(runner)) as run:
        assert run.wait() == 70

    assert all(log_length(redis_client, task) < 5 for task in tasks)
    assert redis_client.zcard(keys.LEASES) == 0
    with running(redis_url):
        for number, task in enumerate(tasks):
            assert tokens_of(ended(redis_client, task)) == undisturbed([number + 1], 5)


def test_never_finished_without_a_result(redis_url: str, redis_client: "redis.Redis") -> None:
    """rq#1724: `finished` was visible before the result was."""
    tasks = [submit(redis_client, prompt_token_ids=(n + 1,)) for n in range(100)]
    waiting = set(tasks)

    with running(redis_url):

        def look() -> bool:
            for task in tuple(waiting):
                job = Job.fetch(task, connection=redis_client, serializer=JSONSerializer)
                if job.get_status() == "finished":
                    assert job.return_value()["outputs"][0]["finish_reason"] == "length"
                    assert job.return_value()["usage"]["completion_tokens"] == 5
                    waiting.discard(task)
            return not waiting

        until(look, "all are finished")


def test_cancel_at_the_third_token(redis_url: str, redis_client: "redis.Redis") -> None:
    """rq#2160: a cancel of a running job was overwritten by its end."""
    runner, permits = FakeRunner(), threading.Semaphore(3)
    runner.before_step = permits.acquire
    task = submit(redis_client, sampling={"max_tokens": 50})

    with running(redis_url, build_engine(runner)) as run:
        wait_for_length(redis_client, task, 3)
        assert TaskStore(redis_client).cancel(task) == "cancelled"
        events = ended(redis_client, task)
        until(lambda: not run.worker._crew.holdings, "the worker lets go")
        permits.release(100)
        until(lambda: run.worker._crew.loop.load == Load(), "nothing runs")

    assert len(tokens_of(events)) == 3
    assert events == ended(redis_client, task)
    assert runner.num_steps <= 4
    job = Job.fetch(task, connection=redis_client, serializer=JSONSerializer)
    assert job.get_status() == "canceled"


def test_cancel_between_claim_and_start(redis_url: str, redis_client: "redis.Redis") -> None:
    """rq#2160, rq#2292: a job cancelled after it was taken from the queue ran all the same."""
    tokenizer, may_encode, encoding = WordTokenizer(), threading.Event(), threading.Event()

    class Slow(WordTokenizer):
        def encode(self, text: str) -> list[int]:
            encoding.set()
            assert may_encode.wait(30)
            return super().encode(text)

    runner = FakeRunner()
    task = submit(redis_client, prompt="some words")

    with running(redis_url, build_engine(runner), model=served_model(Slow())) as run:
        assert encoding.wait(30)
        assert TaskStore(redis_client).cancel(task) == "cancelled"
        until(lambda: not run.worker._crew.holdings, "the worker heard of it")
        may_encode.set()
        mate = submit(redis_client, prompt=tokenizer.decode([1]))
        ended(redis_client, mate)
        assert tokens_of(ended(redis_client, task)) == []

    assert runner.num_steps == 5, "the steps of the mate alone"


def test_stop_job_command_of_rq(redis_url: str, redis_client: "redis.Redis") -> None:
    """rq#2227: the stop command was ignored, for all jobs but one."""
    runner, permits = FakeRunner(), threading.Semaphore(1)
    runner.before_step = permits.acquire
    first, second = (submit(redis_client, sampling=LONG) for _ in range(2))

    with running(redis_url, build_engine(runner)):
        step_until_all_run(redis_client, permits, [first, second])
        send_stop_job_command(redis_client, second, serializer=JSONSerializer)
        assert end_of(redis_client, second).finish_reason == "cancelled"
        permits.release(1000)
        assert end_of(redis_client, first).finish_reason == "length"


def test_shutdown_command_of_rq(redis_url: str, redis_client: "redis.Redis") -> None:
    with running(redis_url) as run:
        name = run.worker.name
        until(lambda: redis_client.pubsub_numsub(f"rq:pubsub:{name}")[0][1], "the worker listens")
        send_shutdown_command(redis_client, name)
        assert run.wait() == 0


def test_all_connections_are_killed_again_and_again(redis_url: str, redis_client: "redis.Redis") -> None:
    """redis-py#1573, rq#1836: after a lost connection workers stayed deaf or ended."""
    tasks = [submit(redis_client, prompt_token_ids=(n + 1,), sampling={"max_tokens": 60}) for n in range(8)]
    runner, permits = FakeRunner(), threading.Semaphore(0)
    runner.before_step = permits.acquire

    with running(redis_url, build_engine(runner)) as run:
        for round_number in range(1, 6):
            permits.release(8)
            wait_for_length(redis_client, tasks[0], round_number * 4)
            redis_client.client_kill_filter(skipme=True, _type="normal")
            redis_client.client_kill_filter(skipme=True, _type="pubsub")
        permits.release(1000)
        for number, task in enumerate(tasks):
            assert tokens_of(ended(redis_client, task)) == undisturbed([number + 1], 60)
        assert run.status is None, "the worker lives"
        assert tokens_of(ended(redis_client, submit(redis_client))) == undisturbed([1, 2, 3], 5)


def test_rq_info_shows_what_runs(redis_url: str, redis_client: "redis.Redis") -> None:
    """The command of RQ, as its users type it; it must not end what it looks at."""
    runner, permits = FakeRunner(), threading.Semaphore(1)
    runner.before_step = permits.acquire
    tasks = [submit(redis_client, sampling=LONG) for _ in range(3)]
    program = str(Path(sys.executable).with_name("rq"))

    with running(redis_url, build_engine(runner)) as run:
        step_until_all_run(redis_client, permits, tasks)
        until(lambda: redis_client.hget(f"rq:worker:{run.worker.name}", "state") == b"busy", "busy")
        shown = subprocess.run(
            [program, "info", "--url", redis_url], capture_output=True, text=True, check=True
        ).stdout
        permits.release(1000)
        for task in tasks:
            assert tokens_of(ended(redis_client, task)) == undisturbed([1, 2, 3], 190)

    lines = shown.splitlines()
    queue = queue_name(SLUG, 2, DEFAULT_TENANT)
    assert any(line.startswith(queue) and "0, 3 executing" in line for line in lines)
    assert any(line.startswith(run.worker.name) and ": busy " in line for line in lines)


def test_the_record_tells_what_the_worker_does(redis_url: str, redis_client: "redis.Redis") -> None:
    store = TaskStore(redis_client)
    runner, permits = FakeRunner(), threading.Semaphore(1)
    runner.before_step = permits.acquire
    task = submit(redis_client)

    with running(redis_url, build_engine(runner)) as run:
        record = until(lambda: next((one for one in store.workers() if one.running), None), "one runs")
        assert (record.name, record.state, record.model) == (run.worker.name, "ready", MODEL)
        run.worker.stop("test")
        until(lambda: store.workers()[0].state == "draining", "draining")
        permits.release(100)
        ended(redis_client, task)
        assert run.wait() == 0

    assert store.workers() == []
    assert redis_client.smembers("rq:workers") == set()


def test_redis_restarts_under_the_worker(tmp_path: Path) -> None:
    """redis-py#1573, rq#1846: after a restart of Redis workers hung, ended or stayed deaf."""
    port = free_port()
    server = start_redis(tmp_path, port)
    runner, permits = FakeRunner(), threading.Semaphore(1)
    runner.before_step = permits.acquire
    try:
        with redis.Redis.from_url(server.url) as client, running(server.url, build_engine(runner)) as run:
            task = submit(client, sampling={"max_tokens": 30})
            wait_for_length(client, task, 1)
            server.process.kill()
            server.process.wait()
            permits.release(10)
            until(lambda: run.worker._crew.publisher.backlog >= 10, "tokens wait for Redis")
            server = start_redis(tmp_path, port)
            permits.release(100)
            assert tokens_of(ended(client, task)) == undisturbed([1, 2, 3], 30)
            assert tokens_of(ended(client, submit(client))) == undisturbed([1, 2, 3], 5)
    finally:
        server.process.kill()
        server.process.wait()


def count_calls(target: Any, name: str) -> list[None]:
    """A list that grows with each call of `target.name`, which does what it did."""
    calls: list[None] = []
    method = getattr(target, name)

    def counting() -> None:
        calls.append(None)
        method()

    setattr(target, name, counting)
    return calls


def test_the_loop_rests_while_redis_is_away_too_long(tmp_path: Path) -> None:
    """A bounded buffer: no more is computed than can be kept, and the loop is not taken for stalled."""
    server = start_redis(tmp_path, free_port())
    runner = FakeRunner()
    try:
        with redis.Redis.from_url(server.url) as client, running(server.url, build_engine(runner)) as run:
            run.worker._crew.publisher._max_backlog = 20
            ticks = count_calls(run.worker._crew.pulse, "tick")
            task = submit(client, sampling={"max_tokens": 190})
            wait_for_length(client, task, 1)
            server.process.send_signal(signal.SIGSTOP)
            until(lambda: run.worker._crew.publisher.is_full, "the buffer is full")
            num_ticks = len(ticks)
            until(lambda: len(ticks) >= num_ticks + 3, "the loop goes round")
            assert run.worker._crew.publisher.backlog == 20
            server.process.send_signal(signal.SIGCONT)
            assert tokens_of(ended(client, task)) == undisturbed([1, 2, 3], 190)
    finally:
        server.process.kill()
        server.process.wait()
