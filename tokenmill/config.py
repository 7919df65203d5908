"""Every setting of the service by name, and where its value comes from: flag > environment > file.

A setting has one name: the flag `--max-num-seqs`, the variable `TOKENMILL_MAX_NUM_SEQS` and the key
`max_num_seqs` are the same. Knows no room: what it gives is text for their environment.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

DEFAULT_FILE = "tokenmill.toml"


class ConfigError(Exception):
    """A setting that cannot be used; the message names it and where it stands."""


class Part(Enum):
    """Who reads a setting: the process that it is handed to."""

    API = "api"
    WORKER = "worker"
    SERVE = "serve"
    CLIENT = "client"


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
        """The value as the environment carries it. Raises `ConfigError` if it is not of this kind."""
        text = str(value).strip()
        try:
            if self.kind is bool:
                return _TRUTH[text.lower()]
            return str(self.kind(text))
        except (KeyError, ValueError):
            raise ConfigError(f"{where}: {self.name} must be {_KINDS[self.kind]}, not {text!r}") from None


_TRUTH = {"1": "1", "true": "1", "yes": "1", "on": "1", "0": "0", "false": "0", "no": "0", "off": "0"}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_API = frozenset({Part.API})
_WORKER = frozenset({Part.WORKER})
_BOTH = _API | _WORKER
_SERVE = frozenset({Part.SERVE})
_CLIENT = frozenset({Part.CLIENT})

SETTINGS = (
    Setting("model", str, "SmolLM2-135M-Instruct", "local model directory or hub id", _BOTH),
    Setting("served_model_name", str, "from the model", "the model's public name", _BOTH),
    Setting("redis_url", str, "a server of its own", "Redis to use; `serve` starts one if unset", _BOTH),
    Setting("dtype", str, "the model's on CUDA, float32 on CPU", "float32 or bfloat16", _WORKER),
    Setting("device", str, "CUDA if there is one", "cpu or cuda", _WORKER),
    Setting("max_model_len", int, "the model's", "longest prompt and output together, in tokens", _WORKER),
    Setting("max_num_batched_tokens", int, "512", "tokens computed in one step", _WORKER),
    Setting("max_num_seqs", int, "64", "sequences running at once", _WORKER),
    Setting(
        "max_num_prefill_seqs", int, "16; 1 unchunked", "sequences of a step that are not decoding", _WORKER
    ),
    Setting("chunked_prefill", bool, "true", "compute long prompts in several steps", _WORKER),
    Setting("prefix_caching", bool, "true", "reuse what is computed of prompts that begin alike", _WORKER),
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
    Setting("max_body_bytes", int, "2097152", "a larger body is refused with 413", _API),
    Setting("http_threads", int, "256", "calls that the API answers at once", _API),
    Setting("max_streams", int, "224", "of these, event streams and waiting polls", _API),
    Setting("heartbeat_seconds", float, "10", "comment on a silent event stream", _API),
    Setting("http_grace_seconds", float, "10", "a stopping API lets open calls end for so long", _API),
    Setting("cache_dir", str, ".tokenmill", "where the converted default model lies", _WORKER),
    Setting("state_dir", str, ".tokenmill", "where `serve` keeps its data", _SERVE),
    Setting("url", str, "the running service's", "the API that submit, status and cancel talk to", _CLIENT),
)

BY_NAME = {setting.name: setting for setting in SETTINGS}


def settings_of(*parts: Part) -> list[Setting]:
    """The settings that any of `parts` reads, in the order of the table."""
    return [setting for setting in SETTINGS if setting.parts.intersection(parts)]


def read_file(path: Path) -> dict[str, object]:
    """The settings of a TOML file, unchecked values. Raises `ConfigError`."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    if unknown := sorted(values.keys() - BY_NAME.keys()):
        raise ConfigError(f"{path}: unknown setting {', '.join(unknown)}; known are: {', '.join(BY_NAME)}")
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
        if environ.get(setting.variable):
            resolved[setting.name] = setting.to_text(environ[setting.variable], setting.variable)
        if flags.get(setting.name) is not None:
            resolved[setting.name] = setting.to_text(flags[setting.name], setting.flag)
    return resolved


def to_environment(resolved: Mapping[str, str]) -> dict[str, str]:
    """The same settings as environment variables for a process."""
    return {BY_NAME[name].variable: text for name, text in resolved.items()}
