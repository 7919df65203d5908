"""Where the values of settings come from: flags, then environment variables, then a TOML file.

Every value arrives as text and is checked by the type of its field, whatever its source.
"""

import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from tokenmill.protocol.redis_url import hide_password
from tokenmill.settings.errors import SettingError
from tokenmill.settings.setting import Setting, settings_of, to_text
from tokenmill.settings.unknown import nearest

DEFAULT_FILE = "tokenmill.toml"


class Source(PydanticBaseSettingsSource):
    """Values by name of the setting. `label` returns how the source calls a setting, for error messages."""

    def __init__(
        self,
        settings_class: type[BaseSettings],
        values: Mapping[str, object],
        label: Callable[[Setting], str],
    ) -> None:
        super().__init__(settings_class)
        self.values = values
        self.label = label

    def get_field_value(
        self,
        field: FieldInfo,  # noqa: ARG002 - the signature of the base class
        field_name: str,
    ) -> tuple[Any, str, bool]:
        value = self.values.get(field_name)
        return None if value is None else to_text(value).strip(), field_name, False

    def __call__(self) -> dict[str, Any]:
        fields = self.settings_cls.model_fields
        texts = {name: self.get_field_value(field, name)[0] for name, field in fields.items()}
        return {name: text for name, text in texts.items() if text is not None}


class Settings(BaseSettings):
    """Base class of settings. The constructor takes values and reads no source; `load` reads all."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=False
    )

    @classmethod
    def load(
        cls,
        environ: Mapping[str, str],
        flags: Mapping[str, object] | None = None,
        file: "SettingsFile | None" = None,
    ) -> Self:
        """The settings of this class. An empty environment variable and a flag that is None are not set.

        Raises `SettingError`.
        """
        declared = settings_of(cls)
        variables = {name: environ.get(one.variable, "").strip() or None for name, one in declared.items()}
        sources = [
            Source(cls, flags or {}, lambda one: one.flag),
            Source(cls, variables, lambda one: one.variable),
        ]
        if file:
            sources.append(Source(cls, file.values, lambda one: f"{file.path}: {one.name}"))
        # Documented by pydantic-settings, but not a parameter to type checkers, which see the fields.
        arguments: dict[str, Any] = {"_build_sources": (tuple(sources), {})}
        try:
            return cls(**arguments)
        except ValidationError as error:
            raise SettingError(_message(error, declared, sources)) from None

    def to_environment(self) -> dict[str, str]:
        """Environment variables that hand the settings to another process; defaults are left out."""
        declared = settings_of(type(self))
        return {declared[name].variable: to_text(getattr(self, name)) for name in self.model_fields_set}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the signature of the base class
        init_settings: PydanticBaseSettingsSource,
        *_: Any,
        **__: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class SettingsFile:
    """A TOML file of settings.

    Raises `SettingError` if the file cannot be read, is not TOML, or names a setting that is not in `known`.
    """

    def __init__(self, path: Path, known: Collection[str]) -> None:
        self.path = path
        self.values = _read_toml(path)
        if unknown := sorted(self.values.keys() - set(known)):
            names = ", ".join(name + nearest(name, known) for name in unknown)
            raise SettingError(
                f"{path}: unknown setting {names} (`tokenmill serve --help` lists all of them)"
            )


def find_file(named: str | None, directory: Path) -> Path | None:
    """The file named by --config, else `tokenmill.toml` in `directory` if it exists."""
    if named:
        return Path(named)
    default = directory / DEFAULT_FILE
    return default if default.is_file() else None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        # Editors on Windows write a byte order mark, which `tomllib` refuses.
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingError(f"{path}: {error.strerror}") from error
    # TOMLDecodeError, UnicodeDecodeError, or a number with too many digits.
    except ValueError as error:
        raise SettingError(f"{path}: not TOML: {error}") from error


def _message(error: ValidationError, declared: Mapping[str, Setting], sources: Collection[Source]) -> str:
    """One line for the first setting that is wrong."""
    first = error.errors(include_url=False)[0]
    # The message of the field's own validator, if it has one.
    reason = first.get("ctx", {}).get("error")
    if not first["loc"]:
        return str(reason)
    setting = declared[str(first["loc"][0])]
    label = next(source.label(setting) for source in sources if source.values.get(setting.name) is not None)
    message = f"{label} must be {reason or setting.allowed}"
    if setting.is_secret:
        return message
    text = str(first["input"])
    return f"{message}, not {(hide_password(text) if setting.is_address else text)!r}"
