"""How many tasks are claimed, and how they are prepared: a real server, no threads."""

import json
import threading
from typing import Any

import pytest
import redis

from engine.outputs import ResumedOutput, SequenceOutput
from engine.requests.deadlines import NO_DEADLINES, Deadlines
from engine.sequence import FinishReason
from tests.worker.fakes import (
    WordTokenizer,
    ended,
    job_data,
    served_model,
    submit,
)
from tests.worker.intake_harness import IntakeHarness
from tokenmill.protocol import keys
from tokenmill.protocol.messages import FinishedEvent, LogEntry
from tokenmill.protocol.store.task_store import TaskStore
from worker.inbox import Discard, PreparedTask
from worker.intake import PrefetchLimit
from worker.loop import Load
from worker.ownership import OwnedTasks, Ownership
from worker.preparation import scoped_salt
from worker.stream import Stream


@pytest.mark.parametrize(
    ("num_held", "num_running", "room"),
    [
        (0, 0, 16 + 8),  # what one step can start, plus the look-ahead
        (17, 17, 16 + 8),
        (60, 60, 4 + 8),  # the last slots
        (64, 64, 8),
        (72, 64, 0),
        (16, 0, 8),  # claimed but not started: KV blocks may be short, so other workers should claim the rest
        (24, 0, 0),
        (40, 10, -6),
    ],
)
def test_only_tasks_that_can_start_soon_are_claimed(num_held: int, num_running: int, room: int) -> None:
    prefetch_limit = PrefetchLimit(max_num_seqs=64, max_num_prefill_seqs=16)

    assert prefetch_limit.room(num_held, Load(num_running=num_running)) == room


@pytest.mark.parametrize("max_num_seqs", [1, 7, 8, 64])
@pytest.mark.parametrize("max_num_prefill_seqs", [1, 4, 16])
def test_few_claimed_tasks_wait_before_a_later_one(max_num_seqs: int, max_num_prefill_seqs: int) -> None:
    """At most what one step can start, or the free slots, plus the look-ahead."""
    prefetch_limit = PrefetchLimit(max_num_seqs=max_num_seqs, max_num_prefill_seqs=max_num_prefill_seqs)
    for running in range(max_num_seqs + 1):
        limit = min(max_num_prefill_seqs, max_num_seqs - running) + prefetch_limit.look_ahead
        for held in range(running, running + limit + 1):
            assert held + prefetch_limit.room(held, Load(num_running=running)) - running == limit


def test_the_rest_is_left_to_other_workers(redis_client: "redis.Redis") -> None:
    tasks = [submit(redis_client) for _ in range(20)]
    harness = IntakeHarness(redis_client, slots=8)

    first = harness.turn()
    second = harness.turn()

    assert [one.ownership.task_id for one in first] == tasks[:5], "4 prefills in a step and 1 of look-ahead"
    assert second == [], "none of these has started"
    harness.load = Load(num_running=5)
    assert len(harness.turn()) == 4, "8 slots and 1 of look-ahead are held"
    assert harness.turn() == []


def test_a_stalled_worker_claims_nothing(redis_client: "redis.Redis") -> None:
    """It would claim its own lapsed tasks again, and the watchdog would end it with them."""
    submit(redis_client)
    harness = IntakeHarness(redis_client)
    harness.context.now = 61.0
    assert harness.context.watchdog.is_stalled
    assert harness.turn() == []
    harness.context.watchdog.tick()
    assert len(harness.turn()) == 1


