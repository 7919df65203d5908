"""What the environment says about this worker, read once and checked.

Law: one name a setting, the same word as the field; a bad value is an error that names the variable and says
what is allowed. An empty variable counts as unset. Knows no default of the engine: None leaves it to the
engine's loader.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenmill.protocol import naming, redis_url
from worker.errors import SettingsError

LONGEST_SECONDS = 1e9
"""Thirty years; Redis and timers cannot count much longer."""
LONGEST_PATIENCE_SECONDS = 366 * 86400.0
MAX_PREFILL_RESERVE = 0.9
POLICIES = ("fifo", "skip_ahead")
DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION = ("auto", "torch", "native", "triton")
QUANTIZATION = ("none", "int8", "int4")
GENERATION_CONFIG = ("auto", "none")
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long things may take, in seconds.

    `lease_seconds`: a claimed task without renewal for so long is anybody's. `grace_seconds`: what a worker
    that is told to stop may still finish. `stall_seconds`: a loop without a tick for so long hangs.
    `retention_seconds`: what ended can be read for so long. `max_task_seconds`: what waits longer ends.
    """

    lease_seconds: float = 10.0
    grace_seconds: float = 30.0
    stall_seconds: float = 60.0
    retention_seconds: float = 3600.0
    max_task_seconds: float = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """The engine's limits as far as the environment names them; None is left to the loader."""

    max_model_len: int | None = None
    num_kv_blocks: int | None = None
    block_size: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_prefill_seqs: int | None = None
    chunked_prefill: bool | None = None
    prefix_caching: bool | None = None
    policy: str | None = None
    max_skip_ahead: int | None = None
    fair_sharing: bool | None = None
    ageing_seconds: float | None = None
    max_waiting_seconds: float | None = None
    max_preemptions: int | None = None
    prefill_reserve: float | None = None
    max_chunk_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """All settings of one worker process.

    `model`: a directory, a hub id, or the default model's name, which lies converted under `cache_dir`.
    `served_model_name`: its public name. `attention`: one of `ATTENTION`, `quantization`: one of
    `QUANTIZATION`, as the engine has them.
    `decode_graphs`: see `engine.execution.build.build_execution`.
    `async_scheduling`: a step is launched before the tokens of the one before it are known; None: on CUDA.
    `deterministic`: a request's tokens do not depend on what runs beside it, to the last bit.
    `generation_config`: one of `GENERATION_CONFIG`: whether the model's own sampling defaults are followed.
    `load_seconds`: deadline of loading the model. `metrics_port`: 0 takes any free port and logs it.
    `hold_unusable`: see `tokenmill.process.restart_loop`.
    """

    model: str = naming.DEFAULT_MODEL
    served_model_name: str = naming.DEFAULT_MODEL
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    quantization: str = "none"
    decode_graphs: bool = True
    async_scheduling: bool | None = None
    deterministic: bool = False
    generation_config: str = "auto"
    redis_url: str = "redis://127.0.0.1:6379/0"
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9400
    cache_dir: str = ".tokenmill"
    hold_unusable: bool = False
    load_seconds: float = 900.0
    engine: EngineSettings = EngineSettings()
    timing: Timing = Timing()

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "WorkerSettings":
        """Raises `SettingsError`."""
        read = _Reader(env)
        model = read.text("TOKENMILL_MODEL", naming.DEFAULT_MODEL)
        return cls(
            model=model,
            served_model_name=naming.served_model_name(model, read.text("TOKENMILL_SERVED_MODEL_NAME", "")),
            dtype=read.word("TOKENMILL_DTYPE", DTYPES) or "auto",
            device=read.text("TOKENMILL_DEVICE", "auto"),
            attention=read.word("TOKENMILL_ATTENTION", ATTENTION) or "auto",
            quantization=read.word("TOKENMILL_QUANTIZATION", QUANTIZATION) or "none",
            decode_graphs=read.switch("TOKENMILL_DECODE_GRAPHS") is not False,
            async_scheduling=read.switch("TOKENMILL_ASYNC_SCHEDULING"),
            deterministic=bool(read.switch("TOKENMILL_DETERMINISTIC")),
            generation_config=read.word("TOKENMILL_GENERATION_CONFIG", GENERATION_CONFIG) or "auto",
            redis_url=read.redis_url("REDIS_URL", "redis://127.0.0.1:6379/0"),
            metrics_host=read.text("TOKENMILL_METRICS_HOST", "127.0.0.1"),
            metrics_port=read.whole("TOKENMILL_METRICS_PORT", 9400, least=0, most=65535),
            cache_dir=read.text("TOKENMILL_CACHE_DIR", ".tokenmill"),
            hold_unusable=bool(read.switch("TOKENMILL_HOLD_UNUSABLE")),
            load_seconds=read.seconds("TOKENMILL_LOAD_SECONDS", 900.0),
            engine=_engine_settings(read),
            timing=_timing(read),
        )


