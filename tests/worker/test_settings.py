"""Settings: one name each, a bad value names the variable and what is allowed."""

from dataclasses import asdict, fields

import pytest

from engine.config import POLICIES as ENGINES_POLICIES
from engine.config import EngineConfig
from engine.execution.loading.attention_backends import ATTENTION as ENGINES_ATTENTION
from tokenmill.protocol import naming
from worker.errors import SettingsError
from worker.settings import (
    ATTENTION,
    LONGEST_PATIENCE_SECONDS,
    MAX_PREFILL_RESERVE,
    POLICIES,
    EngineSettings,
    Timing,
    WorkerSettings,
)
from worker.watchdog import WatchdogProcess


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = WorkerSettings.from_env({})

    assert settings == WorkerSettings()
    assert settings.served_model_name == naming.DEFAULT_MODEL
    assert settings.engine == EngineSettings()
    assert settings.timing == Timing()


def test_every_setting_is_read() -> None:
    settings = WorkerSettings.from_env(
        {
            "TOKENMILL_MODEL": "/models/some-model/",
            "TOKENMILL_SERVED_MODEL_NAME": "mine",
            "TOKENMILL_DTYPE": "bfloat16",
            "TOKENMILL_DEVICE": "cpu",
            "REDIS_URL": "redis://redis:6379/3",
            "TOKENMILL_METRICS_PORT": "0",
            "TOKENMILL_METRICS_HOST": "0.0.0.0",
            "TOKENMILL_CACHE_DIR": "/cache",
            "TOKENMILL_LOAD_SECONDS": "5",
            "TOKENMILL_MAX_MODEL_LEN": "100",
            "TOKENMILL_NUM_KV_BLOCKS": "101",
            "TOKENMILL_BLOCK_SIZE": "8",
            "TOKENMILL_MAX_NUM_BATCHED_TOKENS": "102",
            "TOKENMILL_MAX_NUM_SEQS": "103",
            "TOKENMILL_MAX_NUM_PREFILL_SEQS": "104",
            "TOKENMILL_CHUNKED_PREFILL": "off",
            "TOKENMILL_PREFIX_CACHING": "no",
            "TOKENMILL_POLICY": "skip_ahead",
            "TOKENMILL_MAX_SKIP_AHEAD": "105",
            "TOKENMILL_FAIR_SHARING": "0",
            "TOKENMILL_AGEING_SECONDS": "10",
            "TOKENMILL_MAX_WAITING_SECONDS": "1e9",
            "TOKENMILL_MAX_PREEMPTIONS": "0",
            "TOKENMILL_PREFILL_RESERVE": "0.25",
            "TOKENMILL_MAX_CHUNK_TOKENS": "106",
            "TOKENMILL_ATTENTION": "torch",
            "TOKENMILL_QUANTIZATION": "int4",
            "TOKENMILL_GENERATION_CONFIG": "none",
            "TOKENMILL_DECODE_GRAPHS": "false",
            "TOKENMILL_ASYNC_SCHEDULING": "off",
            "TOKENMILL_DETERMINISTIC": "true",
            "TOKENMILL_LEASE_SECONDS": "1.5",
            "TOKENMILL_GRACE_SECONDS": "0",
            "TOKENMILL_STALL_SECONDS": "7",
            "TOKENMILL_RETENTION_SECONDS": "8",
            "TOKENMILL_MAX_TASK_SECONDS": "9",
        }
    )

    assert settings == WorkerSettings(
        model="/models/some-model/",
        served_model_name="mine",
        dtype="bfloat16",
        device="cpu",
        attention="torch",
        quantization="int4",
        generation_config="none",
        decode_graphs=False,
        async_scheduling=False,
        deterministic=True,
        redis_url="redis://redis:6379/3",
        metrics_port=0,
        metrics_host="0.0.0.0",
        cache_dir="/cache",
        load_seconds=5.0,
        engine=EngineSettings(
            max_model_len=100,
            num_kv_blocks=101,
            block_size=8,
            max_num_batched_tokens=102,
            max_num_seqs=103,
            max_num_prefill_seqs=104,
            chunked_prefill=False,
            prefix_caching=False,
            policy="skip_ahead",
            max_skip_ahead=105,
            fair_sharing=False,
            ageing_seconds=10.0,
            max_waiting_seconds=366 * 86400.0,  # the engine takes no more
            max_preemptions=0,
            prefill_reserve=0.25,
            max_chunk_tokens=106,
        ),
        timing=Timing(
            lease_seconds=1.5,
            grace_seconds=0.0,
            stall_seconds=7.0,
            retention_seconds=8.0,
            max_task_seconds=9.0,
        ),
    )


