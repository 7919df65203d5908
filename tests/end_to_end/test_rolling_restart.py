"""Two workers are replaced one after the other under load, without any visible effect."""

from pathlib import Path
from typing import Any

import pytest
import redis
from transformers import AutoModelForCausalLM

from tests.end_to_end.test_service import (
    assert_ended_as_alone,
    executing,
    greedy,
    random_prompts,
    rq_info,
    token_ids,
    waiting,
)
from tests.live_service import LiveService, wait_for
from tests.tiny_models import save_model
from tokenmill.protocol import keys

LIMITS = {
    "TOKENMILL_DTYPE": "float32",
    "TOKENMILL_MAX_NUM_BATCHED_TOKENS": "64",
    "TOKENMILL_MAX_NUM_SEQS": "4",
    # Whatever runs at a stop is handed back, however fast the machine is.
    "TOKENMILL_GRACE_SECONDS": "0",
}
WAVE = 5


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


class Load:
    """Waves of requests: some wait and some run whenever a worker stops."""

    def __init__(self, service: LiveService) -> None:
        self._service = service
        self._prompts = random_prompts(11, 100, 30)
        self.ids: list[str] = []

    @property
    def prompts(self) -> list[list[int]]:
        return self._prompts[: len(self.ids)]

    @property
    def lengths(self) -> list[int]:
        return [150 + 10 * (number % 7) for number in range(len(self.ids))]

    def more(self) -> None:
        """Every request is accepted, whatever happens to the workers."""
        for _ in range(WAVE):
            number = len(self.ids)
            body = greedy(self._prompts[number], 150 + 10 * (number % 7))
            self.ids.append(self._service.submit(**body))

    def is_under_way(self) -> bool:
        """Every request of the last wave has started."""
        return all(task["outputs"] and token_ids(task) for task in map(self._service.task, self.ids[-WAVE:]))


def test_no_request_fails_during_a_rolling_restart(model_dir: Path, tmp_path: Path) -> None:
    """celery#3802, celery#4354: a restart lost running tasks or repeated finished ones."""
    with LiveService(model_dir, tmp_path, LIMITS) as service:
        service.start_worker()
        load = Load(service)
        load.more()
        for old in list(service.workers):
            wait_for(load.is_under_way, "the wave runs")
            load.more()
            old.popen.terminate()
            load.more()
            assert old.popen.wait(60) == 0, old.tail()
            service.start_worker()
            load.more()
        tasks = [service.wait_task(task_id) for task_id in load.ids]

        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
        assert_ended_as_alone(model, tasks, load.prompts, load.lengths)
        with redis.Redis.from_url(service.redis_url) as client:
            attempts = [int(client.hget(keys.run(task_id), "attempt") or 0) for task_id in load.ids]
            logs = [client.xlen(keys.log(task_id)) for task_id in load.ids]
        assert max(attempts) > 1, "no task was handed back"
        assert logs == [length + 1 for length in load.lengths]
        info = rq_info(service)
        assert (waiting(info), executing(info)) == (0, 0)
