"""One worker per device, each with its own device, port and share of the cores."""

import pytest

from tokenmill.serve.worker_plan import PlannedWorker, description, plan_workers
from tokenmill.settings.errors import SettingError


@pytest.mark.parametrize("devices", [(), ("GPU-a",)])
def test_one_worker_has_the_whole_machine(devices: tuple[str, ...]) -> None:
    assert plan_workers("auto", 9400, devices, 8, {}) == [PlannedWorker("worker", 9400)]


def test_one_worker_can_be_requested() -> None:
    assert plan_workers("1", 9400, ("GPU-a", "GPU-b"), 8, {}) == [PlannedWorker("worker", 9400)]


def test_each_device_has_a_worker() -> None:
    workers = plan_workers("auto", 9400, ("GPU-a", "GPU-b", "GPU-c"), 8, {})

    assert [(worker.name, worker.metrics_port, worker.device) for worker in workers] == [
        ("worker-0", 9400, "GPU-a"),
        ("worker-1", 9401, "GPU-b"),
        ("worker-2", 9402, "GPU-c"),
    ]
    assert workers[1].environment == {
        "CUDA_VISIBLE_DEVICES": "GPU-b",
        "TOKENMILL_METRICS_PORT": "9401",
        "OMP_NUM_THREADS": "2",
    }


def test_workers_of_a_cpu_share_its_cores() -> None:
    workers = plan_workers("3", 9400, (), 2, {})

    assert [worker.environment for worker in workers] == [
        {"TOKENMILL_METRICS_PORT": str(port), "OMP_NUM_THREADS": "1"} for port in (9400, 9401, 9402)
    ]


def test_a_configured_number_of_threads_is_kept() -> None:
    workers = plan_workers("2", 0, (), 8, {"OMP_NUM_THREADS": "3"})

    assert [worker.environment for worker in workers] == [{"TOKENMILL_METRICS_PORT": "0"}] * 2


def test_more_workers_than_devices_share_them() -> None:
    workers = plan_workers("3", 9400, ("GPU-a", "GPU-b"), 8, {})

    assert [worker.device for worker in workers] == ["GPU-a", "GPU-b", "GPU-a"]


def test_too_few_ports_are_refused() -> None:
    assert plan_workers("2", 65534, (), 2, {})[1].metrics_port == 65535
    with pytest.raises(SettingError, match="TOKENMILL_METRICS_PORT: 2 workers need 2 ports from 65535 on"):
        plan_workers("2", 65535, (), 2, {})


def test_a_worker_is_described_with_its_device_and_address() -> None:
    assert description(PlannedWorker("worker", 9400), "h") == "worker: metrics at http://h:9400/metrics"
    assert (
        description(PlannedWorker("worker-1", 0, "GPU-b"), "h") == "worker-1 on GPU-b: metrics at a free port"
    )
