"""Parses the JSON body of a request into plain values.

Invariants: the result can be stored, hashed and printed as UTF-8 JSON again. It has no NaN, infinity, lone
surrogate or duplicate name, and no nesting that would overflow a recursive encoder.
"""

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from flask import Request
from werkzeug.exceptions import RequestEntityTooLarge

from api.problems import Problem, excerpt

MAX_DEPTH = 104
"""Nesting of one field. `structured_outputs` allows a JSON schema 100 levels deep."""
MAX_FIELDS = 256
"""Fields of the body itself: each unknown one would cost a validation error of its own."""

_CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")
_OTHER_ENCODINGS = (
    (b"\x1f\x8b", "compressed (gzip)"),
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
"""First bytes of bodies that are not UTF-8."""


class JsonRequest(Request):
    """A Flask request whose body is parsed by `parse_object`."""

    def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> dict[str, Any]:  # noqa: ARG002 - the base class's signature
        """Parse the body. Raises `Problem` even if `silent`: a bad body is never treated as a missing one."""
        if not self.is_json:
            raise Problem(415, "unsupported_media_type", "send the body as `Content-Type: application/json`")
        self._check_encoding()
        return parse_object(self._read(cache))

    def _read(self, cache: bool) -> bytes:
        try:
            body = self.get_data(cache=cache)
        except RequestEntityTooLarge:
            detail = f"the body may have at most {self.max_content_length} bytes"
            raise Problem(413, "body_too_large", detail, param="body") from None
        if self.content_length is not None and len(body) < self.content_length:
            detail = f"the body ends after {len(body)} of {self.content_length} bytes"
            raise Problem(400, "unreadable_body", detail, param="body")
        return body

    def _check_encoding(self) -> None:
        encoding = self.headers.get("Content-Encoding", "").strip()
        if encoding.lower() not in ("", "identity"):
            detail = f"Content-Encoding {excerpt(encoding)} is not supported; send the body uncompressed"
            headers = {"Accept-Encoding": "identity"}
            raise Problem(415, "unsupported_encoding", detail, param="Content-Encoding", headers=headers)
        charset = self.mimetype_params.get("charset", "utf-8")
        if charset.lower() not in _CHARSETS:
            detail = f"charset {excerpt(charset)} is not supported; send the body as UTF-8"
            raise Problem(415, "unsupported_charset", detail, param="Content-Type")


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises `Problem` (400)."""
    try:
        value = json.loads(
            _decode(body),
            object_pairs_hook=_to_dict,
            parse_constant=_refuse_constant,
            parse_float=_to_float,
            parse_int=_to_int,
        )
    except RecursionError:
        raise _invalid(f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno}"
        raise _invalid(f"the body is not valid JSON: {position}") from None
    if not isinstance(value, dict):
        raise _invalid("the body must be a JSON object")
    if len(value) > MAX_FIELDS:
        raise _invalid(f"the body has more than {MAX_FIELDS} fields")
    _check_values(value)
    return value


def _decode(body: bytes) -> str:
    """The body as text. A UTF-8 byte order mark is skipped, as RFC 8259 allows. Raises `Problem` (400)."""
    other = next((name for start, name in _OTHER_ENCODINGS if body.startswith(start)), None)
    # JSON begins with two ASCII characters, so UTF-16 and UTF-32 have a zero byte among the first four.
    if other is None and b"\0" in body[:4]:
        other = "UTF-16 or UTF-32"
    if other is not None:
        raise _invalid(f"the body is {other}; send JSON as UTF-8 text")
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8 (byte {error.start})") from None


def _invalid(detail: str) -> Problem:
    return Problem(400, "invalid_json", detail)


def _to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        name = _printable(_first_duplicate(name for name, _ in pairs))
        raise Problem(400, "invalid_json", f"{name} appears twice", param=name)
    return values


def _first_duplicate(names: Iterable[str]) -> str:
    seen: set[str] = set()
    # `add` returns None, so the condition records each new name.
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid(f"{name} is not a JSON number")


def _to_int(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        # Python converts at most a few thousand digits.
        raise _invalid(f"{excerpt(digits)} is too large a number") from None


def _to_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _invalid(f"{excerpt(digits)} is too large a number")
    return value


def _check_values(body: dict[str, Any]) -> None:
    """Check text and depth of each field, level by level: recursion could overflow the stack."""
    for name, value in body.items():
        _check_text(name, name)
        level = [value]
        for _ in range(MAX_DEPTH):
            level = _next_level(level, name)
            if not level:
                break
        else:
            raise Problem(400, "invalid_json", f"{name} is nested deeper than {MAX_DEPTH} levels", param=name)


def _next_level(level: list[Any], field: str) -> list[Any]:
    """Check the texts of one level of nesting and return the values of the next."""
    below: list[Any] = []
    for value in level:
        if isinstance(value, str):
            _check_text(value, field)
        elif isinstance(value, list):
            below.extend(value)
        elif isinstance(value, dict):
            below.extend(value)
            below.extend(value.values())
    return below


def _check_text(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        param = _printable(field)
        detail = f"{param}: the text has a lone surrogate, which UTF-8 cannot encode"
        raise Problem(400, "invalid_value", detail, param=param) from None


def _printable(name: str) -> str:
    return excerpt(name).encode("utf-8", "backslashreplace").decode()
