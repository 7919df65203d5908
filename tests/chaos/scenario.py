"""A whole run: start the service, send traffic, inject faults, wait for all requests to end, check them.

The verdict is based on what was stored and read, after everything has ended or timed out.
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
from tests.chaos.faults import TO_PROCESSES, TO_REDIS, Fault, kill_all_workers
from tests.chaos.injector import FaultInjector
from tests.chaos.ledger import Account, Kind, Problem, audit
from tests.chaos.outputs import OutputChecker, answers_of, few_enough
from tests.chaos.takeovers import Takeovers
from tests.chaos.traffic import Traffic
from tests.chaos.webhook_receiver import make_webhooks_due
from tests.chaos.workload import requests
from tokenmill.protocol import naming, rq_keys
from tokenmill.protocol.messages import FinishedEvent
from tokenmill.protocol.store.task_store import TaskStore

START_SECONDS = 180.0
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parameters of a run.

    `seconds`: duration of fault injection; None: each fault once. At least `min_requests` are sent.
    `settle_seconds`: time limit for everything to end after that.
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
    """The result of a run."""

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
    """`directory`: for logs and Redis's files. `say` receives a line for each event."""
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
    """A run on a started cluster."""

    def __init__(self, plan: Plan, cluster: Cluster, model_dir: Path, say: Say) -> None:
        self._plan = plan
        self._cluster = cluster
        self._say = say
        self._slug = naming.model_slug(naming.served_model_name(str(model_dir)))
        self._takeovers = Takeovers(cluster.redis_url)
        self._traffic = Traffic(
            requests(plan.seed),
            plan.num_clients,
            api_port=cluster.api.port,
            redis_url=cluster.redis_url,
            webhook_url=cluster.receiver.url,
            on_accepted=self._takeovers.follow,
        )
        self._injectors = (
            FaultInjector(
                cluster, plan.to_processes, Random(f"{plan.seed}:processes"),
                pauses=(0.5, 2.0), is_healthy=cluster.are_workers_healthy, say=say,
            ),
            FaultInjector(cluster, plan.to_redis, Random(f"{plan.seed}:redis"), pauses=(1.0, 3.0), say=say),
        )  # fmt: skip
        # Loads the model while the processes start, which takes longer.
        self._checker = OutputChecker(model_dir)

    def finish(self) -> Verdict:
        assert self._cluster.wait_until_healthy(START_SECONDS), "\n".join(
            program.tail() for program in self._cluster.programs
        )
        self._inject_faults()
        problems = self._settle()
        records = [record for record in self._traffic.records if record.task_ids]
        accounts = self._accounts(records)
        problems += audit(accounts)
        # Each text once, since clients retry.
        complaints = [f"{one.request}: {text}" for one in records for text in dict.fromkeys(one.complaints)]
        problems += [Problem("lost", text) for text in complaints]
        problems += self._check_outputs(records, accounts)
        with self._cluster.admin() as client:
            problems += leftovers.look(client, self._slug)
        self._cluster.stop()
        problems += [Problem("stuck", text) for text in self._cluster.complaints]
        return Verdict(
            seed=self._plan.seed,
            num_requests=len(records),
            num_faults=sum(injector.num_injected for injector in self._injectors),
            num_resumed_tokens=self._takeovers.num_tokens,
            problems=problems,
            records=records,
        )

    def _inject_faults(self) -> None:
        self._say("all programs are healthy")
        self._takeovers.start()
        self._traffic.start()
        for injector in self._injectors:
            injector.start(self._plan.seconds)
        for injector in self._injectors:
            injector.wait()
        self._resume_at_least_once()
        self._say("no more faults")
        until(lambda: len(self._traffic.records) >= self._plan.min_requests, self._plan.settle_seconds)
        self._traffic.enough()

    def _resume_at_least_once(self) -> None:
        """Kill all workers while a request has published tokens, if no fault met one that had."""
        end = time.monotonic() + self._plan.settle_seconds
        while not self._takeovers.num_tokens and time.monotonic() < end:
            until(self._takeovers.is_token_at_risk, end - time.monotonic(), pause=0.02)
            kill_all_workers(self._cluster, Random(self._plan.seed))
            self._cluster.wait_until_healthy(self._plan.settle_seconds)
            # A request that was met is taken over once its lease has lapsed.
            until(lambda: self._takeovers.num_tokens > 0, 3 * self._plan.lease_seconds)

    def _settle(self) -> list[Problem]:
        """Wait for all requests and webhooks. Returns what did not end."""
        is_healthy = self._cluster.wait_until_healthy(self._plan.settle_seconds)
        self._traffic.stop(self._plan.settle_seconds)
        with self._cluster.admin() as client:
            # Tasks whose reply was lost, and leases of a dead worker.
            until(lambda: leftovers.is_quiet(client, self._slug), self._plan.settle_seconds)
            until(lambda: self._have_all_webhooks_arrived(client), self._plan.settle_seconds, pause=0.5)
        self._takeovers.stop()
        self._say("everything has ended")
        refused = [record for record in self._traffic.records if not record.task_ids]
        problems = [Problem("stuck", f"{record.request}: never accepted") for record in refused]
        return problems if is_healthy else [*problems, Problem("stuck", "the service has not recovered")]

    def _have_all_webhooks_arrived(self, client: Any) -> bool:
        """Does not wait for the delays between attempts of a webhook."""
        make_webhooks_due(client)
        received = self._cluster.receiver.received
        records = self._traffic.records
        return all(record.task_ids[0] in received for record in records if record.expects_webhook)

    def _accounts(self, records: Sequence[Record]) -> list[Account]:
        with self._cluster.admin() as client:
            store = TaskStore(client)
            received = self._cluster.receiver.received
            return [_account(client, store, record, received) for record in records]

    def _check_outputs(self, records: Sequence[Record], accounts: Sequence[Account]) -> list[Problem]:
        ended = [
            (record.request, answers_of(account.events))
            for record, account in zip(records, accounts, strict=True)
            if account.events and isinstance(account.events[-1], FinishedEvent)
        ]
        problems = self._checker.check((request, answer) for request, answers in ended for answer in answers)
        if not few_enough(len(self._checker.near_ties), len(ended)):
            problems += [Problem("lost", f"near tie: {text}") for text in self._checker.near_ties]
        return problems


def _account(client: Any, store: TaskStore, record: Record, received: Mapping[str, list[str]]) -> Account:
    task_id = record.task_ids[0]
    snapshot = store.inspect(task_id)
    return Account(
        name=str(record.request),
        task_ids=tuple(record.task_ids),
        status=snapshot.status if snapshot else None,
        may_be=record.request.may_end_as,
        events=tuple(store.read_log(task_id)),
        num_results=client.xlen(rq_keys.results(task_id)),
        reading=record.reading,
        timed_out=record.timed_out,
        webhooks=tuple(received.get(task_id, ())) if record.expects_webhook else None,
    )
