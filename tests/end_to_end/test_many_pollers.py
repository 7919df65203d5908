"""Many clients poll many short tasks: none sees a finished task without its result."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.live_service import TERMINAL, LiveService
from tests.tiny_models import save_model

NUM_TASKS = 200
NUM_POLLERS = 8
NUM_TOKENS = 2


def test_a_finished_task_always_has_its_result(tmp_path: Path) -> None:
    """rq#1724, rq#1997: a job was `finished` before its result could be read."""
    limits = {"TOKENMILL_DTYPE": "float32", "TOKENMILL_MAX_NUM_SEQS": "16"}
    with (
        LiveService(save_model(tmp_path / "model"), tmp_path, limits) as service,
        ThreadPoolExecutor(NUM_POLLERS) as pool,
    ):
        tasks: list[str] = []
        all_submitted = threading.Event()
        pollers = [pool.submit(poll_all, service, tasks, all_submitted) for _ in range(NUM_POLLERS)]
        for number in range(NUM_TASKS):
            body = {"prompt_token_ids": [5 + number, 6], "max_tokens": NUM_TOKENS, "ignore_eos": True}
            tasks.append(service.submit(**body))
        all_submitted.set()
        for poller in pollers:
            ends = poller.result(180)
            assert len(ends) == NUM_TASKS
            for task in ends:
                assert (task["status"], task["error"]) == ("completed", None)
                assert task["usage"]["completion_tokens"] == NUM_TOKENS
                (output,) = task["outputs"]
                assert (len(output["token_ids"]), output["finish_reason"]) == (NUM_TOKENS, "length")


def poll_all(service: LiveService, tasks: list[str], all_submitted: threading.Event) -> list[Any]:
    """Each task at the first poll that shows its end."""
    ends: dict[str, Any] = {}
    while not all_submitted.is_set() or len(ends) < len(tasks):
        for task_id in [one for one in list(tasks) if one not in ends]:
            task = service.task(task_id)
            if task["status"] in TERMINAL:
                ends[task_id] = task
    return list(ends.values())