def _engine_settings(read: "_Reader") -> EngineSettings:
    return EngineSettings(
        max_model_len=read.limit("TOKENMILL_MAX_MODEL_LEN"),
        num_kv_blocks=read.limit("TOKENMILL_NUM_KV_BLOCKS"),
        block_size=read.limit("TOKENMILL_BLOCK_SIZE"),
        max_num_batched_tokens=read.limit("TOKENMILL_MAX_NUM_BATCHED_TOKENS"),
        max_num_seqs=read.limit("TOKENMILL_MAX_NUM_SEQS"),
        max_num_prefill_seqs=read.limit("TOKENMILL_MAX_NUM_PREFILL_SEQS"),
        chunked_prefill=read.switch("TOKENMILL_CHUNKED_PREFILL"),
        prefix_caching=read.switch("TOKENMILL_PREFIX_CACHING"),
        policy=read.word("TOKENMILL_POLICY", POLICIES),
        max_skip_ahead=read.limit("TOKENMILL_MAX_SKIP_AHEAD"),
        fair_sharing=read.switch("TOKENMILL_FAIR_SHARING"),
        ageing_seconds=read.patience("TOKENMILL_AGEING_SECONDS"),
        max_waiting_seconds=read.patience("TOKENMILL_MAX_WAITING_SECONDS"),
        max_preemptions=read.limit("TOKENMILL_MAX_PREEMPTIONS", least=0),
        prefill_reserve=read.share("TOKENMILL_PREFILL_RESERVE", most=MAX_PREFILL_RESERVE),
        max_chunk_tokens=read.limit("TOKENMILL_MAX_CHUNK_TOKENS"),
    )


def _timing(read: "_Reader") -> Timing:
    default = Timing()
    return Timing(
        # Renewal comes three times a lease; below half a second a busy machine would lose its own tasks.
        lease_seconds=read.seconds("TOKENMILL_LEASE_SECONDS", default.lease_seconds, least=0.5),
        grace_seconds=read.seconds("TOKENMILL_GRACE_SECONDS", default.grace_seconds, least=0.0),
        stall_seconds=read.seconds("TOKENMILL_STALL_SECONDS", default.stall_seconds, least=1.0),
        retention_seconds=read.seconds("TOKENMILL_RETENTION_SECONDS", default.retention_seconds),
        max_task_seconds=read.seconds("TOKENMILL_MAX_TASK_SECONDS", default.max_task_seconds),
    )


def _float(text: str) -> float:
    """NaN for what is no number: it is in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan


class _Reader:
    """The values of an environment; each method raises `SettingsError` for one that does not fit."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def text(self, name: str, default: str) -> str:
        return self._env.get(name, "").strip() or default

    def redis_url(self, name: str, default: str) -> str:
        url = self.text(name, default)
        try:
            redis_url.parse(url)
        except redis_url.BadRedisUrl as error:
            raise SettingsError(f"{name} must be {error}, not {redis_url.hide_password(url)!r}") from None
        return url

    def whole(self, name: str, default: int, *, least: int, most: int) -> int:
        text = self.text(name, str(default))
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise SettingsError(f"{name} must be a whole number from {least} to {most}, not {text!r}")
        return value

    def limit(self, name: str, *, least: int = 1) -> int | None:
        """A number of at least `least`; None where it is not set."""
        if not self.text(name, ""):
            return None
        return self.whole(name, least, least=least, most=2**31 - 1)

    def word(self, name: str, words: Sequence[str]) -> str | None:
        """One of `words`; None where it is not set."""
        text = self.text(name, "")
        if text and text not in words:
            raise SettingsError(f"{name} must be {' or '.join(words)}, not {text!r}")
        return text or None

    def share(self, name: str, *, most: float) -> float | None:
        """From 0 to `most`; None where it is not set."""
        text = self.text(name, "")
        if not text:
            return None
        value = _float(text)
        if not 0.0 <= value <= most:
            raise SettingsError(f"{name} must be a number from 0 to {most:g}, not {text!r}")
        return value

    def patience(self, name: str) -> float | None:
        """Seconds for which the scheduler waits; None where it is not set. More than a year is a year."""
        if not self.text(name, ""):
            return None
        return min(self.seconds(name, 1.0), LONGEST_PATIENCE_SECONDS)

    def seconds(self, name: str, default: float, *, least: float = 1.0) -> float:
        text = self.text(name, str(default))
        value = _float(text)
        # NaN compares false with everything.
        if not least <= value <= LONGEST_SECONDS:
            raise SettingsError(
                f"{name} must be a number of seconds, at least {least:g} and at most 1e9, not {text!r}"
            )
        return value

    def switch(self, name: str) -> bool | None:
        text = self.text(name, "").lower()
        if text and text not in _YES | _NO:
            raise SettingsError(f"{name} must be true or false, not {text!r}")
        return text in _YES if text else None
