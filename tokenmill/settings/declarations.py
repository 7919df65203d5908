"""The declarations of all settings, in classes by the process that reads them.

A default of None leaves the choice to the engine, which knows the device and the model.
"""

import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from tokenmill.protocol import naming, redis_url
from tokenmill.settings.credentials import NO_KEYS, Keyring, parse_keys, parse_secrets
from tokenmill.settings.errors import SettingError
from tokenmill.settings.setting import Purpose, setting, settings_of
from tokenmill.settings.sources import Settings

MAX_SECONDS = 10**9
"""Thirty years; Redis and timers cannot count much longer."""
MAX_PATIENCE_SECONDS = 366 * 86400.0
"""Longest duration that the engine accepts; longer settings are reduced to it."""
_MAX_COUNT = 2**31 - 1
DEFAULT_FILES = ".tokenmill/files"


def _redis_url(url: str) -> str:
    redis_url.parse(url)
    return url


def _api_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ValueError(
            "an address that starts with http:// or https://, such as http://127.0.0.1:8000"
        ) from None
    return url


def _num_workers(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and 1 <= int(text) <= 256):
        raise ValueError("auto or a whole number from 1 to 256")
    return text


def _api_keys(text: str) -> str:
    parse_keys(text)
    return text


def _webhook_secret(text: str) -> str:
    parse_secrets(text)
    return text


