"""A worker whose steps return several tokens of one output: each is an event of its own, in order."""

import redis

from engine.outputs import SampledToken, ScheduledSequence
from tests.live_service import wait_for
from tests.worker.fakes import FakeRunner, build_engine, submit
from tests.worker.running import running
from tokenmill.protocol.messages import FinishedEvent, TokenEvent
from tokenmill.protocol.store.task_store import TaskStore

PERIOD = [5, 6, 7, 8]


class PeriodicRunner(FakeRunner):
    """Repeats `PERIOD`, which prompt lookup predicts."""

    def sample(self, logits: None, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        return [SampledToken(PERIOD[item.output_index % 4]) for item in items if item.samples]


def test_accepted_drafts_are_events_in_order(redis_url: str, redis_client: "redis.Redis") -> None:
    runner, store = PeriodicRunner(), TaskStore(redis_client)
    with running(redis_url, build_engine(runner, num_speculative_tokens=15)):
        ids = [submit(redis_client, sampling={"max_tokens": 90 + one}) for one in range(3)]
        for one, task_id in enumerate(ids):

            def has_ended(task_id: str = task_id) -> bool:
                snapshot = store.inspect(task_id)
                return snapshot is not None and snapshot.finished_at is not None

            wait_for(has_ended, "the task ends")
            *tokens, end = store.read_log(task_id)
            assert [event.seq for event in tokens] == list(range(90 + one))
            assert all(isinstance(event, TokenEvent) for event in tokens)
            assert [event.token for event in tokens] == [PERIOD[position % 4] for position in range(90 + one)]
            assert isinstance(end, FinishedEvent)
            assert end.usage is not None
            assert end.usage["completion_tokens"] == 90 + one
    assert runner.num_steps < 90
