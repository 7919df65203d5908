"""Every setting of the service by name, and where its value comes from: flag > environment > file.

A setting has one name: the flag `--max-num-seqs`, the variable `TOKENMILL_MAX_NUM_SEQS` and the key
`max_num_seqs` are the same. A value that a room would refuse is refused here, before anything starts. Knows
no room: what it gives is text for their environment.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from tokenmill.process import variables
from tokenmill.protocol import redis_url

DEFAULT_FILE = "tokenmill.toml"


class ConfigError(Exception):
    """A setting that cannot be used; the message names it and where it stands."""


class Part(Enum):
    """Who reads a setting: the process that it is handed to."""

    API = "api"
    WORKER = "worker"
    SERVE = "serve"
    SUPERVISOR = "supervisor"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a setting may have, both ends among them."""

    least: float = -math.inf
    most: float = math.inf

    def __contains__(self, value: float) -> bool:
        # NaN compares false with everything, so it is in no range.
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least} or more" if self.most == math.inf else f"from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `kind` is int, float, bool or str; `default` is told to people, never passed on."""

    name: str
    kind: type
    default: str
    help: str
    parts: frozenset[Part]

    @property
    def variable(self) -> str:
        return "REDIS_URL" if self.name == "redis_url" else f"TOKENMILL_{self.name.upper()}"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def to_text(self, value: object, where: str) -> str:
        """The value as the environment carries it. Raises `ConfigError` if it cannot be used."""
        text = str(value).strip()
        if check := _CHECKS.get(self.name):
            return check(text, where)
        try:
            if self.kind is bool:
                return _TRUTH[text.lower()]
            if self.kind is str:
                return self._known(text)
            number = self.kind(text)
        except (KeyError, ValueError):
            number = math.nan
        if number not in _RANGES.get(self.name, Range()):
            raise ConfigError(f"{where}: {self.name} must be {self._wanted()}, not {text!r}")
        return str(number)

    def _known(self, word: str) -> str:
        """Raises KeyError for a word that is none of a setting's few."""
        if word not in WORDS.get(self.name, (word,)):
            raise KeyError(word)
        return word

    def _wanted(self) -> str:
        if self.name in WORDS:
            return " or ".join(WORDS[self.name])
        return f"{_KINDS[self.kind]} {_RANGES.get(self.name, '')}".rstrip()


def _checked_workers(text: str, where: str) -> str:
    if text != "auto" and not (text.isdecimal() and int(text) in _NUM_WORKERS):
        raise ConfigError(f"{where}: workers must be auto or a whole number {_NUM_WORKERS}, not {text!r}")
    return text


def _checked_url(url: str, where: str) -> str:
    try:
        redis_url.parse(url)
    except redis_url.BadRedisUrl as error:
        shown = redis_url.hide_password(url)
        raise ConfigError(f"{where}: redis_url must be {error}, not {shown!r}") from None
    return url


