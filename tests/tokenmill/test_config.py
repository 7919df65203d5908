"""Settings: flag > environment > file, and an error that names the place of what cannot be used."""

from collections.abc import Callable
from pathlib import Path

import pytest

from api.settings import ApiSettings, SettingError
from engine.config import EngineConfig
from engine.execution.build import CUDA_LIMITS
from tests.settings_read import variables_of
from tokenmill.config import BY_NAME, SETTINGS, ConfigError, find_file, read_file, resolve, to_environment
from worker.errors import SettingsError
from worker.settings import Timing, WorkerSettings

ROOT = Path(__file__).parent.parent.parent
TEXTS = (
    "-3", "-1", "-0.1", "0", "0.49", "0.5", "0.999", "1", " 1 ", "1.5", "2", "16", "225", "255", "256", "300",
    "1023", "1024", "9400", "65535", "65536", "99999", "2147483647", "2147483648", "1e9", "1000000001",
    "1e10", "1e400", "nan", "inf", "-inf", "", " ", "1 day", "1_0", "0x10", "true", "No", "maybe", "fifo",
    "skip_ahead",
)  # fmt: skip


def written(directory: Path, text: str) -> Path:
    file = directory / "tokenmill.toml"
    file.write_text(text)
    return file


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, 'port = 1\nhost = "h1"\nmodel = "m1"\n')
    environ = {"TOKENMILL_PORT": "2", "TOKENMILL_HOST": "h2"}

    assert resolve({"port": "3"}, environ, file) == {"port": "3", "host": "h2", "model": "m1"}
    assert resolve({"port": None}, environ, file)["port"] == "2"


def test_an_empty_variable_is_not_set(tmp_path: Path) -> None:
    file = written(tmp_path, "port = 1\n")

    assert resolve({}, {"TOKENMILL_PORT": ""}, file) == {"port": "1"}


def test_what_is_set_nowhere_is_left_to_the_rooms() -> None:
    assert resolve({}, {}) == {}


def test_the_redis_url_has_the_name_that_others_use() -> None:
    resolved = resolve({}, {"REDIS_URL": "redis://h:1/0"})

    assert to_environment(resolved) == {"REDIS_URL": "redis://h:1/0"}


def test_values_of_a_file_become_text(tmp_path: Path) -> None:
    file = written(tmp_path, "chunked_prefill = false\nlease_seconds = 2.5\nmax_num_seqs = 8\n")

    assert resolve({}, {}, file) == {"chunked_prefill": "0", "lease_seconds": "2.5", "max_num_seqs": "8"}


def test_a_byte_order_mark_before_the_file_is_skipped(tmp_path: Path) -> None:
    file = written(tmp_path, "\ufeffport = 1\n")

    assert resolve({}, {}, file) == {"port": "1"}


@pytest.mark.parametrize("url", ["http://host", "https://host:8443/prefix", "http://[::1]:8000/"])
def test_an_http_address_is_kept_as_it_is(url: str) -> None:
    assert resolve({"url": url}, {}) == {"url": url}


