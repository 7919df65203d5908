"""Checks packages, addresses and ports before anything is started."""

import errno
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import tokenmill
from tokenmill.serve.errors import CannotServe
from tokenmill.settings.declarations import ALL
from tokenmill.settings.errors import SettingError

_SERVER_FILES = ("api/submission.py", "worker/batch_worker.py")
_PORT_ERRORS = frozenset({errno.EADDRINUSE, errno.EACCES})


def check_server(directory: Path = Path(tokenmill.__file__).parent.parent) -> None:
    """Whether the packages of the server are beside this one, as the distribution tokenmill installs them.

    Their files are checked: other programs have packages of the same names. Raises `CannotServe`.
    """
    if not all((directory / file).is_file() for file in _SERVER_FILES):
        raise CannotServe(
            "the server is not installed: this is tokenmill-client, the client alone; in another environment,"
            " run pip install '.[serve]' in a checkout of Tokenmill"
        )


def check_installed(modules: Mapping[str, str]) -> None:
    """`modules`: name of a process -> a module that it needs. Raises `CannotServe`."""
    for name, module in modules.items():
        if find_spec(module) is None:
            raise CannotServe(
                f"{module} is not installed, which the {name} needs: pip install 'tokenmill[serve]'"
            )


def check_address(host: str, port: int, host_setting: str, port_setting: str) -> None:
    """Raises `SettingError` if this machine does not have `host`, `CannotServe` if `port` cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        # UnicodeError: a host name that IDNA cannot encode, such as `a..b`.
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            if getattr(error, "errno", None) in _PORT_ERRORS:
                variable = ALL[port_setting].variable
                raise CannotServe(
                    f"port {port} of {host}: {reason}; choose another with {variable}"
                ) from error
            variable = ALL[host_setting].variable
            raise SettingError(f"{variable}: {host} is not an address of this machine: {reason}") from error


def free_port() -> int:
    """A port of 127.0.0.1 on which no process listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def check_distinct(api: tuple[str, int], metrics: tuple[str, int]) -> None:
    """Raises `SettingError` if the API and the metrics cannot listen at these addresses at the same time."""
    if api[1] != metrics[1]:
        return
    first, second = (_ip_address(host) for host, _ in (api, metrics))
    has_wildcard = first.version == second.version and (first.is_unspecified or second.is_unspecified)
    if has_wildcard or first == second:
        raise SettingError(
            f"TOKENMILL_PORT and TOKENMILL_METRICS_PORT are both {api[1]}; choose another for one of them"
        )


def _ip_address(host: str) -> IPv4Address | IPv6Address:
    return ip_address(host if ":" in host else socket.gethostbyname(host))
