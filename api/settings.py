"""The API's settings, from environment variables of the same names.

Law: a value that cannot be used is an error that names its variable, before anything starts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from api.keyring import NO_KEYS, Keyring, parse_keys
from api.webhooks import signature as webhook_signature
from tokenmill.protocol import naming, redis_url

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})
Number = TypeVar("Number", int, float)


class SettingError(ValueError):
    """An environment variable holds a value that cannot be used."""

    def __init__(self, variable: str, text: str, wanted: str) -> None:
        super().__init__(f"{variable} must be {wanted}, not {text!r}")
        self.variable = variable


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """What one API process needs to know.

    `model`, `served_model_name`: what the worker loads, and the public name ("" takes it from `model`).
    `max_waiting_tasks`, `max_waiting_tokens`: submissions beyond so many waiting tasks, or beyond so many
    tokens that these are estimated to need, are refused; 0 means no limit.
    `http_threads`: calls answered at once. `max_streams`: of these, event streams and waiting polls; fewer,
    so that short calls always find a thread. Seconds: `retention_seconds` an ended task is kept,
    `max_task_seconds` a task may wait for a worker, `heartbeat_seconds` between comments on a silent
    stream, `http_grace_seconds` for open calls to end when the server stops, `http_read_seconds` for a
    request to arrive, `http_write_seconds` for a client to read some of what it is sent.
    `max_connections_per_address`: 0 means no limit.
    `webhook_keys`: sign what is sent to webhooks; without any, no task may have one.
    `webhook_allow_private`: they may be addresses of this machine and its networks.
    `keyring`: the API keys; without any, nobody needs one, and all are one tenant.
    `hold_unusable`: see `tokenmill.process.restart_loop`.
    """

    redis_url: str = "redis://127.0.0.1:6379/0"
    host: str = "127.0.0.1"
    port: int = 8000
    model: str = naming.DEFAULT_MODEL
    served_model_name: str = ""
    retention_seconds: float = 3600.0
    max_task_seconds: float = 86400.0
    max_waiting_tasks: int = 10_000
    max_waiting_tokens: int = 10_000_000
    max_body_bytes: int = 2 * 1024 * 1024
    http_threads: int = 256
    max_streams: int = 224
    heartbeat_seconds: float = 10.0
    http_grace_seconds: float = 10.0
    http_read_seconds: float = 10.0
    http_write_seconds: float = 30.0
    max_connections_per_address: int = 512
    webhook_keys: tuple[bytes, ...] = field(default=(), repr=False)
    webhook_allow_private: bool = False
    keyring: Keyring = NO_KEYS
    hold_unusable: bool = False

    @property
    def public_model(self) -> str:
        return naming.served_model_name(self.model, self.served_model_name)

    @property
    def slug(self) -> str:
        return naming.model_slug(self.public_model)

    @property
    def waiting_limit(self) -> int | None:
        return self.max_waiting_tasks or None

    @property
    def waiting_token_limit(self) -> int | None:
        return self.max_waiting_tokens or None

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "ApiSettings":
        """An unset or empty variable leaves the default. Raises `SettingError`."""
        read = _Reader(environ)
        default = cls()
        settings = cls(
            redis_url=read.redis_url("REDIS_URL", default.redis_url),
            host=read.text("TOKENMILL_HOST", default.host),
            port=read.whole("TOKENMILL_PORT", default.port, least=0, most=65535),
            model=read.text("TOKENMILL_MODEL", default.model),
            served_model_name=read.text("TOKENMILL_SERVED_MODEL_NAME", ""),
            retention_seconds=read.seconds("TOKENMILL_RETENTION_SECONDS", default.retention_seconds),
            max_task_seconds=read.seconds("TOKENMILL_MAX_TASK_SECONDS", default.max_task_seconds),
            max_waiting_tasks=read.whole("TOKENMILL_MAX_WAITING_TASKS", default.max_waiting_tasks, least=0),
            max_waiting_tokens=read.whole(
                "TOKENMILL_MAX_WAITING_TOKENS", default.max_waiting_tokens, least=0
            ),
            max_body_bytes=read.whole("TOKENMILL_MAX_BODY_BYTES", default.max_body_bytes, least=1024),
            http_threads=read.whole("TOKENMILL_HTTP_THREADS", default.http_threads, least=2),
            max_streams=read.whole("TOKENMILL_MAX_STREAMS", default.max_streams, least=1),
            heartbeat_seconds=read.seconds("TOKENMILL_HEARTBEAT_SECONDS", default.heartbeat_seconds),
            http_grace_seconds=read.seconds("TOKENMILL_HTTP_GRACE_SECONDS", default.http_grace_seconds),
            http_read_seconds=read.seconds("TOKENMILL_HTTP_READ_SECONDS", default.http_read_seconds),
            http_write_seconds=read.seconds("TOKENMILL_HTTP_WRITE_SECONDS", default.http_write_seconds),
            max_connections_per_address=read.whole(
                "TOKENMILL_MAX_CONNECTIONS_PER_ADDRESS", default.max_connections_per_address, least=0
            ),
            webhook_keys=read.secrets("TOKENMILL_WEBHOOK_SECRET"),
            webhook_allow_private=read.switch(
                "TOKENMILL_WEBHOOK_ALLOW_PRIVATE", default.webhook_allow_private
            ),
            keyring=read.keyring("TOKENMILL_API_KEYS", "TOKENMILL_API_KEYS_FILE"),
            hold_unusable=read.switch("TOKENMILL_HOLD_UNUSABLE", default.hold_unusable),
        )
        if settings.max_streams >= settings.http_threads:
            raise SettingError(
                "TOKENMILL_MAX_STREAMS",
                str(settings.max_streams),
                f"below TOKENMILL_HTTP_THREADS ({settings.http_threads}), which also answer short calls",
            )
        return settings


class _Reader:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, variable: str, default: str) -> str:
        return self._environ.get(variable, "").strip() or default

    def redis_url(self, variable: str, default: str) -> str:
        url = self.text(variable, default)
        try:
            redis_url.parse(url)
        except redis_url.BadRedisUrl as error:
            raise SettingError(variable, redis_url.hide_password(url), str(error)) from None
        return url

    def secrets(self, variable: str) -> tuple[bytes, ...]:
        try:
            return webhook_signature.parse_secrets(self.text(variable, ""))
        except ValueError as error:
            # What was given may be nearly right, and the message stands in logs.
            raise SettingError(variable, "...", str(error)) from None

    def keyring(self, variable: str, file_variable: str) -> Keyring:
        """The keys of both; none where neither is set."""
        given, file = self.text(variable, ""), self.text(file_variable, "")
        keyring = _with_keys(NO_KEYS, variable, given) if given else NO_KEYS
        return _with_keys(keyring, file_variable, _contents(file_variable, file)) if file else keyring

    def switch(self, variable: str, default: bool) -> bool:
        text = self.text(variable, "").lower()
        if text and text not in _YES | _NO:
            raise SettingError(variable, text, "true or false")
        return text in _YES if text else default

    def whole(self, variable: str, default: int, *, least: int, most: int | None = None) -> int:
        wanted = f"a whole number, {least} or more" if most is None else f"a whole number, {least} to {most}"
        return self._number(variable, default, int, wanted, least, math.inf if most is None else most)

    def seconds(self, variable: str, default: float) -> float:
        return self._number(variable, default, float, "a number of seconds from 1 to 1e9", 1.0, 1e9)

    def _number(
        self,
        variable: str,
        default: Number,
        kind: Callable[[str], Number],
        wanted: str,
        least: float,
        most: float,
    ) -> Number:
        text = self.text(variable, "")
        if not text:
            return default
        try:
            value = kind(text)
        except ValueError:
            raise SettingError(variable, text, wanted) from None
        # Written so that NaN, which compares false with everything, is refused too.
        if not least <= value <= most:
            raise SettingError(variable, text, wanted)
        return value


def _with_keys(known: Keyring, variable: str, text: str) -> Keyring:
    try:
        return parse_keys(text, known)
    except ValueError as error:
        # What was given holds keys, and the message stands in logs.
        raise SettingError(variable, "...", str(error)) from None


def _contents(variable: str, file: str) -> str:
    try:
        return Path(file).read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise SettingError(variable, file, f"a file that can be read ({reason})") from error
