"""`python -m worker` with a model that cannot be served: one line with the reason, exit status 78."""

import ctypes
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint.broken_checkpoints import (
    LFS_POINTER,
    Fault,
    config,
    cut,
    removed,
    tensors,
    text,
)
from tests.tiny_models import save_model
from tests.tokenmill.serve.served import REAL, Served

ROOT = Path(__file__).parents[2]
EXIT_UNUSABLE = 78
TIMEOUT_SECONDS = 300
_DROP_CAPABILITY = 24
_OVERRIDE_MODES = (1, 2)
"""prctl(PR_CAPBSET_DROP) of CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
ANOTHER_UID = 54321


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "sound")


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "model")


def obey_modes() -> None:
    """Make file modes apply to this process even if it is root's."""
    library = ctypes.CDLL(None)
    for capability in _OVERRIDE_MODES:
        library.prctl(_DROP_CAPABILITY, capability, 0, 0, 0)


def refused(
    environment: dict[str, str], *, cwd: Path = ROOT, before: Callable[[], None] | None = None
) -> tuple[str, list[str]]:
    """Run a worker that must be refused. Returns its last message and all lines on stderr."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "worker"],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENMILL_METRICS_PORT": "0"}
        | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        preexec_fn=before,
        check=False,
    )
    lines = done.stderr.splitlines()
    messages = [line for line in lines if "[info " not in line]
    assert done.returncode == EXIT_UNUSABLE, done.stderr
    assert len(messages) == 1, done.stderr
    reported = re.fullmatch(r"\S+ \[critical \] (.*) \[worker\].*", messages[0])
    assert reported, messages
    assert done.stdout == ""
    return reported[1], lines


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (cut("model.safetensors", 1000), "model.safetensors: is truncated: its header describes"),
        (text("model.safetensors", LFS_POINTER), "is a Git LFS pointer, not the file of 269060552 bytes"),
        (text("config.json", ""), "config.json: is empty (0 bytes)"),
        (text("tokenizer.json", "{"), "tokenizer.json: is not JSON"),
        (removed("tokenizer*"), "no tokenizer files in"),
        (config(quantization_config={"quant_method": "awq"}), "are quantized (awq), which is not supported"),
    ],
)
def test_faults_in_files_are_reported_before_anything_starts(model: Path, fault: Fault, message: str) -> None:
    """vmlx-swift#217, ComfyUI#13669, vllm#31444. No Redis is needed, and no port is taken."""
    fault(model)
    line, lines = refused({"TOKENMILL_MODEL": str(model), "REDIS_URL": "redis://127.0.0.1:1/0"})
    assert message in line
    assert str(model) in line
    assert len(lines) == 1


@pytest.mark.parametrize("source", ["./no/such/dir", "/x/y", "~/m", ".no-such-dir"])
def test_a_wrong_path_is_reported_before_anything_starts(source: str) -> None:
    line, lines = refused({"TOKENMILL_MODEL": source, "REDIS_URL": "redis://127.0.0.1:1/0"})
    assert line.startswith(f"TOKENMILL_MODEL: '{source}' is neither an existing directory")
    assert len(lines) == 1


def as_int4(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As written by a quantization tool that does not mention it in config.json."""
    return {name.replace(".weight", ".qweight"): one for name, one in found.items()}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            tensors(lambda found: {f"base_model.{name}": one for name, one in found.items()}),
            "21 tensors are missing: lm_head.weight, ",
        ),
        (tensors(as_int4), "tensors are missing: lm_head.weight, "),
        (config(vocab_size=100), "2 tensors have another shape: lm_head.weight"),
        (config(model_type="no_such_model"), "model type 'no_such_model' of"),
        (text("tokenizer.json", '{"model": {}}'), "has no usable tokenizer: "),
    ],
)
def test_faults_that_only_loading_finds(redis_url: str, model: Path, fault: Fault, message: str) -> None:
    """vllm#15536, vllm#11802, colibri#1476: such a checkpoint was served with random weights."""
    fault(model)
    line, _ = refused({"TOKENMILL_MODEL": str(model), "REDIS_URL": redis_url})
    assert message in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"TOKENMILL_NUM_KV_BLOCKS": "10", "TOKENMILL_MAX_MODEL_LEN": "161"},
            "TOKENMILL_MAX_MODEL_LEN: is 161, but 10 KV blocks of 16 tokens hold 160; set it to at most 160,"
            " or num_kv_blocks to at least 11",
        ),
        ({"TOKENMILL_NUM_KV_BLOCKS": "2000000000"}, "TOKENMILL_NUM_KV_BLOCKS: 2000000000 KV blocks need "),
        ({"TOKENMILL_MODEL": "SmolLM2-135M-Instruct"}, "TOKENMILL_CACHE_DIR: the cache directory "),
    ],
)
def test_impossible_limits_and_directories(
    redis_url: str, model: Path, settings: dict[str, str], message: str
) -> None:
    """openobserve-helm#54: a cache that cannot be written. It is a file here, which stops root too."""
    cache = str(model / "config.json") if "TOKENMILL_MODEL" in settings else str(ROOT / ".tokenmill")
    environment = {"TOKENMILL_MODEL": str(model), "TOKENMILL_CACHE_DIR": cache, "REDIS_URL": redis_url}
    line, _ = refused(environment | settings)
    assert line.startswith(message)


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities and limits of Linux")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_files_of_another_user(model: Path, name: str) -> None:
    """ado#1261: unreadable weights were reported as "No such file"."""
    path = model / name
    path.chmod(0o600 if os.geteuid() == 0 else 0)
    if os.geteuid() == 0:
        os.chown(path, ANOTHER_UID, ANOTHER_UID)
    line, lines = refused({"TOKENMILL_MODEL": str(model)}, before=obey_modes)
    assert f"{path}: cannot be read: Permission denied (mode 0{path.stat().st_mode & 0o777:03o}, " in line
    assert len(lines) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities and limits of Linux")
def test_too_little_memory(redis_url: str, model: Path) -> None:
    """Where memory runs out depends on the libraries. It is always reported in one line."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1_000_000_000, 1_000_000_000))

    line, _ = refused({"TOKENMILL_MODEL": str(model), "REDIS_URL": redis_url}, before=limit)
    assert "this process may map 1000000000 bytes (ulimit -v)" in line or "are available" in line


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (text("model.safetensors", LFS_POINTER), "is a Git LFS pointer"),
        (tensors(lambda found: {f"x.{name}": one for name, one in found.items()}), "tensors are missing"),
    ],
)
def test_serve_starts_this_worker_once(model: Path, tmp_path: Path, fault: Fault, message: str) -> None:
    fault(model)
    (tmp_path / "service").mkdir()
    served = Served(tmp_path / "service", REAL, {"TOKENMILL_MODEL": str(model)})
    assert served.wait() == 2
    lines = served.text()
    assert message in lines[-1]
    assert lines[-1].startswith("Error: the worker ended with exit code 78; its last line: ")
    assert sum("[critical ]" in line for line in lines[:-1]) == 1
    assert not any("starting it again" in line or "Traceback" in line for line in lines)
