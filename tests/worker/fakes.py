"""Shared by the worker's tests: tasks as the API submits them, and an engine with predictable tokens.

The engine is real. Its runner computes each token from all tokens before it, so that a resumed request
continues correctly only if it got all of them back.
"""

import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import redis
from prometheus_client import CollectorRegistry

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidParameter
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs, TokenLogprobs
from engine.sequence import Sequence as EngineSequence
from monitoring.families import PREFIX
from monitoring.worker import WorkerMetrics
from tokenmill.protocol import keys, naming
from tokenmill.protocol.limits import TIME_LIMIT_NAMES, TimeLimits
from tokenmill.protocol.messages import JOB_FUNCTION, Event, FinishedEvent, GenerateRequest
from tokenmill.protocol.naming import DEFAULT_TENANT, new_task_id, queue_name
from tokenmill.protocol.records import Submission, TaskPhase
from tokenmill.protocol.store.task_store import TaskStore
from worker.context import WorkerContext
from worker.ownership import Ownership
from worker.preparation import ServedModel

MODEL = "fake"
SLUG = naming.model_slug(MODEL)
VOCAB_SIZE = 1000
EOS = 999
TIMEOUT_SECONDS = 30.0


class WordTokenizer:
    """Each id is a word. A text has one token for each of its words, the length of the word."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        if not self.has_chat_template:
            raise InvalidParameter("messages", "this model has no chat template")
        if any(message["role"] == "pirate" for message in messages):
            raise InvalidParameter("messages", "unknown role pirate")
        return [1, *(len(message["content"]) for message in messages), *[3] * len(tools), 2]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"<{token_id}>" for token_id in token_ids if token_id != EOS)

    def decoded_bytes(self, skip_special_tokens: bool = True) -> None:
        """No byte decoder: text is decoded in windows."""

    def encode_text(self, text: str) -> list[int]:
        return self.encode(text)

    def special_token_id(self, text: str) -> int | None:
        return EOS if text == "<eos>" else None

    def token_bytes(self, token_id: int) -> bytes:
        """A token from 900 on is one byte, a part of a character."""
        return bytes([0x80 + token_id - 900]) if token_id >= 900 else f"<{token_id}>".encode()


def next_token(token_ids: list[int], index: int = 0) -> int:
    """The fake model's token after `token_ids` in output `index`. Never an end token."""
    return (
        sum(31 * position * token for position, token in enumerate(token_ids, 1)) + 7 + 100 * index
    ) % 900 + 1


