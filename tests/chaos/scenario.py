"""A whole run: start the service, send traffic, let the storms loose, wait for all to end, close the books.

Law: the verdict comes from what is stored and what was read, after everything has ended or has had its time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos import leftovers
from tests.chaos.client import Record
from tests.chaos.cluster import LEASE_SECONDS, Cluster, until
from tests.chaos.errands import errands
from tests.chaos.faults import TO_PROCESSES, TO_REDIS, Fault
from tests.chaos.hooks import hasten
from tests.chaos.ledger import Account, Kind, Problem, audit
from tests.chaos.storm import Storm
from tests.chaos.takeovers import Takeovers
from tests.chaos.texts import Judge, answers_of, few_enough
from tests.chaos.traffic import Traffic
from tokenmill.protocol import naming, rq_keys
from tokenmill.protocol.messages import FinishedEvent
from tokenmill.protocol.store.task_store import TaskStore

START_SECONDS = 180.0
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How hard it blows.

    `seconds`: of storm, None for each fault once. At least `min_requests` are sent. `settle_seconds`: a
    watchdog, for everything to end after the storm.
    """

    seed: int
    seconds: float | None = None
    num_clients: int = 8
    min_requests: int = 30
    to_processes: Mapping[str, Fault] = field(default_factory=lambda: TO_PROCESSES)
    to_redis: Mapping[str, Fault] = field(default_factory=lambda: TO_REDIS)
    lease_seconds: float = LEASE_SECONDS
    settle_seconds: float = 120.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a run."""

    seed: int
    num_requests: int
    num_faults: int
    num_resumed_tokens: int
    problems: Sequence[Problem]
    records: Sequence[Record]

    def count(self, kind: Kind) -> int:
        return sum(problem.kind == kind for problem in self.problems)

    def __str__(self) -> str:
        kinds = " ".join(f"{kind}={self.count(kind)}" for kind in ("lost", "doubled", "stuck"))
        return (
            f"chaos: requests={self.num_requests} faults={self.num_faults}"
            f" resumed_tokens={self.num_resumed_tokens} {kinds} seed={self.seed}"
        )


def run(plan: Plan, model_dir: Path, directory: Path, say: Say) -> Verdict:
    """`directory`: for logs and Redis's files. `say` gets a line for whatever happens."""
    began = time.monotonic()

    def tell(line: str) -> None:
        say(f"{time.monotonic() - began:7.2f} {line}")

    cluster = Cluster(model_dir, directory, lease_seconds=plan.lease_seconds)
    try:
        cluster.start()
        return _Run(plan, cluster, model_dir, tell).finish()
    finally:
        cluster.close()


class _Run:
    """One run on a cluster that has been started."""

    def __init__(self, plan: Plan, cluster: Cluster, model_dir: Path, say: Say) -> None:
        self._plan = plan
        self._cluster = cluster
        self._say = say
        self._slug = naming.model_slug(naming.served_model_name(str(model_dir)))
        self._takeovers = Takeovers(cluster.redis_url)
        self._traffic = Traffic(
            errands(plan.seed),
            plan.num_clients,
            api_port=cluster.api.port,
            redis_url=cluster.redis_url,
            webhook_url=cluster.receiver.url,
            on_accepted=self._takeovers.follow,
        )
        self._storms = (
            Storm(
                cluster, plan.to_processes, Random(f"{plan.seed}:processes"),
                pauses=(0.5, 2.0), is_well=cluster.are_workers_well, say=say,
            ),
            Storm(cluster, plan.to_redis, Random(f"{plan.seed}:redis"), pauses=(1.0, 3.0), say=say),
        )  # fmt: skip
        # While the processes start, which takes longer.
        self._judge = Judge(model_dir)

    def finish(self) -> Verdict:
        assert self._cluster.wait_until_well(START_SECONDS), "\n".join(
            program.tail() for program in self._cluster.programs
        )
        self._blow()
        problems = self._settle()
        records = [record for record in self._traffic.records if record.task_ids]
        accounts = self._accounts(records)
        problems += audit(accounts)
        # Each once: a client tries again, and is told the same.
        complaints = [f"{one.errand}: {text}" for one in records for text in dict.fromkeys(one.complaints)]
        problems += [Problem("lost", text) for text in complaints]
        problems += self._judge_texts(records, accounts)
        with self._cluster.admin() as client:
            problems += leftovers.look(client, self._slug)
        self._cluster.stop()
        problems += [Problem("stuck", text) for text in self._cluster.complaints]
        return Verdict(
            seed=self._plan.seed,
            num_requests=len(records),
            num_faults=sum(storm.num_struck for storm in self._storms),
            num_resumed_tokens=self._takeovers.num_tokens,
            problems=problems,
            records=records,
        )

    def _blow(self) -> None:
        self._say("all is well")
        self._takeovers.start()
        self._traffic.start()
        for storm in self._storms:
            storm.start(self._plan.seconds)
        for storm in self._storms:
            storm.wait()
        self._say("the storm is over")
        until(lambda: len(self._traffic.records) >= self._plan.min_requests, self._plan.settle_seconds)
        self._traffic.enough()

    def _settle(self) -> list[Problem]:
        """Everything has its time to end."""
        is_well = self._cluster.wait_until_well(self._plan.settle_seconds)
        self._traffic.stop(self._plan.settle_seconds)
        with self._cluster.admin() as client:
            # What nobody waits for, as its reply was lost, and leases of the last dead worker.
            until(lambda: leftovers.is_quiet(client, self._slug), self._plan.settle_seconds)
            until(lambda: self._are_all_told(client), self._plan.settle_seconds, pause=0.5)
        self._takeovers.stop()
        self._say("all is quiet")
        refused = [record for record in self._traffic.records if not record.task_ids]
        problems = [Problem("stuck", f"{record.errand}: never accepted") for record in refused]
        return problems if is_well else [*problems, Problem("stuck", "the service has not recovered")]

    def _are_all_told(self, client: Any) -> bool:
        """Nobody waits a minute for the next try of a webhook, nor two for a deliverer that was killed."""
        hasten(client)
        told = self._cluster.receiver.told
        records = self._traffic.records
        return all(record.task_ids[0] in told for record in records if record.is_to_be_told)

    def _accounts(self, records: Sequence[Record]) -> list[Account]:
        with self._cluster.admin() as client:
            store = TaskStore(client)
            told = self._cluster.receiver.told
            return [_account(client, store, record, told) for record in records]

    def _judge_texts(self, records: Sequence[Record], accounts: Sequence[Account]) -> list[Problem]:
        ended = [
            (record.errand, answers_of(account.events))
            for record, account in zip(records, accounts, strict=True)
            if account.events and isinstance(account.events[-1], FinishedEvent)
        ]
        problems = self._judge.judge((errand, answer) for errand, answers in ended for answer in answers)
        if not few_enough(len(self._judge.near_ties), len(ended)):
            problems += [Problem("lost", f"near tie: {text}") for text in self._judge.near_ties]
        return problems


def _account(client: Any, store: TaskStore, record: Record, told: Mapping[str, list[str]]) -> Account:
    task_id = record.task_ids[0]
    snapshot = store.inspect(task_id)
    return Account(
        name=str(record.errand),
        task_ids=tuple(record.task_ids),
        status=snapshot.status if snapshot else None,
        may_be=record.errand.may_end_as,
        events=tuple(store.read_log(task_id)),
        num_results=client.xlen(rq_keys.results(task_id)),
        reading=record.reading,
        gave_up=record.gave_up,
        webhooks=tuple(told.get(task_id, ())) if record.is_to_be_told else None,
    )
