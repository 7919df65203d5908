"""All checks in the order in which a service needs things."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tokenmill.client.sync_client import Client
from tokenmill.doctor.device import check_device
from tokenmill.doctor.finding import Finding, fail, ok, warn
from tokenmill.doctor.installation import check_installation
from tokenmill.doctor.machine import check_clock, check_directories, check_ports
from tokenmill.doctor.model_files import check_model
from tokenmill.doctor.redis_server import check_redis
from tokenmill.serve.state_directory import StateDirectory
from tokenmill.settings.declarations import VARIABLES, ServeSettings
from tokenmill.settings.errors import SettingError
from tokenmill.settings.unknown import warnings

LoadSettings = Callable[[], ServeSettings]
_READY_SECONDS = 5.0


def examine(load: LoadSettings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Each finding as soon as it is known. `load` raises `SettingError`."""
    yield from check_installation()
    yield from (
        warn("settings", text, "correct or unset the variable") for text in warnings(environ, VARIABLES)
    )
    try:
        settings = load()
        settings.check_files()
    except SettingError as error:
        yield fail("settings", str(error), "correct it; docs/settings.md lists all settings")
        return
    yield _chosen(settings)
    yield from _examine_machine(settings, environ)


def _chosen(settings: ServeSettings) -> Finding:
    names = sorted(settings.model_fields_set)
    return ok("settings", f"{len(names)} set: {', '.join(names)}" if names else "all at their defaults")


def _examine_machine(settings: ServeSettings, environ: Mapping[str, str]) -> Iterator[Finding]:
    state = StateDirectory(Path(settings.state_dir))
    running = state.address("api-url")
    own_redis = state.address("redis-url")
    is_named = "redis_url" in settings.model_fields_set
    yield from check_redis(settings.redis_url if is_named else own_redis)
    device = check_device(settings.device, environ)
    yield from device.findings
    yield from check_model(
        settings.model,
        dtype="stored" if device.is_cuda and settings.dtype == "auto" else settings.dtype,
        cache_dir=Path(settings.cache_dir),
        environ=environ,
        # A running service already holds the model.
        available=None if running else device.free_bytes,
    )
    yield from check_ports(settings, is_running=running is not None)
    yield from check_directories(settings)
    yield from check_clock()
    if running:
        yield _service(running)


def _service(url: str) -> Finding:
    with Client(url, api_key="", timeout=_READY_SECONDS, max_retries=0) as client:
        if client.is_ready():
            return ok("service", f"ready at {url}")
    return warn("service", f"{url} is not ready", f"wait until it has loaded, or see {url}/readyz")
