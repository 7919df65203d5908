"""Rules for the values of parameters. Every check raises `InvalidParameter`, which names the field.

Types are strict: true is no integer, "5" is no number, and NaN is out of every range. Other schemas of the
same parameters, such as that of the HTTP API, are derived from the rules.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import InvalidParameter

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which values a parameter may have."""

    def check(self, name: str, value: object) -> None:
        """Raises `InvalidParameter` with `name` as its field."""
        raise NotImplementedError

    def from_json(self, value: Any) -> Any:
        """Convert a JSON value to the Python value that `check` expects. Raises `InvalidParameter`."""
        return value


def parameter(default: Any, rule: Rule, description: str) -> Any:
    """A dataclass field whose metadata are its `rule` and its `description`."""
    metadata = {"rule": rule, "description": description}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boolean(Rule):
    def check(self, name: str, value: object) -> None:
        if not isinstance(value, bool):
            raise InvalidParameter(name, f"must be true or false, not {excerpt(value)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Integer(Rule):
    """`minimum` and `maximum` are allowed. `maximum` None: no limit."""

    minimum: int
    maximum: int | None = None

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidParameter(name, f"must be an integer, not {excerpt(value)}")
        if value < self.minimum or (self.maximum is not None and value > self.maximum):
            raise InvalidParameter(
                name, f"must be {_range(self.minimum, self.maximum)}, not {excerpt(value)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(Rule):
    """A finite number. `above_minimum`: `minimum` itself is not allowed. `maximum` None: no limit."""

    minimum: float
    maximum: float | None = None
    above_minimum: bool = False

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise InvalidParameter(name, f"must be a number, not {excerpt(value)}")
        try:
            # `isfinite` refuses NaN, and raises for an integer that no float can hold.
            is_valid = math.isfinite(value) and self._is_in_range(value)
        except OverflowError:
            is_valid = False
        if not is_valid:
            allowed = _range(self.minimum, self.maximum, above_minimum=self.above_minimum)
            raise InvalidParameter(name, f"must be a finite number {allowed}, not {excerpt(value)}")

    def _is_in_range(self, value: float) -> bool:
        is_high = value > self.minimum if self.above_minimum else value >= self.minimum
        return is_high and (self.maximum is None or value <= self.maximum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Rule):
    """Text that is not empty. `max_bytes`: size in UTF-8; None: no limit."""

    max_bytes: int | None = None

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, str) or not value:
            raise InvalidParameter(name, "must be text that is not empty")
        check_encoding(name, value, self.max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts(Rule):
    """A list of texts that are not empty. `max_bytes`: of all texts together, in UTF-8.

    `http_max_items`, `http_max_characters` (of one text): enforced by the HTTP API alone, where a small
    request must not cause much work. `http_accepts_text`: the HTTP API accepts one text in place of a list.
    """

    allow_empty: bool = True
    max_items: int | None = None
    max_bytes: int | None = None
    http_max_items: int
    http_max_characters: int
    http_accepts_text: bool = False

    def check(self, name: str, value: object) -> None:
        texts = _items(name, value, self.allow_empty, self.max_items)
        for text in texts:
            if not isinstance(text, str) or not text:
                raise InvalidParameter(name, "must be a list of texts that are not empty")
        check_encoding(name, "".join(map(str, texts)), self.max_bytes)

    def from_json(self, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds(Rule):
    """A list of token ids. `http_max_items`: enforced by the HTTP API alone."""

    allow_empty: bool = True
    http_max_items: int

    def check(self, name: str, value: object) -> None:
        token_ids: list[Any] = list(_items(name, value, self.allow_empty, None))
        # Lists can be as long as a vocabulary: check all at once first.
        if set(map(type, token_ids)) <= {int} and min(token_ids, default=0) >= 0:
            return
        for token_id in token_ids:
            Integer(minimum=0).check(name, token_id)

    def from_json(self, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class NumbersByTokenId(Rule):
    """A mapping from token ids to numbers. `http_max_items`: enforced by the HTTP API alone."""

    minimum: float
    maximum: float
    http_max_items: int

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise InvalidParameter(name, "must be an object that maps token ids to numbers")
        for token_id, number in value.items():
            Integer(minimum=0).check(name, token_id)
            Number(minimum=self.minimum, maximum=self.maximum).check(name, number)

    def from_json(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {int(key) if is_token_id(key) else key: number for key, number in value.items()}


def is_token_id(key: object) -> bool:
    """Whether a JSON name is a token id in digits."""
    return isinstance(key, str) and _TOKEN_ID.fullmatch(key) is not None


def check_encoding(name: str, text: str, max_bytes: int | None) -> None:
    """Refuse text that UTF-8 cannot encode, and text of more than `max_bytes`."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        # Python allows an unpaired surrogate in a str; no encoding does.
        raise InvalidParameter(
            name, f"is not valid Unicode text: unpaired surrogate at {error.start}"
        ) from error
    if max_bytes is not None and size > max_bytes:
        raise InvalidParameter(name, f"must be at most {max_bytes} bytes, not {size}")


def excerpt(value: object) -> str:
    """The beginning of `value`, for an error message."""
    try:
        return f"{value!r:.40}"
    except ValueError:  # Python refuses to print an integer of some thousand digits.
        return "a number of thousands of digits"


def _items(name: str, value: object, allow_empty: bool, max_items: int | None) -> Iterable[object]:
    if not isinstance(value, (tuple, list)):
        raise InvalidParameter(name, "must be a list")
    if not (value or allow_empty):
        raise InvalidParameter(name, "must not be empty")
    if max_items is not None and len(value) > max_items:
        raise InvalidParameter(name, f"must have at most {max_items} items")
    return value


def _range(minimum: float, maximum: float | None, *, above_minimum: bool = False) -> str:
    start = f"{'above' if above_minimum else 'at least'} {_shown(minimum)}"
    return start if maximum is None else f"{start} and at most {_shown(maximum)}"


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
