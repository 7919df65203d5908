"""An intake and a publisher without threads, against a real server."""

import threading

import redis

from engine.config import EngineConfig
from tests.worker.fakes import RecordingContext, served_model
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import Timing
from worker.inbox import PreparedTask
from worker.intake import Intake
from worker.loop import Load
from worker.preparation import ServedModel
from worker.publisher import Publisher


class NeverWaits(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return True


class IntakeHarness:
    """`load`: what the intake reads of the loop, whose place the test takes."""

    def __init__(self, client: "redis.Redis", model: ServedModel | None = None, slots: int = 8) -> None:
        self.client = client
        self.load = Load()
        self.context = RecordingContext(
            model=model or served_model(), timing=Timing(lease_seconds=60), wake=NeverWaits()
        )
        self.inbox = self.context.inbox
        self.owned_tasks = self.context.owned_tasks
        self.store = TaskStore(client)
        self.publisher = Publisher(self.store, self.context)
        config = EngineConfig(
            max_model_len=200, num_kv_blocks=400, block_size=4, max_num_seqs=slots, max_num_prefill_seqs=4
        )
        self.intake = Intake(self.store, self.context, config, self)

    def turn(self) -> list[PreparedTask]:
        self.intake.turn()
        return [message for message in self.inbox.take(0) if isinstance(message, PreparedTask)]

    def hand_back(self) -> None:
        TaskStore(self.client).hand_back(self.owned_tasks.owners())
