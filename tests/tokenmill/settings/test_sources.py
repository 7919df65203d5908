"""Flags take precedence over the environment, which does over the file. Errors name the source of a value."""

from pathlib import Path

import pytest

from tokenmill.settings.declarations import ALL, ApiSettings, ClientSettings, ServeSettings
from tokenmill.settings.errors import SettingError
from tokenmill.settings.sources import Settings, SettingsFile, find_file


def write_file(directory: Path, text: str) -> SettingsFile:
    file = directory / "tokenmill.toml"
    file.write_text(text)
    return SettingsFile(file, ALL)


def test_flags_precede_the_environment_and_the_environment_the_file(tmp_path: Path) -> None:
    file = write_file(tmp_path, 'port = 1\nhost = "h1"\nmodel = "m1"\n')
    environ = {"TOKENMILL_PORT": "2", "TOKENMILL_HOST": "h2"}

    settings = ServeSettings.load(environ, {"port": "3"}, file)

    assert (settings.port, settings.host, settings.model) == (3, "h2", "m1")
    assert ServeSettings.load(environ, {"port": None}, file).port == 2


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_variable_is_not_set(tmp_path: Path, text: str) -> None:
    """Compose passes every variable on, `${NAME:-}`, whether the user has set it or not."""
    environ = dict.fromkeys((one.variable for one in ALL.values()), text)

    assert ServeSettings.load(environ, {}, write_file(tmp_path, "port = 1\n")).port == 1
    assert ServeSettings.load(environ) == ServeSettings()


def test_a_value_is_read_without_the_spaces_around_it() -> None:
    environ = {"TOKENMILL_MODEL": " m ", "TOKENMILL_PORT": " 1 "}

    settings = ServeSettings.load(environ)

    assert (settings.model, settings.port) == ("m", 1)


def test_the_constructor_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_PORT", "1")
    monkeypatch.setenv("PORT", "1")

    assert ApiSettings().port == 8000


def test_only_what_is_set_is_passed_to_other_processes(tmp_path: Path) -> None:
    file = write_file(tmp_path, "chunked_prefill = false\nlease_seconds = 2.5\nmax_num_seqs = 8\n")

    settings = ServeSettings.load({"REDIS_URL": "redis://h:1/0"}, {"grace_seconds": "3.0"}, file)

    assert settings.to_environment() == {
        "REDIS_URL": "redis://h:1/0",
        "TOKENMILL_CHUNKED_PREFILL": "false",
        "TOKENMILL_GRACE_SECONDS": "3",
        "TOKENMILL_LEASE_SECONDS": "2.5",
        "TOKENMILL_MAX_NUM_SEQS": "8",
    }
    assert ServeSettings.load({}).to_environment() == {}


def test_another_process_reads_what_was_passed_to_it() -> None:
    environ = {"TOKENMILL_LEASE_SECONDS": "1e9", "TOKENMILL_DETERMINISTIC": "Yes", "TOKENMILL_MODEL": "/m/x"}
    settings = ServeSettings.load(environ)

    assert ServeSettings.load(settings.to_environment()) == settings


def test_a_byte_order_mark_before_the_file_is_skipped(tmp_path: Path) -> None:
    assert write_file(tmp_path, "\ufeffport = 1\n").values == {"port": 1}


@pytest.mark.parametrize("url", ["http://host", "https://host:8443/prefix", "http://[::1]:8000/"])
def test_an_http_address_is_kept_unchanged(url: str) -> None:
    assert ClientSettings.load({}, {"url": url}).url == url