def _split_origins(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _origins(text: str) -> str:
    for origin in _split_origins(text):
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            raise ValueError("origins without a path, such as https://chat.example.com, or *")
    return text


Text = Annotated[str, Field(min_length=1)]
OptionalText = Annotated[str | None, Field(min_length=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int | None, Field(ge=1, le=_MAX_COUNT)]
Seconds = Annotated[float, Field(ge=1, le=MAX_SECONDS)]


class TaskTimes(Settings):
    """How long tasks wait and stay."""

    max_task_seconds: Seconds = setting(
        86400.0, "A task that has waited this long ends with the reason `timeout`.", Purpose.TASKS
    )
    retention_seconds: Seconds = setting(3600.0, "How long a finished task can be read.", Purpose.TASKS)


class SharedSettings(TaskTimes):
    """What the API and the workers must agree on."""

    model: Text = setting(
        naming.DEFAULT_MODEL, "Model to serve: a local directory or a Hugging Face Hub id.", Purpose.MODEL
    )
    served_model_name: OptionalText = setting(
        None, "Public name of the model.", Purpose.MODEL, shown="the Hub id or the directory's name"
    )
    redis_url: Annotated[str, AfterValidator(_redis_url)] = setting(
        "redis://127.0.0.1:6379/0",
        "Redis server. `tokenmill serve` starts one of its own if this is not set.",
        Purpose.SERVICE,
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "The lowest level that is logged. Health probes are logged at `debug`.", Purpose.SERVICE
    )
    log_format: Literal["console", "json"] = setting(
        "console", "`json`: one JSON object a line. `console`: text for people.", Purpose.SERVICE
    )
    hold_unusable: bool = setting(
        False,
        "If a setting or the model cannot be used, stay alive and not ready instead of ending with exit code"
        " 78. For supervisors that restart every process that ends.",
        Purpose.SERVICE,
    )

    @property
    def public_model(self) -> str:
        """The name of the model in requests and responses."""
        return naming.served_model_name(self.model, self.served_model_name or "")

    @property
    def slug(self) -> str:
        """The name of the model in Redis keys."""
        return naming.model_slug(self.public_model)


class Listening(Settings):
    """Where the API listens."""

    host: Text = setting("127.0.0.1", "Address on which the API listens.", Purpose.HTTP)
    port: Port = setting(8000, "Port of the API. 0 chooses a free port.", Purpose.HTTP)


class ApiSettings(Listening, SharedSettings):
    """Settings of the API process."""

    max_waiting_tasks: Annotated[int, Field(ge=0)] = setting(
        10_000, "New tasks are refused with status 429 while this many wait. 0 means no limit.", Purpose.TASKS
    )
    max_waiting_tokens: Annotated[int, Field(ge=0)] = setting(
        10_000_000,
        "New tasks are refused with status 429 while the waiting ones need an estimated number of tokens"
        " above this. 0 means no limit.",
        Purpose.TASKS,
    )
    max_body_bytes: Annotated[int, Field(ge=1024)] = setting(
        2 * 1024 * 1024, "A larger request body is refused with status 413.", Purpose.HTTP
    )
    http_threads: Annotated[int, Field(ge=2)] = setting(
        256, "Requests that the API answers at the same time.", Purpose.HTTP
    )
    max_streams: Annotated[int, Field(ge=1)] = setting(
        224,
        "How many of these requests may be event streams or waiting polls. Must be below `http_threads`, so"
        " that short requests always find a thread.",
        Purpose.HTTP,
    )
    heartbeat_seconds: Seconds = setting(
        10.0, "Interval of comments on an event stream without events.", Purpose.HTTP
    )
    http_grace_seconds: Seconds = setting(
        10.0, "How long a stopping API waits for open requests.", Purpose.HTTP
    )
    http_read_seconds: Seconds = setting(
        10.0,
        "A request that has not arrived completely after this time is answered with status 408.",
        Purpose.HTTP,
    )
    http_write_seconds: Seconds = setting(
        30.0, "The connection of a client that has read nothing for this long is closed.", Purpose.HTTP
    )
    max_connections_per_address: Annotated[int, Field(ge=0)] = setting(
        512, "HTTP connections from one client address. 0 means no limit.", Purpose.HTTP
    )
    api_keys: Annotated[str | None, AfterValidator(_api_keys)] = setting(
        None,
        "Entries `tenant:key`, separated by commas, spaces or lines. Every request needs a key once there is"
        " one.",
        Purpose.ACCESS,
        shown="none: open to all",
        secret=True,
    )
    api_keys_file: OptionalText = setting(
        None, "File with further such entries.", Purpose.ACCESS, shown="none"
    )
    webhook_secret: Annotated[str | None, AfterValidator(_webhook_secret)] = setting(
        None,
        "Secret `whsec_...` that signs webhooks; several, separated by spaces, while it is changed.",
        Purpose.ACCESS,
        shown="none: webhooks are refused",
        secret=True,
    )
    webhook_allow_private: bool = setting(
        False, "Allow webhooks to addresses of this machine and of private networks.", Purpose.ACCESS
    )

    cors_origins: Annotated[str | None, AfterValidator(_origins)] = setting(
        None,
        "Origins, such as https://chat.example.com, whose pages may call the API from a browser, separated"
        " by commas or spaces. * means all.",
        Purpose.ACCESS,
        shown="none",
    )

    files_url: OptionalText = setting(
        None,
        "Where uploaded files and the results of batches are stored: a directory, or a URL of fsspec such as"
        " s3://bucket/prefix. One service alone uses it.",
        Purpose.FILES,
        shown="`files` in the state directory",
    )
    max_file_bytes: Annotated[int, Field(ge=1024)] = setting(
        200 * 1024 * 1024, "A larger file is refused with status 413.", Purpose.FILES
    )
    files_retention_seconds: Seconds = setting(
        30 * 86400.0,
        "How long a file is kept that has no expiry of its own, and an ended batch.",
        Purpose.FILES,
    )
    batch_window: Annotated[int, Field(ge=0)] = setting(
        0,
        "Tasks of one batch that are queued or running. 0: twice the sequences that the workers run at the"
        " same time.",
        Purpose.FILES,
    )

    @property
    def files_place(self) -> str:
        """`files_url`, or the directory of a service that was started in the current one."""
        return self.files_url or DEFAULT_FILES

    @property
    def allowed_origins(self) -> frozenset[str]:
        return frozenset(_split_origins(self.cors_origins or ""))

    @property
    def waiting_limit(self) -> int | None:
        return self.max_waiting_tasks or None

    @property
    def waiting_token_limit(self) -> int | None:
        return self.max_waiting_tokens or None

    @cached_property
    def webhook_keys(self) -> tuple[bytes, ...]:
        """Keys that sign webhooks, the newest first; without any, no task may have a webhook."""
        return parse_secrets(self.webhook_secret or "")

    @cached_property
    def keyring(self) -> Keyring:
        """The keys of `api_keys` and of `api_keys_file`. Raises `SettingError` if the file cannot be used."""
        keyring = parse_keys(self.api_keys) if self.api_keys else NO_KEYS
        return _with_file(keyring, self.api_keys_file) if self.api_keys_file else keyring

    def check_files(self) -> None:
        """Raises `SettingError` if a file that a setting names cannot be used."""
        _ = self.keyring

    @model_validator(mode="after")
    def _leave_threads_for_short_requests(self) -> Self:
        if self.max_streams >= self.http_threads:
            raise ValueError(
                f"TOKENMILL_MAX_STREAMS must be below TOKENMILL_HTTP_THREADS ({self.http_threads}), which"
                f" also answer short requests, not {self.max_streams}"
            )
        return self


class Timing(TaskTimes):
    """How long a worker waits for things."""

    lease_seconds: Annotated[float, Field(ge=0.5, le=MAX_SECONDS)] = setting(
        # Renewed three times in its duration: below half a second a busy machine would lose its own tasks.
        10.0,
        "Duration of a worker's lease. Tasks of a worker that does not renew it are reassigned.",
        Purpose.WORKER,
    )
    grace_seconds: Annotated[float, Field(ge=0, le=MAX_SECONDS)] = setting(
        30.0, "How long a stopping worker continues its tasks before it returns the rest.", Purpose.WORKER
    )
    stall_seconds: Seconds = setting(
        60.0,
        "A worker whose engine loop makes no progress for this long ends itself. Time in which the process"
        " did not run does not count.",
        Purpose.WORKER,
    )


class EngineSettings(Settings):
    """Limits of the engine: the fields of `engine.config.EngineConfig`."""

    max_model_len: Count = setting(
        None,
        "Longest sequence, prompt and output together, in tokens.",
        Purpose.SCHEDULING,
        shown="the model's, or what the KV cache holds",
    )
    num_kv_blocks: Count = setting(
        None, "Blocks in the KV cache.", Purpose.SCHEDULING, shown="from free memory"
    )
    block_size: Count = setting(None, "Tokens in one block of the KV cache.", Purpose.SCHEDULING, shown="16")
    max_num_batched_tokens: Count = setting(
        None, "Tokens computed in one step.", Purpose.SCHEDULING, shown="512; 2048 on CUDA"
    )
    max_num_seqs: Count = setting(
        None, "Sequences that run at the same time.", Purpose.SCHEDULING, shown="64; 256 on CUDA"
    )
    max_num_prefill_seqs: Count = setting(
        None,
        "Sequences in one step that are not decoding.",
        Purpose.SCHEDULING,
        shown="16; 1 without chunked prefill",
    )
    chunked_prefill: bool | None = setting(
        None, "Compute a long prompt in several steps.", Purpose.SCHEDULING, shown="true"
    )
    max_chunk_tokens: Count = setting(
        None,
        "Tokens of one prompt in one step, while other prompts can use the rest.",
        Purpose.SCHEDULING,
        shown="half of a step",
    )
    prefix_caching: bool | None = setting(
        None, "Reuse the KV cache of prompts with a common prefix.", Purpose.SCHEDULING, shown="true"
    )
    policy: Literal["fifo", "skip_ahead"] | None = setting(
        None,
        "What happens when the first waiting sequence does not fit: `fifo` waits for it, `skip_ahead` tries"
        " the next ones.",
        Purpose.SCHEDULING,
        shown="fifo",
    )
    max_skip_ahead: Count = setting(
        None,
        "With `skip_ahead`: how many further sequences are tried in one step.",
        Purpose.SCHEDULING,
        shown="16",
    )
    ageing_seconds: Annotated[float | None, Field(ge=1, le=MAX_SECONDS)] = setting(
        None,
        "A waiting task rises by one priority class each time this has passed.",
        Purpose.SCHEDULING,
        shown="30",
    )
    max_waiting_seconds: Annotated[float | None, Field(ge=1, le=MAX_SECONDS)] = setting(
        None,
        "A task that has waited this long is scheduled first.",
        Purpose.SCHEDULING,
        shown="120",
    )
    max_preemptions: Annotated[int | None, Field(ge=0, le=_MAX_COUNT)] = setting(
        None,
        "A sequence that was preempted this often is not preempted again.",
        Purpose.SCHEDULING,
        shown="3",
    )
    num_speculative_tokens: Annotated[int | None, Field(ge=0, le=_MAX_COUNT)] = setting(
        None,
        "Most tokens that are drafted for a sequence in one step, by prompt lookup. The outputs stay the"
        " same. 0 turns it off; otherwise asynchronous scheduling is off.",
        Purpose.SCHEDULING,
        shown="0",
    )
    prefill_reserve: Annotated[float | None, Field(ge=0, le=0.9)] = setting(
        None,
        "Share of the tokens of a step that decodes leave to prompts.",
        Purpose.SCHEDULING,
        shown="0",
    )

    def engine_limits(self) -> dict[str, Any]:
        """Arguments of `EngineConfig`; what is not set is left out."""
        limits = self.model_dump(include=set(EngineSettings.model_fields), exclude_none=True)
        for name in ("ageing_seconds", "max_waiting_seconds"):
            if name in limits:
                limits[name] = min(limits[name], MAX_PATIENCE_SECONDS)
        return limits


class WorkerSettings(EngineSettings, Timing, SharedSettings):
    """Settings of a worker process."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Type of the weights and activations.",
        Purpose.MODEL,
        shown="auto: float32; on CUDA the model's, bfloat16 for float32",
    )
    quantization: Literal["none", "int8", "int4"] = setting(
        "none", "Quantization of the weights, on a CPU.", Purpose.MODEL
    )
    generation_config: Literal["auto", "none"] = setting(
        "auto",
        "Sampling defaults: `auto` takes those of the model's `generation_config.json`, `none` Tokenmill's.",
        Purpose.MODEL,
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Device that computes.", Purpose.EXECUTION, shown="auto: CUDA if there is a device"
    )
    attention: Literal["auto", "torch", "native", "triton"] = setting(
        "auto",
        "Attention backend: `torch`, `native` on a CPU, or `triton` on CUDA.",
        Purpose.EXECUTION,
        shown="auto: the fastest that passes its self-check",
    )
    fair_sharing: bool = setting(
        True, "Give the tenants of one priority equal shares of tokens.", Purpose.SCHEDULING
    )
    decode_graphs: bool = setting(True, "Capture decode steps while the model loads.", Purpose.EXECUTION)
    async_scheduling: bool | None = setting(
        None,
        "Schedule a step before the tokens of the previous one are known.",
        Purpose.EXECUTION,
        shown="true on CUDA",
    )
    deterministic: bool = setting(
        False,
        "Make the results of a request independent of all others, bit for bit. Slower.",
        Purpose.EXECUTION,
    )
    cache_dir: Text = setting(
        ".tokenmill", "Directory of the converted default model and of compiled operators.", Purpose.EXECUTION
    )
    load_seconds: Seconds = setting(
        900.0, "A worker that has not loaded its model after this time ends itself.", Purpose.WORKER
    )
    metrics_host: Text = setting(
        "127.0.0.1", "Address on which the worker serves `/metrics`.", Purpose.WORKER
    )
    metrics_port: Port = setting(
        9400,
        "Port on which the worker serves `/metrics`; further workers of `tokenmill serve` take the following"
        " ports. 0 chooses a free port.",
        Purpose.WORKER,
    )


class StateSettings(Settings):
    """Where `tokenmill serve` is found by the other commands."""

    state_dir: Text = setting(
        ".tokenmill", "Directory in which `tokenmill serve` keeps its data.", Purpose.SERVICE
    )


class ServeSettings(WorkerSettings, ApiSettings, StateSettings):
    """Settings of `tokenmill serve`, which hands them to the API and the workers."""

    workers: Annotated[str, AfterValidator(_num_workers)] = setting(
        "auto",
        "Worker processes of `tokenmill serve`.",
        Purpose.SERVICE,
        shown="auto: one for each CUDA device, else one",
    )


class WorkerCommandSettings(WorkerSettings, StateSettings):
    """Settings of `tokenmill worker`."""


class ApiCommandSettings(ApiSettings, StateSettings):
    """Settings of `tokenmill api`."""


class ClientSettings(Settings):
    """Settings of the commands that call a running service, such as `tokenmill submit`."""

    url: Annotated[str | None, AfterValidator(_api_url)] = setting(
        None,
        "Address of the API, for the commands that call it and for the Python client.",
        Purpose.SERVICE,
        shown="the service that runs in this directory",
    )
    api_key: OptionalText = setting(
        None,
        "API key for the commands that call the API and for the Python client.",
        Purpose.SERVICE,
        shown="none",
        secret=True,
    )


class ClientCommandSettings(ClientSettings, Listening, StateSettings):
    """`ClientSettings`, and what finds the service of this directory where no address is set."""


def _with_file(keyring: Keyring, file: str) -> Keyring:
    try:
        text = Path(file).read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise SettingError(
            f"TOKENMILL_API_KEYS_FILE must be a file that can be read ({reason}), not {file!r}"
        ) from error
    try:
        return parse_keys(text, keyring)
    except ValueError as error:
        raise SettingError(f"TOKENMILL_API_KEYS_FILE must be a file of {error}") from None


ALL = settings_of(ServeSettings, ClientSettings)
"""Every setting by name."""
VARIABLES = frozenset(one.variable for one in ALL.values())