def _checked_api_url(url: str, where: str) -> str:
    """The address of an API. Raises `ConfigError`, as no call could ever reach anything else."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        shown = redis_url.hide_password(url)
        raise ConfigError(
            f"{where}: url must be an address that starts with http:// or https://, such as"
            f" http://127.0.0.1:8000, not {shown!r}"
        )
    return url


_NUM_WORKERS = Range(1, 256)
_CHECKS = {"redis_url": _checked_url, "url": _checked_api_url, "workers": _checked_workers}
_TRUTH = {"1": "1", "true": "1", "yes": "1", "on": "1", "0": "0", "false": "0", "no": "0", "off": "0"}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
WORDS = {
    "policy": ("fifo", "skip_ahead"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "attention": ("auto", "torch", "native", "triton"),
    "quantization": ("none", "int8", "int4"),
    "generation_config": ("auto", "none"),
}
"""Of the settings that have a few words to choose from."""
_API = frozenset({Part.API})
_WORKER = frozenset({Part.WORKER})
_BOTH = _API | _WORKER
_SERVE = frozenset({Part.SERVE})
_SUPERVISOR = frozenset({Part.SUPERVISOR})
_CLIENT = frozenset({Part.CLIENT})

SETTINGS = (
    Setting("model", str, "SmolLM2-135M-Instruct", "local model directory or hub id", _BOTH),
    Setting("served_model_name", str, "from the model", "the model's public name", _BOTH),
    Setting("redis_url", str, "a server of its own", "Redis to use; `serve` starts one if unset", _BOTH),
    Setting(
        "dtype",
        str,
        "float32; the model's on CUDA, bfloat16 for float32",
        "auto, float32, bfloat16 or float16",
        _WORKER,
    ),
    Setting("device", str, "CUDA if there is one", "cpu or cuda", _WORKER),
    Setting(
        "max_model_len",
        int,
        "the model's, or what the KV blocks hold",
        "longest prompt and output together, in tokens",
        _WORKER,
    ),
    Setting("max_num_batched_tokens", int, "512; 2048 on CUDA", "tokens computed in one step", _WORKER),
    Setting("max_num_seqs", int, "64; 256 on CUDA", "sequences running at once", _WORKER),
    Setting(
        "max_num_prefill_seqs", int, "16; 1 unchunked", "sequences of a step that are not decoding", _WORKER
    ),
    Setting("chunked_prefill", bool, "true", "compute long prompts in several steps", _WORKER),
    Setting("prefix_caching", bool, "true", "reuse what is computed of prompts that begin alike", _WORKER),
    Setting("policy", str, "fifo", "fifo, or skip_ahead: others pass a head that does not fit", _WORKER),
    Setting("max_skip_ahead", int, "16", "with skip_ahead: so many others in one step", _WORKER),
    Setting("fair_sharing", bool, "true", "tenants of one priority get equal shares of tokens", _WORKER),
    Setting("ageing_seconds", float, "30", "a waiting task rises by a priority class each time", _WORKER),
    Setting("max_waiting_seconds", float, "120", "a task that waits so long goes before all others", _WORKER),
    Setting("max_preemptions", int, "3", "a sequence that lost its blocks so often keeps them", _WORKER),
    Setting("prefill_reserve", float, "0.0", "share of a step that decodes leave to prompts", _WORKER),
    Setting("max_chunk_tokens", int, "half a step", "the most that one prompt takes of a step", _WORKER),
    Setting("attention", str, "auto", "auto, torch, native (on a CPU) or triton (on CUDA)", _WORKER),
    Setting("quantization", str, "none", "none, or int8 or int4: smaller weights on a CPU", _WORKER),
    Setting("decode_graphs", bool, "true", "capture decode steps while loading", _WORKER),
    Setting(
        "async_scheduling",
        bool,
        "true on CUDA",
        "launch a step before the tokens of the last are known",
        _WORKER,
    ),
    Setting("deterministic", bool, "false", "the same bits whatever else runs; slower", _WORKER),
    Setting("generation_config", str, "auto", "auto: the model's sampling defaults; none: ours", _WORKER),
    Setting("block_size", int, "16", "tokens in one KV block", _WORKER),
    Setting("num_kv_blocks", int, "from free memory", "KV blocks in the pool", _WORKER),
    Setting("host", str, "127.0.0.1", "address on which the API listens", _API),
    Setting("port", int, "8000", "port of the API; 0: any free one (serve)", _API),
    Setting("metrics_host", str, "127.0.0.1", "address of the worker's /metrics", _WORKER),
    Setting("metrics_port", int, "9400", "port of the worker's /metrics; 0: any free one", _WORKER),
    Setting("lease_seconds", float, "10", "a worker that is silent for so long loses its tasks", _WORKER),
    Setting("grace_seconds", float, "30", "a stopping worker goes on with its tasks for so long", _WORKER),
    Setting("stall_seconds", float, "60", "a worker whose loop stands still so long ends itself", _WORKER),
    Setting("load_seconds", float, "900", "a model must be loaded within so long", _WORKER),
    Setting("max_task_seconds", float, "86400", "a task that waits so long ends as `timeout`", _BOTH),
    Setting("retention_seconds", float, "3600", "an ended task is kept so long", _BOTH),
    Setting("max_waiting_tasks", int, "10000", "more waiting tasks are refused with 429; 0: no limit", _API),
    Setting(
        "max_waiting_tokens", int, "10000000", "the same for the tokens that they are estimated to need", _API
    ),
    Setting("max_body_bytes", int, "2097152", "a larger body is refused with 413", _API),
    Setting("http_threads", int, "256", "calls that the API answers at once", _API),
    Setting("max_streams", int, "224", "of these, event streams and waiting polls", _API),
    Setting("heartbeat_seconds", float, "10", "comment on a silent event stream", _API),
    Setting("http_grace_seconds", float, "10", "a stopping API lets open calls end for so long", _API),
    Setting("http_read_seconds", float, "10", "a request that has not arrived by then is answered 408", _API),
    Setting("http_write_seconds", float, "30", "a client that reads nothing for so long is closed", _API),
    Setting("max_connections_per_address", int, "512", "HTTP connections of one client; 0: no limit", _API),
    Setting("webhook_secret", str, "none: no webhooks", "`whsec_...`; signs webhooks", _API),
    Setting("webhook_allow_private", bool, "false", "webhooks may go to private addresses", _API),
    Setting("api_keys", str, "none: open to all", "`tenant:key` entries; each call needs a key then", _API),
    Setting("api_keys_file", str, "none", "file of more such entries, one a line", _API),
    Setting("cache_dir", str, ".tokenmill", "where the default model and the native attention lie", _WORKER),
    Setting("hold_unusable", bool, "false", "unusable settings: stay up, not ready, not end with 78", _BOTH),
    Setting("state_dir", str, ".tokenmill", "where `serve` keeps its data", _SERVE),
    Setting("workers", str, "auto", "workers of `serve`; auto: one per CUDA device, else one", _SUPERVISOR),
    Setting("url", str, "the running service's", "the API that submit, status and cancel talk to", _CLIENT),
    Setting("api_key", str, "none", "the key that submit, status and cancel show", _CLIENT),
)

# Thirty years; Redis and timers cannot count much longer.
_LONGEST = 10**9
_RANGES = {
    **dict.fromkeys(("port", "metrics_port"), Range(0, 65535)),
    **{setting.name: Range(1, _LONGEST) for setting in SETTINGS if setting.name.endswith("_seconds")},
    # A lease is renewed three times; below half a second a busy machine would lose its own tasks.
    "lease_seconds": Range(0.5, _LONGEST),
    "grace_seconds": Range(0, _LONGEST),
    **dict.fromkeys(("max_model_len", "max_num_batched_tokens", "max_num_seqs"), Range(1, 2**31 - 1)),
    **dict.fromkeys(("max_num_prefill_seqs", "block_size", "num_kv_blocks"), Range(1, 2**31 - 1)),
    **dict.fromkeys(("max_skip_ahead", "max_chunk_tokens"), Range(1, 2**31 - 1)),
    "max_preemptions": Range(0, 2**31 - 1),
    "prefill_reserve": Range(0, 0.9),
    **dict.fromkeys(("max_waiting_tasks", "max_waiting_tokens", "max_connections_per_address"), Range(0)),
    "max_body_bytes": Range(1024),
    "http_threads": Range(2),
    "max_streams": Range(1),
}
"""Of every setting that is a number."""

BY_NAME = {setting.name: setting for setting in SETTINGS}


def settings_of(*parts: Part) -> list[Setting]:
    """The settings that any of `parts` reads, in the order of the table."""
    return [setting for setting in SETTINGS if setting.parts.intersection(parts)]


def read_file(path: Path) -> dict[str, object]:
    """The settings of a TOML file, unchecked values. Raises `ConfigError`."""
    try:
        # Editors on Windows write a byte order mark, which `tomllib` refuses.
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    if unknown := sorted(values.keys() - BY_NAME.keys()):
        told = ", ".join(name + variables.hint(name, BY_NAME) for name in unknown)
        raise ConfigError(f"{path}: unknown setting {told} (`tokenmill serve --help` lists all of them)")
    return values


def find_file(given: str | None, directory: Path) -> Path | None:
    """The file named by --config, else `tokenmill.toml` in `directory` if it is there."""
    if given:
        return Path(given)
    default = directory / DEFAULT_FILE
    return default if default.is_file() else None


def resolve(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None
) -> dict[str, str]:
    """Every setting that is set anywhere, by name, as text. Flags by name; None means not given.

    An empty environment variable counts as not set. Raises `ConfigError`.
    """
    resolved: dict[str, str] = {}
    for name, value in (read_file(file) if file else {}).items():
        resolved[name] = BY_NAME[name].to_text(value, str(file))
    for setting in SETTINGS:
        if environ.get(setting.variable, "").strip():
            resolved[setting.name] = setting.to_text(environ[setting.variable], setting.variable)
        if flags.get(setting.name) is not None:
            resolved[setting.name] = setting.to_text(flags[setting.name], setting.flag)
    _check_streams(resolved)
    return resolved


def _check_streams(resolved: Mapping[str, str]) -> None:
    """What neither of two settings shows alone."""
    streams, threads = (BY_NAME[name] for name in ("max_streams", "http_threads"))
    most = int(resolved.get(threads.name, threads.default))
    if (given := int(resolved.get(streams.name, streams.default))) >= most:
        raise ConfigError(
            f"{streams.variable} must be below {threads.variable} ({most}), which also answer short calls,"
            f" not {given}"
        )


def to_environment(resolved: Mapping[str, str]) -> dict[str, str]:
    """The same settings as environment variables for a process."""
    return {BY_NAME[name].variable: text for name, text in resolved.items()}
