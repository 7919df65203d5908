"""`python -m tests.chaos`: the long run, set by the environment.

`SEED` (by chance), `DURATION`: seconds of storm (300), `LEASE`: seconds of a worker's lease, `FAULTS`: names
from `tests.chaos.faults` with commas between (all), `CLIENTS`: how many at once.

The last line on stdout is the verdict; the exit status is 0 only if nothing is lost, doubled or stuck. What
went wrong is told above it, and the directory with all logs is kept then.
"""

import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

# Before torch is imported: OpenMP threads fight badly on a loaded machine.
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
    """An empty variable is as good as none."""
    chosen = set(filter(None, env.get("FAULTS", "").split(","))) or {*TO_PROCESSES, *TO_REDIS}
    if unknown := chosen - {*TO_PROCESSES, *TO_REDIS}:
        raise SystemExit(f"FAULTS: no such fault: {', '.join(sorted(unknown))}")
    return Plan(
        seed=int(env.get("SEED") or secrets.randbelow(10**6)),
        seconds=float(env.get("DURATION") or 300),
        num_clients=int(env.get("CLIENTS") or NUM_CLIENTS),
        lease_seconds=float(env.get("LEASE") or LEASE_SECONDS),
        to_processes={name: fault for name, fault in TO_PROCESSES.items() if name in chosen},
        to_redis={name: fault for name, fault in TO_REDIS.items() if name in chosen},
    )


def main() -> int:
    # As Ctrl-C: the processes of the service end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    plan = read_plan(os.environ)
    directory = Path(tempfile.mkdtemp(prefix="tokenmill-chaos-"))
    say(f"seed {plan.seed}, {plan.seconds:g} s of storm, logs in {directory}")
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
