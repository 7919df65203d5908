"""The steps of a worker on a fake CUDA device: see `fake_cuda.py`.

They run once, in their own process.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from filelock import FileLock

from tests.engine.execution.pools import ROOT
from tests.tiny_models import ARCHITECTURES

READ = "aten::item on the device"
"""The wait of reading a fake tensor on the host."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = tmp_path_factory.getbasetemp()
    # The tests of this file may run in several processes of pytest-xdist, which share the folder above.
    kept = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cuda_steps.json"
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            kept.write_text(run_steps())
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def run_steps() -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.execution.cuda_steps"],
        cwd=ROOT,
        # A real GPU must not be used, as its device guard is replaced.
        env={**env, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_ledger_sees_what_waits(seen: dict[str, Any]) -> None:
    assert seen["planted"] == {
        "to": ["blocking copy from cpu to cuda"],
        "tensor": ["blocking copy from cpu to cuda"],
        "pageable": ["copy of pageable memory from cpu to cuda"],
        "cpu": ["blocking copy from cuda to cpu"],
        "tolist": [READ],
        "item": [READ],
        "bool": ["aten::is_nonzero on the device"],
        "nonzero": ["aten::nonzero on the device"],
        "repeats": ["aten::repeat_interleave on the device"],
        "mask": ["boolean index"],
        "host index": ["index on the host"],
        "host value": ["values on the host"],
        "fetch": ["copy of pageable memory from cuda to cpu"],
        "right": [],
        "right index": [],
        "right fetch": [],
        "right fill": [],
    }


def test_a_launched_step_does_not_wait_for_the_device(seen: dict[str, Any]) -> None:
    """Prompts, chunks and decodes of every architecture, and asynchronous sampling."""
    launched = seen["launched"]
    assert launched.keys() >= set(ARCHITECTURES)
    assert all(steps for steps in launched.values())
    waits = {
        arch: {step: found for step, found in steps.items() if found} for arch, steps in launched.items()
    }
    assert {arch: found for arch, found in waits.items() if found} == {}


def test_a_captured_step_does_not_wait_for_the_device(seen: dict[str, Any]) -> None:
    """CUDA refuses to capture work that waits."""
    assert seen["captured"] == {arch: [] for arch in ARCHITECTURES}


def test_masks_penalties_and_bias_do_not_wait_for_the_forward(seen: dict[str, Any]) -> None:
    """Grammars fill their masks while the device computes: the first wait is for the tokens."""
    filtered = seen["sampled"]["top_p"]
    for name, waits in seen["sampled"].items():
        if name == "top_p":
            continue
        ((what, where),) = waits
        place = "logprobs.py" if name.startswith("logprobs of") else "sampler.py"
        assert what == READ, name
        assert place in where, name
    # The host checks whether the most likely tokens suffice for a filter.
    ((what, where),) = filtered
    assert what == "boolean index"
    assert "_draw_from_window" in where


def test_no_kernel_is_compiled_once_a_worker_is_ready(seen: dict[str, Any]) -> None:
    for name, found in seen["variants"].items():
        assert found["launches"] > len(found["loading"]) > 2, name
        assert found["serving"] == {}, name


def test_a_kernel_that_is_not_warmed_up_is_seen(seen: dict[str, Any]) -> None:
    """Without the warm-up the first prompt and the first long decode compile kernels."""
    cold = seen["variants without warm-up"]["serving"]
    assert any(one.startswith("attend_kernel") for one in cold["first prompt"])
    assert {one.split()[0] for found in cold.values() for one in found} == {
        "attend_kernel", "split_kernel", "combine_kernel",
    }  # fmt: skip


def test_an_8b_model_is_fused_on_a_gpu_of_22_gib(seen: dict[str, Any]) -> None:
    memory = seen["memory"]
    assert memory["error"] is None
    one_product = 1 << 28
    assert memory["peak"] < memory["weights"] + 2 * one_product
    # The rest of the memory is free for KV blocks.
    assert memory["free"] >= memory["total"] - memory["weights"] - (64 << 20)


def test_the_memory_model_finds_weights_that_are_held_twice(seen: dict[str, Any]) -> None:
    held = seen["memory, originals held"]
    assert "OutOfMemoryError" in held["error"]
    assert held["free"] < held["total"] - held["weights"]
