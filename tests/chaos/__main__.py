"""`python -m tests.chaos`: a long run, configured by the environment.

`SEED` (default: random), `DURATION`: seconds of fault injection (300), `LEASE`: lease in seconds, `FAULTS`:
names from `tests.chaos.faults`, separated by commas (all), `CLIENTS`: number of concurrent clients.

The last line on stdout is the verdict. The exit status is 0 only if nothing is lost, doubled or stuck.
Otherwise the problems are listed above it, and the directory with the logs is kept.
"""

import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

# Before torch is imported. OpenMP threads slow each other down on a loaded machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from engine.execution.machine.library_messages import quiet_transformers
from tests.chaos.cluster import LEASE_SECONDS
from tests.chaos.faults import TO_PROCESSES, TO_REDIS
from tests.chaos.scenario import Plan, run
from tests.tiny_models import save_model

NUM_CLIENTS = 12


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def read_plan(env: Mapping[str, str]) -> Plan:
    """An empty variable counts as unset."""
    chosen = set(filter(None, env.get("FAULTS", "").split(","))) or {*TO_PROCESSES, *TO_REDIS}
    if unknown := chosen - {*TO_PROCESSES, *TO_REDIS}:
        raise SystemExit(f"FAULTS: unknown fault: {', '.join(sorted(unknown))}")
    return Plan(
        seed=int(env.get("SEED") or secrets.randbelow(10**6)),
        seconds=float(env.get("DURATION") or 300),
        num_clients=int(env.get("CLIENTS") or NUM_CLIENTS),
        lease_seconds=float(env.get("LEASE") or LEASE_SECONDS),
        to_processes={name: fault for name, fault in TO_PROCESSES.items() if name in chosen},
        to_redis={name: fault for name, fault in TO_REDIS.items() if name in chosen},
    )


def main() -> int:
    # As for Ctrl-C: stop the processes of the service.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    plan = read_plan(os.environ)
    directory = Path(tempfile.mkdtemp(prefix="tokenmill-chaos-"))
    say(f"seed {plan.seed}, {plan.seconds:g} s of fault injection, logs in {directory}")
    with quiet_transformers():
        model_dir = save_model(directory / "model")
    verdict = run(plan, model_dir, directory, say)
    for problem in verdict.problems:
        say(f"{problem.kind}: {problem.text}")
    if not verdict.problems:
        shutil.rmtree(directory)
    say(str(verdict))
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    sys.exit(main())