def test_a_claim_is_confirmed_before_it_is_prepared(
    redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The death of the worker counts against the task from then on, not before."""
    task = submit(redis_client)
    harness, phases = IntakeHarness(redis_client), []
    renew, is_away = harness.store.renew, [True]

    def failing(*arguments: Any, **options: Any) -> Any:
        if is_away.pop() if is_away else False:
            raise redis.ConnectionError("away")
        phases.append(redis_client.hget(keys.run(task), "standing"))
        return renew(*arguments, **options)

    monkeypatch.setattr(harness.store, "renew", failing)
    with pytest.raises(redis.ConnectionError):
        harness.turn()
    assert harness.inbox.take(0.0) == [], "it is not prepared"
    assert len(harness.turn()) == 1
    assert phases == [b"untouched"]
    assert redis_client.hget(keys.run(task), "standing") == b"seated"


def test_a_claim_that_was_lost_before_its_confirmation_is_not_prepared(redis_client: "redis.Redis") -> None:
    task = submit(redis_client)
    harness = IntakeHarness(redis_client)
    claim = harness.store.claim

    def lapsing(*arguments: Any, **options: Any) -> Any:
        claimed = claim(*arguments, **options)
        redis_client.hset(keys.run(task), "owner", "another")
        return claimed

    harness.store.claim = lapsing  # type: ignore[method-assign] # between claim and confirmation
    assert harness.turn() == []


def test_the_prompt_is_stored_and_never_rendered_again(redis_client: "redis.Redis") -> None:
    """A template may insert the date. A resumed request continues the prompt that it started with."""
    task = submit(redis_client, messages=({"role": "user", "content": "four"},))
    harness = IntakeHarness(redis_client)
    (prepared,) = harness.turn()
    harness.publisher.turn()
    harness.hand_back()

    class Tomorrow(WordTokenizer):
        def render_chat(self, messages: Any, tools: Any = (), arguments: Any = None) -> list[int]:
            raise AssertionError("rendered again")

    (again,) = IntakeHarness(redis_client, served_model(Tomorrow())).turn()

    assert prepared.request.prompt_token_ids == again.request.prompt_token_ids == [1, 4, 2]
    assert again.ownership.task_id == task
    assert again.ownership.owner != prepared.ownership.owner


def test_another_model_under_the_same_name_fails_the_resume(redis_client: "redis.Redis") -> None:
    task = submit(redis_client)
    harness = IntakeHarness(redis_client)
    harness.turn()
    harness.publisher.turn()
    harness.hand_back()

    other = IntakeHarness(redis_client, served_model(fingerprint="f2"))
    assert other.turn() == []
    other.publisher.turn()

    (end,) = ended(redis_client, task)
    assert isinstance(end, FinishedEvent)
    assert end.error is not None
    assert end.error["code"] == "model_changed"
    assert end.usage is not None
    assert end.usage["prompt_tokens"] == 3, "as the first attempt counted"


def test_a_resumed_request_brings_its_tokens(redis_client: "redis.Redis") -> None:
    submit(redis_client)
    harness = IntakeHarness(redis_client)
    (prepared,) = harness.turn()
    harness.publisher.turn()
    stream = Stream(prepared.ownership)
    for token in (7, 8):
        stream.add(SequenceOutput(request_id="", token_id=token, text=f"<{token}>"))
    TaskStore(redis_client).publish([stream.to_write()])
    harness.hand_back()

    (again,) = IntakeHarness(redis_client).turn()

    assert again.request.resumed == (ResumedOutput(0, (7, 8)),)
    assert prepared.request.resumed == ()


def test_an_ended_log_is_settled_and_not_run(redis_client: "redis.Redis") -> None:
    """celery#4354: a job that had ended ran again."""
    task = submit(redis_client)
    for seq, entry in enumerate((LogEntry.of_token(7, "<7>"), LogEntry.of_end("", "stop"))):
        fields = {"t": entry.token, "x": entry.text, "m": entry.members}
        redis_client.xadd(keys.log(task), {n: v for n, v in fields.items() if v}, id=f"0-{seq + 1}")
    harness = IntakeHarness(redis_client)

    assert harness.turn() == []
    harness.publisher.turn()

    snapshot = TaskStore(redis_client).inspect(task)
    assert snapshot is not None
    assert (snapshot.status, len(harness.owned_tasks)) == ("completed", 0)


def test_only_the_one_function_name_is_accepted(redis_client: "redis.Redis") -> None:
    payload = {"id": "x", "model": "fake", "prompt_token_ids": [1], "sampling": {}}
    calls = [
        job_data(payload, function="os.system"),
        job_data(payload, function="worker.tasks.generate2"),
        json.dumps(["worker.tasks.generate", None, [], {}]).encode(),
        json.dumps({"worker.tasks.generate": 1}).encode(),
        b"\x78\x9cbroken zlib",
        b"",
    ]
    tasks = [submit(redis_client, call) for call in calls]
    harness = IntakeHarness(redis_client, slots=64)

    assert harness.turn() == []
    harness.publisher.turn()

    codes = []
    for task in tasks:
        (end,) = ended(redis_client, task)
        assert isinstance(end, FinishedEvent)
        codes.append((end.error or {})["code"])
    assert codes == ["unknown_function"] * 2 + ["unreadable_request"] * 4


def test_a_new_claim_replaces_an_attempt_whose_loss_was_not_noticed(redis_client: "redis.Redis") -> None:
    """bullmq#3183: a worker that was away for longer than a lease claimed its own task again."""
    submit(redis_client)
    harness = IntakeHarness(redis_client)
    (first,) = harness.turn()
    harness.publisher.turn()
    harness.hand_back()

    harness.intake.turn()
    discard, second = harness.inbox.take(0)
    harness.publisher.turn()

    assert discard == Discard(first.ownership)
    assert isinstance(second, PreparedTask)
    assert harness.owned_tasks.owners() == dict([second.ownership])
    assert harness.publisher.request_ids == {second.ownership.request_id}
    assert harness.context.exported.value("tasks_lost_total") == 1


def test_owning_a_task_again_replaces_the_earlier_attempt() -> None:
    owned_tasks = OwnedTasks(threading.Event())
    old, new = Ownership("t", "1"), Ownership("t", "2")
    owned_tasks.add(old)
    owned_tasks.add(new)

    assert new in owned_tasks
    assert old not in owned_tasks
    assert not owned_tasks.drop(old)
    assert owned_tasks.owners() == {"t": "2"}


def test_a_request_brings_its_salt_and_limits(redis_client: "redis.Redis") -> None:
    limits: dict[str, Any] = {"queue_timeout_seconds": 5, "ttft_timeout_seconds": 6.5, "timeout_seconds": 7}
    submit(redis_client, cache_salt="s", **limits)
    submit(redis_client)

    salted, plain = IntakeHarness(redis_client).turn()

    assert salted.request.deadlines == Deadlines(**limits)
    assert plain.request.deadlines == NO_DEADLINES
    assert salted.request.cache_salt != plain.request.cache_salt


def test_a_salt_belongs_to_its_tenant() -> None:
    """Tenants with the same salt must not find each other's prompts in the cache."""
    salts = {scoped_salt(tenant, salt) for tenant in ("a", "b") for salt in (None, "s", "b")}
    assert len(salts) == 6


def test_a_deadline_that_an_earlier_attempt_met_is_not_set_again(redis_client: "redis.Redis") -> None:
    submit(redis_client, queue_timeout_seconds=5, ttft_timeout_seconds=6, timeout_seconds=7)
    left: list[Deadlines] = []
    for facts, tokens in (({}, 0), ({"scheduled": "0"}, 0), ({}, 1)):
        harness = IntakeHarness(redis_client)
        (prepared,) = harness.turn()
        left.append(prepared.request.deadlines)
        stream = Stream(prepared.ownership)
        stream.record(facts)
        for _ in range(tokens):
            stream.add(SequenceOutput(request_id="", token_id=7, text="<7>"))
        TaskStore(redis_client).publish([stream.to_write()])
        harness.hand_back()
    (last,) = IntakeHarness(redis_client).turn()

    assert left[0] == Deadlines(queue_timeout_seconds=5, ttft_timeout_seconds=6, timeout_seconds=7)
    assert left[1] == left[0], "it was claimed but not started"
    assert left[2] == Deadlines(ttft_timeout_seconds=6, timeout_seconds=7)
    assert last.request.deadlines == Deadlines(timeout_seconds=7)


def test_a_resumed_request_brings_each_of_its_outputs(redis_client: "redis.Redis") -> None:
    submit(redis_client, sampling={"n": 4})
    harness = IntakeHarness(redis_client)
    (prepared,) = harness.turn()
    stream = Stream(prepared.ownership, num_outputs=4)
    for index, token in ((2, 7), (0, 8), (2, 9)):
        stream.add(SequenceOutput(request_id="", index=index, token_id=token, text=f"<{token}>"))
    stream.add(SequenceOutput(request_id="", index=2, finish_reason=FinishReason.LENGTH))
    stream.add(SequenceOutput(request_id="", index=3, finish_reason=FinishReason.ERROR, error="x"))
    TaskStore(redis_client).publish([stream.to_write()])
    harness.hand_back()

    (again,) = IntakeHarness(redis_client).turn()

    assert again.request.resumed == (
        ResumedOutput(0, (8,)),
        ResumedOutput(2, (7, 9), FinishReason.LENGTH),
        ResumedOutput(3, (), FinishReason.ERROR),
    )


def test_tasks_with_several_outputs_fill_the_slots() -> None:
    """Eight tasks of eight outputs fill 64 slots. A ninth is left to another worker."""
    prefetch_limit = PrefetchLimit(max_num_seqs=64, max_num_prefill_seqs=16)

    assert prefetch_limit.room(8, Load(num_running=64)) == 8
    assert prefetch_limit.room(9, Load(num_running=64, num_waiting=8)) == 0
