"""A variable that both rooms read means the same to both: one must not start where the other refuses."""

from collections.abc import Callable, Mapping

import pytest

from api.settings import ApiSettings, SettingError
from tests.settings_read import variables_of
from tokenmill.config import WORDS
from worker import settings as worker_settings
from worker.errors import SettingsError
from worker.settings import WorkerSettings

API = variables_of(ApiSettings.from_env)
WORKER = variables_of(WorkerSettings.from_env)
TEXTS = (
    "-1", "0", "0.5", "0.999", "1", " 1 ", "1.5", "1e9", "1000000001", "1e10", "1e400", "nan", "inf",
    "1 day", "1_0", "redis://h:1/0", "rediss://h", "unix:///s", "http://h", "h:6379", "a/b", "/models/tiny/",
)  # fmt: skip


def judge(from_env: Callable[[Mapping[str, str]], object], variable: str, text: str) -> bool:
    try:
        from_env({variable: text})
    except (SettingError, SettingsError):
        return False
    return True


def test_what_both_rooms_read() -> None:
    shared = {
        "REDIS_URL",
        "TOKENMILL_HOLD_UNUSABLE",
        "TOKENMILL_MODEL",
        "TOKENMILL_SERVED_MODEL_NAME",
        "TOKENMILL_MAX_TASK_SECONDS",
        "TOKENMILL_RETENTION_SECONDS",
    }
    assert shared == API & WORKER


@pytest.mark.parametrize("variable", sorted(API & WORKER))
def test_both_rooms_take_and_refuse_the_same(variable: str) -> None:
    verdicts = {text: judge(ApiSettings.from_env, variable, text) for text in TEXTS}
    assert verdicts == {text: judge(WorkerSettings.from_env, variable, text) for text in TEXTS}
    assert any(verdicts.values())


def test_the_command_line_takes_the_words_that_the_worker_takes() -> None:
    words = {
        "policy": worker_settings.POLICIES,
        "dtype": worker_settings.DTYPES,
        "attention": worker_settings.ATTENTION,
        "quantization": worker_settings.QUANTIZATION,
        "generation_config": worker_settings.GENERATION_CONFIG,
    }
    assert {name: set(given) for name, given in WORDS.items()} == {
        name: set(given) for name, given in words.items()
    }


@pytest.mark.parametrize("name", ["max_task_seconds", "retention_seconds"])
def test_shared_durations_have_bounds(name: str) -> None:
    variable = f"TOKENMILL_{name.upper()}"
    for text in ("1", "1.5", "1e9"):
        environ = {variable: text}
        assert getattr(ApiSettings.from_env(environ), name) == float(text)
        assert getattr(WorkerSettings.from_env(environ).timing, name) == float(text)
    for text in ("0", "0.999", "1000000001", "inf", "nan"):
        assert not judge(ApiSettings.from_env, variable, text), text


@pytest.mark.parametrize("variable", sorted(v for v in API | WORKER if v.endswith("_SECONDS")))
def test_every_duration_ends_before_clocks_do(variable: str) -> None:
    """A longer one would be no number of milliseconds to Redis, or no timeout to the system."""
    room = ApiSettings if variable in API else WorkerSettings
    assert judge(room.from_env, variable, "1e9")
    assert not judge(room.from_env, variable, "1000000001")


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_variable_is_an_unset_one(text: str) -> None:
    """So Compose can pass every variable on, `${NAME:-}`, whether the user has set it or not."""
    environ = dict.fromkeys(API | WORKER, text)
    assert ApiSettings.from_env(environ) == ApiSettings()
    assert WorkerSettings.from_env(environ) == WorkerSettings()


def test_the_same_model_is_served_and_asked_for() -> None:
    for environ in ({}, {"TOKENMILL_MODEL": "/models/Tiny/"}, {"TOKENMILL_SERVED_MODEL_NAME": " acme/x "}):
        asked_for = ApiSettings.from_env(environ).public_model
        assert asked_for == WorkerSettings.from_env(environ).served_model_name