@pytest.mark.parametrize(
    ("flags", "environ", "text", "message"),
    [
        ({"port": "http"}, {}, "", "--port must be a whole number from 0 to 65535, not 'http'"),
        ({"port": ""}, {}, "", "--port must be a whole number from 0 to 65535, not ''"),
        ({"host": ""}, {}, "", "--host must be text that is not empty, not ''"),
        (
            {},
            {"TOKENMILL_PORT": "8e3"},
            "",
            "TOKENMILL_PORT must be a whole number from 0 to 65535, not '8e3'",
        ),
        (
            {},
            {},
            "lease_seconds = 'long'",
            "tokenmill.toml: lease_seconds must be a number from 0.5 to 1000000000, not 'long'",
        ),
        ({}, {}, "chunked_prefill = 'maybe'", "chunked_prefill must be true or false, not 'maybe'"),
        ({}, {}, "port = [1]", "port must be a whole number from 0 to 65535, not '[1]'"),
        ({}, {}, "port = true", "port must be a whole number from 0 to 65535, not 'true'"),
        (
            {},
            {"TOKENMILL_MAX_STREAMS": "0"},
            "",
            "TOKENMILL_MAX_STREAMS must be a whole number of at least 1",
        ),
        ({"max_streams": "300"}, {}, "", "TOKENMILL_MAX_STREAMS must be below TOKENMILL_HTTP_THREADS (256)"),
        ({}, {}, "http_threads = 224", "TOKENMILL_MAX_STREAMS must be below TOKENMILL_HTTP_THREADS (224)"),
        ({"device": "gpu"}, {}, "", "--device must be auto or cpu or cuda, not 'gpu'"),
        ({}, {"REDIS_URL": "u:secret@h"}, "", "REDIS_URL must be an address that starts with redis://,"),
    ],
)
def test_a_wrong_value_is_named_with_its_source(
    tmp_path: Path, flags: dict[str, str], environ: dict[str, str], text: str, message: str
) -> None:
    with pytest.raises(SettingError) as raised:
        ServeSettings.load(environ, flags, write_file(tmp_path, text))

    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "environ", "text", "message"),
    [
        ({"url": "127.0.0.1:8000"}, {}, "", "--url must be an address that starts with http://"),
        ({}, {"TOKENMILL_URL": "ftp://host"}, "", "TOKENMILL_URL must be an address"),
        ({}, {}, 'url = "http://"', "tokenmill.toml: url must be an address"),
        ({"url": "http://host:99999"}, {}, "", "--url must be an address"),
        ({"url": "http://[::1"}, {}, "", "--url must be an address"),
    ],
)
def test_a_wrong_address_is_named_with_its_source(
    tmp_path: Path, flags: dict[str, str], environ: dict[str, str], text: str, message: str
) -> None:
    with pytest.raises(SettingError) as raised:
        ClientSettings.load(environ, flags, write_file(tmp_path, text))

    assert message in str(raised.value)


def test_the_first_source_of_a_value_is_named(tmp_path: Path) -> None:
    file = write_file(tmp_path, "port = 1\n")

    with pytest.raises(SettingError, match=r"^TOKENMILL_PORT must be"):
        ServeSettings.load({"TOKENMILL_PORT": "x"}, {}, file)
    assert ServeSettings.load({"TOKENMILL_PORT": "x"}, {"port": "2"}, file).port == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "unknown setting prot; did you mean port? (`tokenmill serve --help` lists all of them)"),
        ("port = ", "tokenmill.toml: not TOML"),
        (f"port = {'1' * 5000}", "tokenmill.toml: not TOML"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingError) as raised:
        write_file(tmp_path, text)

    assert message in str(raised.value)


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    assert find_file(None, tmp_path) is None
    missing = find_file(str(tmp_path / "other.toml"), tmp_path)
    assert missing is not None
    with pytest.raises(SettingError, match=r"other\.toml: No such file"):
        SettingsFile(missing, ALL)


def test_the_file_of_the_directory_is_found(tmp_path: Path) -> None:
    file = write_file(tmp_path, "")

    assert find_file(None, tmp_path) == file.path


def test_a_settings_class_need_not_use_setting() -> None:
    class Small(Settings):
        port: int = 1

    assert Small.load({"TOKENMILL_PORT": "2"}).port == 2
