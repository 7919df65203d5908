"""How many workers `tokenmill serve` runs, and with which devices, ports and cores.

One per CUDA device, as a worker computes on one device. One on a CPU, as it uses all cores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenmill.serve.cuda_devices import VISIBLE_DEVICES
from tokenmill.settings.errors import SettingError

AUTO = "auto"
NAME = "worker"
_MAX_PORT = 65535
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class PlannedWorker:
    """`device`: value of CUDA_VISIBLE_DEVICES, "" leaves the choice to the worker.

    `environment`: the variables that differ between workers.
    """

    name: str
    metrics_port: int
    device: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def plan_workers(
    setting: str, metrics_port: int, devices: Sequence[str], num_cores: int, environ: Mapping[str, str]
) -> list[PlannedWorker]:
    """`setting`: "auto" or a number. `metrics_port`: of the first worker, others take the following ports; 0
    lets each choose a free port.

    Raises `SettingError` if there are not enough ports.
    """
    count = max(1, len(devices)) if setting == AUTO else int(setting)
    if count == 1:
        return [PlannedWorker(NAME, metrics_port)]
    if metrics_port and metrics_port + count - 1 > _MAX_PORT:
        raise SettingError(
            f"TOKENMILL_METRICS_PORT: {count} workers need {count} ports from {metrics_port} on"
        )
    threads = {} if environ.get(_THREADS) else {_THREADS: str(max(1, num_cores // count))}
    workers = []
    for number in range(count):
        device = devices[number % len(devices)] if devices else ""
        port = metrics_port + number if metrics_port else 0
        own = {
            **threads,
            "TOKENMILL_METRICS_PORT": str(port),
            **({VISIBLE_DEVICES: device} if device else {}),
        }
        workers.append(PlannedWorker(f"{NAME}-{number}", port, device, own))
    return workers


def description(worker: PlannedWorker, host: str) -> str:
    """The device and the address of the metrics, for people. `host`: as it is reached from this machine."""
    where = f" on {worker.device}" if worker.device else ""
    metrics = f"http://{host}:{worker.metrics_port}/metrics" if worker.metrics_port else "a free port"
    return f"{worker.name}{where}: metrics at {metrics}"