def test_a_directory_is_served_under_its_own_name() -> None:
    assert WorkerSettings.from_env({"TOKENMILL_MODEL": "/models/tiny/"}).served_model_name == "tiny"


def test_the_longest_stall_can_be_watched_for() -> None:
    timing = WorkerSettings.from_env({"TOKENMILL_STALL_SECONDS": "1e9"}).timing
    watchdog = WatchdogProcess()
    watchdog.arm(timing.stall_seconds)
    watchdog.close()


def test_an_empty_variable_counts_as_unset() -> None:
    empty = {"TOKENMILL_MODEL": "", "TOKENMILL_MAX_NUM_SEQS": " ", "TOKENMILL_LEASE_SECONDS": ""}
    assert WorkerSettings.from_env(empty) == WorkerSettings()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("TOKENMILL_MAX_NUM_SEQS", "0", "from 1 to"),
        ("TOKENMILL_MAX_NUM_SEQS", "1.5", "whole number"),
        ("TOKENMILL_BLOCK_SIZE", "-1", "from 1 to"),
        ("TOKENMILL_METRICS_PORT", "65536", "from 0 to 65535"),
        ("TOKENMILL_LEASE_SECONDS", "0.1", "at least 0.5"),
        ("TOKENMILL_LEASE_SECONDS", "nan", "number of seconds"),
        ("TOKENMILL_GRACE_SECONDS", "-1", "at least 0"),
        ("TOKENMILL_RETENTION_SECONDS", "1e10", "at most 1e9"),
        ("TOKENMILL_STALL_SECONDS", "inf", "number of seconds"),
        ("TOKENMILL_STALL_SECONDS", "1e10", "at most 1e9"),
        ("TOKENMILL_LOAD_SECONDS", "1e10", "at most 1e9"),
        ("TOKENMILL_CHUNKED_PREFILL", "maybe", "true or false"),
        ("TOKENMILL_POLICY", "lifo", "fifo or skip_ahead"),
        ("TOKENMILL_ATTENTION", "fast", "auto or torch or native or triton"),
        ("TOKENMILL_QUANTIZATION", "int2", "none or int8 or int4"),
        ("TOKENMILL_GENERATION_CONFIG", "vllm", "auto or none"),
        ("TOKENMILL_PREFILL_RESERVE", "0.95", "from 0 to 0.9"),
        ("TOKENMILL_PREFILL_RESERVE", "nan", "from 0 to 0.9"),
        ("TOKENMILL_MAX_PREEMPTIONS", "-1", "from 0 to"),
        ("REDIS_URL", "http://redis", "redis://"),
    ],
)
def test_a_bad_value_names_the_variable_and_what_is_allowed(name: str, value: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        WorkerSettings.from_env({name: value})

    assert name in str(caught.value)
    assert allowed in str(caught.value)
    assert value in str(caught.value)


def test_the_engine_has_a_setting_for_each_of_its_fields_and_takes_their_bounds() -> None:
    assert {one.name for one in fields(EngineSettings)} == {one.name for one in fields(EngineConfig)}
    most = EngineSettings(
        max_model_len=2, num_kv_blocks=1, ageing_seconds=LONGEST_PATIENCE_SECONDS,
        max_waiting_seconds=LONGEST_PATIENCE_SECONDS, prefill_reserve=MAX_PREFILL_RESERVE,
    )  # fmt: skip
    assert POLICIES == ENGINES_POLICIES
    assert ATTENTION == ENGINES_ATTENTION
    EngineConfig(**{name: value for name, value in asdict(most).items() if value is not None})
