"""`python -m tests.chaos`: the long run. `SEED` (default: by chance) and `DURATION`, seconds of storm (300).

The last line on stdout is the verdict; the exit status is 0 only if nothing is lost, doubled or stuck. What
went wrong is told above it, and the directory with all logs is kept then.
"""

import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

# Before torch is imported: OpenMP threads fight badly on a loaded machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.chaos.scenario import Plan, run
from tests.tiny_models import save_model

NUM_CLIENTS = 12


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    plan = Plan(
        seed=int(os.environ.get("SEED") or secrets.randbelow(10**6)),
        seconds=float(os.environ.get("DURATION") or 300),
        num_clients=NUM_CLIENTS,
    )
    directory = Path(tempfile.mkdtemp(prefix="tokenmill-chaos-"))
    say(f"seed {plan.seed}, {plan.seconds:g} s of storm, logs in {directory}")
    verdict = run(plan, save_model(directory / "model"), directory, say)
    for problem in verdict.problems:
        say(f"{problem.kind}: {problem.text}")
    if not verdict.problems:
        shutil.rmtree(directory)
    say(str(verdict))
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    sys.exit(main())
