"""Checks of single values that a user gave: each raises `InvalidParameter`, which names the field.

Law: true is not 1, "5" is not 5, and NaN is in no range.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from engine.errors import InvalidParameter


def shown(value: object) -> str:
    """The beginning of `value`, as an error may show it."""
    try:
        return f"{value!r:.40}"
    except ValueError:  # Python writes out no whole number of more than some thousand digits.
        return "a number of thousands of digits"


def whole(field: str, value: object, *, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidParameter(field, f"must be a whole number, not {shown(value)}")
    if value < least or (most is not None and value > most):
        raise InvalidParameter(
            field, f"must be at least {least}" + (f" and at most {most}" if most is not None else "")
        )


def number(field: str, value: object, least: float, most: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InvalidParameter(field, f"must be a number, not {shown(value)}")
    try:
        # NaN compares false with everything, so the range alone would let it through.
        is_good = math.isfinite(value) and least <= value <= most
    except OverflowError:  # a whole number that no float holds
        is_good = False
    if not is_good:
        raise InvalidParameter(field, f"must be a finite number from {least} to {most}, not {shown(value)}")


def boolean(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidParameter(field, "must be true or false")


def items(field: str, value: object) -> Iterable[object]:
    if not isinstance(value, (tuple, list)):
        raise InvalidParameter(field, "must be a list")
    return value


def strings(field: str, value: object) -> None:
    for item in items(field, value):
        if not isinstance(item, str) or not item:
            raise InvalidParameter(field, "must be a list of strings that are not empty")


def token_ids(field: str, value: object) -> None:
    ids: list[Any] = list(items(field, value))
    # All at once first: such lists can have one item for each token of a vocabulary.
    if set(map(type, ids)) <= {int} and min(ids, default=0) >= 0:
        return
    for token_id in ids:
        whole(field, token_id, least=0)


def numbers_by_token_id(field: str, value: object, least: float, most: float) -> None:
    if not isinstance(value, Mapping):
        raise InvalidParameter(field, "must be an object of token ids and numbers")
    for token_id, bias in value.items():
        whole(field, token_id, least=0)
        number(field, bias, least, most)
