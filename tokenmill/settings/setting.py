"""How a setting is declared, and what its declaration says to readers: flags, documentation, error messages.

A setting has one name: the field `max_num_seqs` is the flag `--max-num-seqs`, the environment variable
`TOKENMILL_MAX_NUM_SEQS` and the key `max_num_seqs` of the settings file.
"""

from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel, Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

PREFIX = "TOKENMILL_"
_STANDARD_VARIABLES = {"redis_url": "REDIS_URL"}
"""Variables that other programs read under the same name."""


class Purpose(Enum):
    """Headings of the table of settings, in order."""

    MODEL = "Model"
    EXECUTION = "Execution"
    SCHEDULING = "Batching and scheduling"
    TASKS = "Tasks"
    WORKER = "Worker process"
    HTTP = "HTTP API"
    FILES = "Files and batches"
    ACCESS = "API keys and webhooks"
    SERVICE = "Service and commands"


def setting(
    default: object,
    help_text: str,
    purpose: Purpose,
    *,
    shown: str = "",
    secret: bool = False,
) -> Any:
    """Declare a field of a settings class.

    `shown`: the default in words, where the value alone says too little. `secret`: the value appears in no
    message. The type of the field holds its range.
    """
    about: JsonDict = {"purpose": purpose.value, "shown": shown}
    return Field(default, description=help_text, repr=not secret, json_schema_extra=about)


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting, for readers."""

    name: str
    field: FieldInfo

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return _STANDARD_VARIABLES.get(self.name, PREFIX + self.name.upper())

    @property
    def help_text(self) -> str:
        return self.field.description or ""

    @property
    def purpose(self) -> Purpose:
        return Purpose(self._about("purpose"))

    @property
    def is_secret(self) -> bool:
        return not self.field.repr

    @property
    def is_address(self) -> bool:
        """Whether the value is a URL, which may hold a password."""
        return self.name.endswith("url")

    @property
    def shown_default(self) -> str:
        return self._about("shown") or to_text(self.field.default)

    @property
    def kind(self) -> object:
        """The type without None: `int`, `float`, `bool`, `str` or a `Literal`."""
        kinds = [kind for kind in get_args(self.field.annotation) if kind is not NoneType]
        return (
            self.field.annotation if get_origin(self.field.annotation) is Literal or not kinds else kinds[0]
        )

    @property
    def words(self) -> tuple[str, ...]:
        """The words to choose from; empty for any other type."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def allowed(self) -> str:
        """The values that can be used, for people: "a whole number from 1 to 256"."""
        if self.words:
            return " or ".join(self.words)
        if self.kind not in (int, float):
            return "true or false" if self.kind is bool else "text that is not empty"
        number = "a whole number" if self.kind is int else "a number"
        minimum = next((limit.ge for limit in self.field.metadata if isinstance(limit, Ge)), None)
        maximum = next((limit.le for limit in self.field.metadata if isinstance(limit, Le)), None)
        return (
            f"{number} of at least {minimum}" if maximum is None else f"{number} from {minimum} to {maximum}"
        )

    def _about(self, key: str) -> str:
        extra = self.field.json_schema_extra
        return str(extra[key]) if isinstance(extra, dict) else ""


def settings_of(*classes: type[BaseModel]) -> dict[str, Setting]:
    """All settings of the classes by name."""
    return {name: Setting(name, field) for each in classes for name, field in each.model_fields.items()}


def to_text(value: object) -> str:
    """A value as an environment variable carries it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
