"""The settings of the API and of the workers: defaults, ranges, and what is derived from them."""

import base64
from pathlib import Path
from typing import Any

import pytest

from tokenmill.protocol import naming
from tokenmill.settings.declarations import (
    ALL,
    MAX_PATIENCE_SECONDS,
    ApiSettings,
    ClientSettings,
    ServeSettings,
    SharedSettings,
    WorkerSettings,
)
from tokenmill.settings.errors import SettingError
from tokenmill.settings.setting import Setting, settings_of

BOTH = [ApiSettings, WorkerSettings]


def is_accepted(variable: str, text: str) -> bool:
    try:
        ServeSettings.load({variable: text})
    except SettingError:
        return False
    return True


def test_each_process_has_its_settings() -> None:
    assert set(ALL) == set(ServeSettings.model_fields) | set(ClientSettings.model_fields)
    assert set(ApiSettings.model_fields) & set(WorkerSettings.model_fields) == set(
        SharedSettings.model_fields
    )
    assert ALL["redis_url"].variable == "REDIS_URL"
    assert ALL["max_num_seqs"].variable == "TOKENMILL_MAX_NUM_SEQS"
    assert ALL["max_num_seqs"].flag == "--max-num-seqs"


def test_variables_of_the_api_are_read() -> None:
    settings = ApiSettings.load(
        {
            "REDIS_URL": "redis://r:1/2",
            "TOKENMILL_HOST": "0.0.0.0",
            "TOKENMILL_PORT": "0",
            "TOKENMILL_MODEL": "/models/Tiny-1B/",
            "TOKENMILL_RETENTION_SECONDS": "1.5",
            "TOKENMILL_MAX_WAITING_TASKS": "0",
            "TOKENMILL_HTTP_THREADS": "8",
            "TOKENMILL_MAX_STREAMS": "7",
        }
    )
    assert (settings.redis_url, settings.host, settings.port) == ("redis://r:1/2", "0.0.0.0", 0)
    assert settings.public_model == "Tiny-1B"
    assert settings.slug.startswith("tiny-1b-")
    assert (settings.retention_seconds, settings.waiting_limit) == (1.5, None)


WORKER_VALUES: dict[str, tuple[str, object]] = {
    "model": ("/models/some-model/", "/models/some-model/"),
    "served_model_name": ("mine", "mine"),
    "log_level": ("debug", "debug"),
    "log_format": ("json", "json"),
    "dtype": ("bfloat16", "bfloat16"),
    "device": ("cpu", "cpu"),
    "redis_url": ("redis://redis:6379/3", "redis://redis:6379/3"),
    "metrics_port": ("0", 0),
    "metrics_host": ("0.0.0.0", "0.0.0.0"),
    "cache_dir": ("/cache", "/cache"),
    "hold_unusable": ("1", True),
    "load_seconds": ("5", 5.0),
    "max_model_len": ("100", 100),
    "num_kv_blocks": ("101", 101),
    "block_size": ("8", 8),
    "max_num_batched_tokens": ("102", 102),
    "max_num_seqs": ("103", 103),
    "max_num_prefill_seqs": ("104", 104),
    "chunked_prefill": ("off", False),
    "prefix_caching": ("no", False),
    "policy": ("skip_ahead", "skip_ahead"),
    "max_skip_ahead": ("105", 105),
    "fair_sharing": ("0", False),
    "ageing_seconds": ("10", 10.0),
    "max_waiting_seconds": ("1e9", 1e9),
    "max_preemptions": ("0", 0),
    "num_speculative_tokens": ("7", 7),
    "prefill_reserve": ("0.25", 0.25),
    "max_chunk_tokens": ("106", 106),
    "attention": ("torch", "torch"),
    "quantization": ("int4", "int4"),
    "generation_config": ("none", "none"),
    "decode_graphs": ("false", False),
    "async_scheduling": ("off", False),
    "deterministic": ("true", True),
    "lease_seconds": ("1.5", 1.5),
    "grace_seconds": ("0", 0.0),
    "stall_seconds": ("7", 7.0),
    "retention_seconds": ("8", 8.0),
    "max_task_seconds": ("9", 9.0),
}


def test_every_setting_of_a_worker_is_read() -> None:
    environ = {ALL[name].variable: text for name, (text, _) in WORKER_VALUES.items()}
    settings = WorkerSettings.load(environ)

    assert {name: getattr(settings, name) for name in WorkerSettings.model_fields} == {
        name: value for name, (_, value) in WORKER_VALUES.items()
    }


def test_the_engine_gets_the_limits_that_are_set() -> None:
    environ = {"TOKENMILL_BLOCK_SIZE": "8", "TOKENMILL_MAX_WAITING_SECONDS": "1e9", "TOKENMILL_MODEL": "m"}

    assert WorkerSettings.load(environ).engine_limits() == {
        "block_size": 8,
        "max_waiting_seconds": MAX_PATIENCE_SECONDS,
    }


@pytest.mark.parametrize("process", BOTH)
@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, naming.DEFAULT_MODEL),
        ({"TOKENMILL_MODEL": "/models/Tiny/"}, "Tiny"),
        ({"TOKENMILL_MODEL": "owner/model"}, "owner/model"),
        ({"TOKENMILL_MODEL": "/models/x", "TOKENMILL_SERVED_MODEL_NAME": " acme/chat "}, "acme/chat"),
    ],
)
def test_both_processes_form_the_same_public_name(
    process: type[SharedSettings], environ: dict[str, str], name: str
) -> None:
    assert process.load(environ).public_model == name