@pytest.mark.parametrize(
    ("flags", "environ", "text", "told"),
    [
        ({"port": "http"}, {}, "", "--port: port must be a whole number from 0 to 65535, not 'http'"),
        (
            {},
            {"TOKENMILL_PORT": "8e3"},
            "",
            "TOKENMILL_PORT: port must be a whole number from 0 to 65535, not '8e3'",
        ),
        (
            {},
            {},
            "lease_seconds = 'long'",
            "tokenmill.toml: lease_seconds must be a number from 0.5 to 1000000000, not 'long'",
        ),
        ({}, {}, "chunked_prefill = 'maybe'", "chunked_prefill must be true or false, not 'maybe'"),
        ({}, {}, "port = [1]", "port must be a whole number from 0 to 65535, not '[1]'"),
        ({}, {"TOKENMILL_PORT": "99999"}, "", "TOKENMILL_PORT: port must be a whole number from 0 to 65535"),
        ({}, {"TOKENMILL_PORT": "-1"}, "", "TOKENMILL_PORT: port must be"),
        ({}, {"TOKENMILL_GRACE_SECONDS": "nan"}, "", "TOKENMILL_GRACE_SECONDS: grace_seconds must be"),
        ({}, {"TOKENMILL_HTTP_GRACE_SECONDS": "1e400"}, "", "TOKENMILL_HTTP_GRACE_SECONDS: http_grace"),
        ({"max_streams": "300"}, {}, "", "TOKENMILL_MAX_STREAMS must be below TOKENMILL_HTTP_THREADS (256)"),
        ({}, {}, "http_threads = 224", "TOKENMILL_MAX_STREAMS must be below TOKENMILL_HTTP_THREADS (224)"),
        (
            {},
            {},
            "prot = 1",
            "unknown setting prot; did you mean port? (`tokenmill serve --help` lists all of them)",
        ),
        ({}, {}, "port = ", "tokenmill.toml: not TOML"),
        ({"url": "127.0.0.1:8000"}, {}, "", "--url: url must be an address that starts with http://"),
        ({}, {"TOKENMILL_URL": "ftp://host"}, "", "TOKENMILL_URL: url must be an address"),
        ({}, {}, 'url = "http://"', "tokenmill.toml: url must be an address"),
        ({"url": "http://host:99999"}, {}, "", "--url: url must be an address"),
        ({"url": "http://[::1"}, {}, "", "--url: url must be an address"),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, flags: dict[str, str], environ: dict[str, str], text: str, told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(flags, environ, written(tmp_path, text))

    assert told in str(raised.value)


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    assert find_file(None, tmp_path) is None
    missing = find_file(str(tmp_path / "other.toml"), tmp_path)
    assert missing is not None
    with pytest.raises(ConfigError, match=r"other\.toml: No such file"):
        read_file(missing)


def test_the_file_of_the_directory_is_found(tmp_path: Path) -> None:
    file = written(tmp_path, "")

    assert find_file(None, tmp_path) == file


def test_the_table_names_exactly_what_the_rooms_read() -> None:
    """A setting that a room gains is a flag, a line in the file and a row of the README, or this fails."""
    read = variables_of(ApiSettings.from_env) | variables_of(WorkerSettings.from_env)
    own = {"TOKENMILL_STATE_DIR", "TOKENMILL_URL", "TOKENMILL_API_KEY", "TOKENMILL_WORKERS"}

    assert {setting.variable for setting in SETTINGS} - own == read


def is_taken(read: Callable[[], object]) -> bool:
    try:
        read()
    except (ConfigError, SettingError, SettingsError):
        return False
    return True


@pytest.mark.parametrize(
    "variable", [s.variable for s in SETTINGS if s.kind in (int, float, bool) or s.name == "policy"]
)
def test_the_table_refuses_exactly_what_the_rooms_refuse(variable: str) -> None:
    """So it is told before anything starts, and nothing is told that a room would have taken."""
    rooms = [room for room in (ApiSettings, WorkerSettings) if variable in variables_of(room.from_env)]
    for text in TEXTS:
        by_rooms = {is_taken(lambda: room.from_env({variable: text})) for room in rooms}  # noqa: B023 - called at once
        assert {is_taken(lambda: resolve({}, {variable: text}))} == by_rooms, text  # noqa: B023 - called at once


def test_the_defaults_that_are_told_are_those_of_the_rooms() -> None:
    told = {name: setting.default for name, setting in BY_NAME.items() if setting.kind in (int, float)}
    rooms = [ApiSettings.from_env({}), WorkerSettings.from_env({}), Timing()]
    engine = EngineConfig(max_model_len=2, num_kv_blocks=1)
    chosen_at_load = {
        "max_model_len",
        "num_kv_blocks",
        "max_num_prefill_seqs",
        "max_chunk_tokens",
    }

    on_cuda = {name: told[name] for name in told if told[name].endswith(" on CUDA")}
    assert on_cuda == {
        name: f"{getattr(engine, name)}; {value} on CUDA" for name, value in CUDA_LIMITS.items()
    }
    for name, default in told.items():
        if name in on_cuda:
            continue
        values = [getattr(room, name) for room in rooms if hasattr(room, name)]
        if not values and name not in chosen_at_load:
            values = [getattr(engine, name)]
        assert {float(value) for value in values} <= {float(default) if values else None}, name


def test_the_readme_has_every_setting() -> None:
    readme = (ROOT / "README.md").read_text()

    assert [s.variable for s in SETTINGS if f"`{s.variable}`" not in readme] == []
