"""What a room reads of the environment, found by letting it read. Knows no setting."""

from collections.abc import Callable, Mapping


class Recorder(dict[str, str]):
    """An empty environment that remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override]  # a dict's, but recorded
        self.asked.add(key)
        return default


def variables_of(from_env: Callable[[Mapping[str, str]], object]) -> set[str]:
    """The names of all variables that `from_env` reads."""
    environment = Recorder()
    from_env(environment)
    return environment.asked