@pytest.mark.parametrize(
    ("variable", "accepted", "refused"),
    [
        ("TOKENMILL_PORT", ["0", "65535"], ["-1", "65536", "80.5", "eighty", "nan"]),
        ("TOKENMILL_METRICS_PORT", ["0", "65535"], ["-1", "65536"]),
        ("TOKENMILL_MAX_NUM_SEQS", ["1", "2147483647"], ["0", "-1", "1.5", "2147483648"]),
        ("TOKENMILL_BLOCK_SIZE", ["1"], ["0", "-1"]),
        ("TOKENMILL_MAX_PREEMPTIONS", ["0"], ["-1"]),
        ("TOKENMILL_PREFILL_RESERVE", ["0", "0.9"], ["0.95", "-0.1", "nan"]),
        ("TOKENMILL_LEASE_SECONDS", ["0.5"], ["0.49", "nan"]),
        ("TOKENMILL_GRACE_SECONDS", ["0"], ["-1"]),
        ("TOKENMILL_MAX_TASK_SECONDS", ["1", "1.5"], ["0.999", "1 day"]),
        ("TOKENMILL_HEARTBEAT_SECONDS", ["1"], ["-3", "0"]),
        ("TOKENMILL_MAX_WAITING_TASKS", ["0", "10000000000"], ["-1", "many"]),
        ("TOKENMILL_MAX_BODY_BYTES", ["1024"], ["1023"]),
        ("TOKENMILL_HTTP_THREADS", ["225"], ["1", "many"]),
        ("TOKENMILL_MAX_STREAMS", ["1", "255"], ["0", "256"]),
        ("TOKENMILL_CHUNKED_PREFILL", ["1", "Yes", "off", "TRUE", "No"], ["maybe", "2"]),
        ("TOKENMILL_WEBHOOK_ALLOW_PRIVATE", ["true", "0"], ["maybe"]),
        ("TOKENMILL_POLICY", ["fifo", "skip_ahead"], ["lifo"]),
        ("TOKENMILL_ATTENTION", ["auto", "native"], ["fast"]),
        ("TOKENMILL_QUANTIZATION", ["none", "int8"], ["int2"]),
        ("TOKENMILL_GENERATION_CONFIG", ["auto", "none"], ["vllm"]),
        ("TOKENMILL_DEVICE", ["auto", "cpu", "cuda"], ["gpu", "cuda:1"]),
        ("TOKENMILL_WORKERS", ["auto", "1", " 8 ", "256"], ["0", "-1", "257", "many", "1.5"]),
        ("REDIS_URL", ["redis://h:1/0", "rediss://h", "unix:///s"], ["http://h", "h:6379"]),
    ],
)
def test_ranges(variable: str, accepted: list[str], refused: list[str]) -> None:
    assert [text for text in accepted if not is_accepted(variable, text)] == []
    for text in refused:
        with pytest.raises(SettingError, match=f"^{variable} must be "):
            ServeSettings.load({variable: text})


@pytest.mark.parametrize("name", [name for name in ALL if name.endswith("_seconds")])
def test_every_duration_is_limited(name: str) -> None:
    """A longer one is too many milliseconds for Redis, or too long for a system's timeout."""
    variable = ALL[name].variable
    assert is_accepted(variable, "1e9")
    assert not any(is_accepted(variable, text) for text in ("1000000001", "1e10", "1e400", "inf", "nan"))


@pytest.mark.parametrize("setting", [one for one in ALL.values() if one.kind in (int, float)])
def test_the_allowed_values_of_a_number_have_its_minimum(setting: Setting) -> None:
    minimum = {"max_body_bytes": "1024", "http_threads": "2", "lease_seconds": "0.5"}.get(setting.name)
    assert setting.allowed.removeprefix("a whole number").removeprefix("a number").split()[0] in (
        "from",
        "of",
    )
    assert minimum is None or f" {minimum}" in setting.allowed


def test_secrets_of_webhooks_are_read_and_never_shown() -> None:
    secret = f"whsec_{base64.b64encode(b'k' * 24).decode()}"
    settings = ApiSettings.load({"TOKENMILL_WEBHOOK_SECRET": f"{secret}  {secret}"})
    assert settings.webhook_keys == (b"k" * 24,) * 2
    assert secret not in repr(settings)
    assert "kkk" not in repr(settings)
    for text in ("nearly-right", secret[:-2], f"{secret} nearly-right"):
        with pytest.raises(SettingError) as raised:
            ApiSettings.load({"TOKENMILL_WEBHOOK_SECRET": text})
        assert "TOKENMILL_WEBHOOK_SECRET must be whsec_ and the base64" in str(raised.value)
        assert text[:8] not in str(raised.value).replace("whsec_ and", "")


def test_keys_are_never_shown() -> None:
    settings: list[Any] = [
        ApiSettings.load({"TOKENMILL_API_KEYS": "tenant:key-1"}),
        ClientSettings.load({"TOKENMILL_API_KEY": "key-1"}),
    ]
    assert [one for one in settings if "key-1" in repr(one)] == []


def test_a_file_of_keys_is_read_only_when_needed(tmp_path: Path) -> None:
    """The commands `submit`, `status` and `cancel` may not be allowed to read it."""
    settings = ApiSettings.load({"TOKENMILL_API_KEYS_FILE": str(tmp_path / "missing")})
    with pytest.raises(SettingError, match="TOKENMILL_API_KEYS_FILE must be a file that can be read"):
        settings.check_files()
    ApiSettings.load({}).check_files()


def test_every_setting_is_explained() -> None:
    assert [
        one.name for one in settings_of(ServeSettings, ClientSettings).values() if not one.help_text
    ] == []
