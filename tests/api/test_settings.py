"""Settings come from variables of the same names; a bad one is named."""

import base64

import pytest

from api.settings import ApiSettings, SettingError


def test_without_variables_there_are_defaults():
    assert ApiSettings.from_env({}) == ApiSettings()
    assert ApiSettings.from_env({"TOKENMILL_PORT": " ", "REDIS_URL": ""}) == ApiSettings()
    assert (ApiSettings().host, ApiSettings().port) == ("127.0.0.1", 8000)


def test_variables_are_read():
    settings = ApiSettings.from_env(
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


def test_the_public_name_may_be_chosen():
    environ = {"TOKENMILL_MODEL": "/models/x", "TOKENMILL_SERVED_MODEL_NAME": "acme/chat"}
    assert ApiSettings.from_env(environ).public_model == "acme/chat"


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("TOKENMILL_PORT", "eighty"),
        ("TOKENMILL_PORT", "65536"),
        ("TOKENMILL_PORT", "-1"),
        ("TOKENMILL_PORT", "80.5"),
        ("REDIS_URL", "http://redis"),
        ("TOKENMILL_RETENTION_SECONDS", "0.5"),
        ("TOKENMILL_RETENTION_SECONDS", "1000000001"),
        ("TOKENMILL_RETENTION_SECONDS", "nan"),
        ("TOKENMILL_RETENTION_SECONDS", "inf"),
        ("TOKENMILL_MAX_TASK_SECONDS", "1 day"),
        ("TOKENMILL_HEARTBEAT_SECONDS", "-3"),
        ("TOKENMILL_MAX_WAITING_TASKS", "-1"),
        ("TOKENMILL_MAX_BODY_BYTES", "12"),
        ("TOKENMILL_HTTP_THREADS", "1"),
        ("TOKENMILL_MAX_STREAMS", "0"),
        ("TOKENMILL_MAX_STREAMS", "256"),
    ],
)
def test_a_bad_value_is_named(variable, text):
    with pytest.raises(SettingError) as raised:
        ApiSettings.from_env({variable: text})
    assert raised.value.variable == variable
    assert str(raised.value).startswith(f"{variable} must be ")
    assert repr(text) in str(raised.value)


def test_secrets_of_webhooks_are_read_and_never_shown():
    secret = f"whsec_{base64.b64encode(b'k' * 24).decode()}"
    settings = ApiSettings.from_env({"TOKENMILL_WEBHOOK_SECRET": f"{secret}  {secret}"})
    assert settings.webhook_keys == (b"k" * 24,) * 2
    assert "kkk" not in repr(settings)
    for text in ("nearly-right", secret[:-2], f"{secret} nearly-right"):
        with pytest.raises(SettingError) as raised:
            ApiSettings.from_env({"TOKENMILL_WEBHOOK_SECRET": text})
        assert "TOKENMILL_WEBHOOK_SECRET must be whsec_ and the base64" in str(raised.value)
        assert text[:8] not in str(raised.value).replace("whsec_ and", "")


def test_a_switch_is_true_or_false():
    for text, value in (("1", True), ("Yes", True), ("false", False), ("off", False), ("", False)):
        environ = {"TOKENMILL_WEBHOOK_ALLOW_PRIVATE": text}
        assert ApiSettings.from_env(environ).webhook_allow_private is value
    with pytest.raises(SettingError):
        ApiSettings.from_env({"TOKENMILL_WEBHOOK_ALLOW_PRIVATE": "maybe"})
