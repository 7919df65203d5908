"""How many workers `tokenmill serve` runs, and what each has of the machine. Starts nothing.

One per CUDA device, as a worker computes on one; on a CPU one, as it uses all cores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenmill.serve.devices import VISIBLE
from tokenmill.settings.errors import SettingError

AUTO = "auto"
NAME = "worker"
_LAST_PORT = 65535
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class PlannedWorker:
    """`device`: a word for CUDA_VISIBLE_DEVICES; "" leaves the choice to the worker.

    `environment`: what it has of its own.
    """

    name: str
    metrics_port: int
    device: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def plan_workers(
    wanted: str, metrics_port: int, devices: Sequence[str], num_cores: int, environ: Mapping[str, str]
) -> list[PlannedWorker]:
    """`wanted`: "auto" or a number. `metrics_port`: of the first worker, others follow; 0: any free one.

    Raises `SettingError` if there are not as many ports.
    """
    count = max(1, len(devices)) if wanted == AUTO else int(wanted)
    if count == 1:
        return [PlannedWorker(NAME, metrics_port)]
    if metrics_port and metrics_port + count - 1 > _LAST_PORT:
        raise SettingError(
            f"TOKENMILL_METRICS_PORT: {count} workers need as many ports from {metrics_port} on"
        )
    threads = {} if environ.get(_THREADS) else {_THREADS: str(max(1, num_cores // count))}
    workers = []
    for number in range(count):
        device = devices[number % len(devices)] if devices else ""
        port = metrics_port + number if metrics_port else 0
        own = {**threads, "TOKENMILL_METRICS_PORT": str(port), **({VISIBLE: device} if device else {})}
        workers.append(PlannedWorker(f"{NAME}-{number}", port, device, own))
    return workers


def description(worker: PlannedWorker, host: str) -> str:
    """For people: where it computes, and where its metrics are. `host`: as it is reached from here."""
    where = f" on {worker.device}" if worker.device else ""
    metrics = f"http://{host}:{worker.metrics_port}/metrics" if worker.metrics_port else "a free port"
    return f"{worker.name}{where}: metrics at {metrics}"