def expected_tokens(prompt: list[int], num_tokens: int, index: int = 0) -> list[int]:
    """The output of a request without faults."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, index))
    return token_ids[len(prompt) :]


class FakeRunner:
    """Runner and sampler. `before_step` may block or raise; `sample_fault` may raise for a sequence."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.before_step: Callable[[], object] = lambda: None
        self.sample_fault: Callable[[EngineSequence], None] = lambda _: None

    def execute(self, outputs: SchedulerOutputs) -> None:
        if outputs.scheduled:
            self.before_step()
            self.num_steps += 1

    def check(self) -> None:
        """The device never fails by itself."""

    def release_memory(self) -> bool:
        return False

    def sample(self, logits: None, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        return [self._draw(item.sequence) for item in items if item.samples]

    def prompt_logprobs(
        self, logits: None, items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        """The logprob of prompt token i is -i."""
        return [(item, list(_of_prompt(item))) for item in items if _asks_for_prompt(item.sequence)]

    def _draw(self, sequence: EngineSequence) -> SampledToken:
        self.sample_fault(sequence)
        token_id = next_token(sequence.token_ids, sequence.index)
        top = ((token_id, -0.5), (901, -math.inf))[: sequence.params.logprobs]
        logprobs = TokenLogprobs(token_id, -0.5, top) if sequence.params.logprobs is not None else None
        return SampledToken(token_id, logprobs=logprobs)


def _asks_for_prompt(sequence: EngineSequence) -> bool:
    return sequence.params.prompt_logprobs is not None and not sequence.num_output_tokens


def _of_prompt(item: ScheduledSequence) -> Iterator[TokenLogprobs]:
    for position in range(item.start + 1, item.start + item.num_new_tokens + 1):
        if position < item.sequence.num_prompt_tokens:
            yield TokenLogprobs(item.sequence.token_ids[position], -float(position))


def build_engine(
    runner: FakeRunner | None = None, clock: Callable[[], float] = time.monotonic, **limits: Any
) -> Engine:
    runner = runner or FakeRunner()
    sizes: dict[str, Any] = {"max_model_len": 200, "num_kv_blocks": 400, "block_size": 4, **limits}
    config = EngineConfig(**sizes)
    return Engine(
        config,
        runner,
        runner,
        WordTokenizer(),
        eos_token_ids=frozenset({EOS}),
        vocab_size=VOCAB_SIZE,
        clock=clock,
    )


def served_model(tokenizer: Any = None, fingerprint: str = "f1") -> ServedModel:
    return ServedModel(name=MODEL, slug=SLUG, fingerprint=fingerprint, tokenizer=tokenizer or WordTokenizer())


class ExportedMetrics(WorkerMetrics):
    """A worker's metrics, read as Prometheus reads them."""

    def __init__(self) -> None:
        self._exported = CollectorRegistry()
        super().__init__(self._exported, model=MODEL)

    def value(self, name: str) -> float:
        """The sum of all samples of that name. `name` has no prefix."""
        samples = [sample for family in self._exported.collect() for sample in family.samples]
        found = [sample.value for sample in samples if sample.name == PREFIX + name]
        assert found, name
        return sum(found)


def new_metrics() -> ExportedMetrics:
    return ExportedMetrics()


class RecordingContext(WorkerContext):
    """A context without threads. Its clock stands still, and what is dropped is recorded."""

    def __init__(self, **fields: Any) -> None:
        self.now = 0.0
        self.lost: list[Ownership] = []
        self.cancelled: list[Ownership] = []
        self.phase: TaskPhase | None = None
        """Overrides the phase of every task."""
        self.exported = new_metrics()
        values: dict[str, Any] = {
            "model": served_model(),
            "connect": lambda _: None,
            "name": "w",
            "arm": lambda _: None,
        }
        super().__init__(metrics=self.exported, clock=lambda: self.now, **(values | fields))

    def drop_lost(self, ownership: Ownership) -> None:
        self.lost.append(ownership)
        super().drop_lost(ownership)

    def drop_cancelled(self, ownership: Ownership) -> None:
        self.cancelled.append(ownership)
        super().drop_cancelled(ownership)

    def phases(self, owners: Mapping[str, str]) -> dict[str, TaskPhase]:
        return dict.fromkeys(owners, self.phase) if self.phase else super().phases(owners)


def job_data(payload: object, function: str = JOB_FUNCTION) -> bytes:
    return zlib.compress(json.dumps([function, None, [payload], {}]).encode())


def submit(client: "redis.Redis", data: bytes | None = None, *, priority: int = 2, **request: Any) -> str:
    """Queue a task as the API does. `request`: fields of GenerateRequest. Returns its id."""
    task_id = new_task_id()
    if data is None:
        fields = {"prompt_token_ids": (1, 2, 3), "sampling": {"max_tokens": 5, "temperature": 0}, **request}
        if "prompt" in request or "messages" in request:
            del fields["prompt_token_ids"]
        data = job_data(GenerateRequest(id=task_id, model=MODEL, priority=priority, **fields).to_payload())
    queue = queue_name(SLUG, priority, DEFAULT_TENANT)
    submission = Submission(
        task_id=task_id,
        queue=queue,
        slug=SLUG,
        model=MODEL,
        priority=priority,
        tenant=DEFAULT_TENANT,
        job_fields={
            "status": "queued", "data": data, "origin": queue, "created_at": "2026-01-01T00:00:00.000000Z",
            "enqueued_at": "2026-01-01T00:00:00.000000Z", "description": "generate", "timeout": -1,
        },
        cost=10,
        num_outputs=int(request.get("sampling", {}).get("n", 1)),
        limits=TimeLimits(**{name: request.get(name) for name in TIME_LIMIT_NAMES}),
    )  # fmt: skip
    TaskStore(client).submit(submission)
    return task_id


def claim_and_lapse(client: "redis.Redis", max_tasks: int) -> list[str]:
    """A worker claims tasks, confirms the claims, and disappears."""
    store = TaskStore(client)
    claimed = store.claim(SLUG, worker="dead", max_tasks=max_tasks, lease_seconds=-1)
    store.renew({one.task_id: one.owner for one in claimed}, -1)
    return [one.task_id for one in claimed]


def die_with_all(client: "redis.Redis") -> None:
    """A worker claims all waiting tasks, starts them, and dies."""
    store = TaskStore(client)
    claim_and_lapse(client, 100)
    store.reap(SLUG, max_task_seconds=3600)


def until(condition: Callable[[], Any], what: str = "") -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not after {TIMEOUT_SECONDS:g} s: {what}"
        time.sleep(0.01)
    return value


def log_length(client: "redis.Redis", task_id: str) -> int:
    return int(client.xlen(keys.log(task_id)))


def wait_for_length(client: "redis.Redis", task_id: str, length: int) -> None:
    until(lambda: log_length(client, task_id) >= length, f"{length} messages of {task_id}")


def ended(client: "redis.Redis", task_id: str) -> list[Event]:
    """Wait for the end. Returns all messages; checks that they have no gap and each output ends once."""

    def events() -> list[Event]:
        found = TaskStore(client).read_log(task_id)
        return found if found and isinstance(found[-1], FinishedEvent) and found[-1].done else []

    found: list[Event] = until(events, f"{task_id} ends")
    assert [event.seq for event in found] == list(range(len(found)))
    ends = [event.index for event in found if isinstance(event, FinishedEvent)]
    assert sorted(ends) == sorted({event.index for event in found}), "each output ends once"
    return found


def end_of(client: "redis.Redis", task_id: str) -> FinishedEvent:
    last = ended(client, task_id)[-1]
    assert isinstance(last, FinishedEvent)
    return last


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [event.token for event in events if not isinstance(event, FinishedEvent)]
