"""Bytes of a body to plain JSON values, or a problem.

Law: what comes out can be stored, hashed and printed as UTF-8 JSON again: no NaN, no infinity, no lone
surrogate, no duplicate name, no nesting that a recursive encoder could fall over. Knows no field.
"""

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from flask import Request
from werkzeug.exceptions import RequestEntityTooLarge

from api.problems import Problem, shown

MAX_DEPTH = 104
"""Of one field. A JSON schema may be nested 100 deep, as its text may be."""
MAX_NAMES = 256
"""Fields of the body itself; each unknown one would otherwise cost an error of its own."""


_CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")
_NOT_UTF8 = (
    (b"\x1f\x8b", "compressed (gzip)"),
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


class JsonRequest(Request):
    """A request whose JSON is an object that keeps the law above."""

    def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> dict[str, Any]:  # noqa: ARG002 - the base class's signature
        """The body. Raises `Problem` whatever `silent` says: a bad body is never taken for an absent one."""
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
            detail = f"Content-Encoding {shown(encoding)} is not supported; send the body uncompressed"
            headers = {"Accept-Encoding": "identity"}
            raise Problem(415, "unsupported_encoding", detail, param="Content-Encoding", headers=headers)
        charset = self.mimetype_params.get("charset", "utf-8")
        if charset.lower() not in _CHARSETS:
            detail = f"charset {shown(charset)} is not supported; send the body as UTF-8"
            raise Problem(415, "unsupported_charset", detail, param="Content-Type")


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises `Problem` (400)."""
    try:
        value = json.loads(
            _text(body),
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=_float,
            parse_int=_integer,
        )
    except RecursionError:
        raise _bad(f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise _bad(f"the body is not valid JSON: {place}") from None
    if not isinstance(value, dict):
        raise _bad("the body must be a JSON object")
    if len(value) > MAX_NAMES:
        raise _bad(f"the body has more than {MAX_NAMES} fields")
    _check(value)
    return value


def _text(body: bytes) -> str:
    """The body as text; a byte order mark of UTF-8 is skipped, as RFC 8259 allows. Raises `Problem` (400)."""
    other = next((name for start, name in _NOT_UTF8 if body.startswith(start)), None)
    # JSON begins with two ASCII characters: in UTF-16 and UTF-32 a zero byte is among their first bytes.
    if other is None and b"\0" in body[:4]:
        other = "UTF-16 or UTF-32"
    if other is not None:
        raise _bad(f"the body is {other}; send JSON as UTF-8 text")
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8 (byte {error.start})") from None


def _bad(detail: str) -> Problem:
    return Problem(400, "invalid_json", detail)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = _printable(_first_repeated(name for name, _ in pairs))
        raise Problem(400, "invalid_json", f"{twice} is given twice", param=twice)
    return values


def _first_repeated(names: Iterable[str]) -> str:
    seen: set[str] = set()
    # `add` gives None, so the test remembers each name that it lets pass.
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def _no_constant(name: str) -> NoReturn:
    raise _bad(f"{name} is no JSON number")


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        # Python converts no more than some thousand digits.
        raise _bad(f"{shown(digits)} is too large a number") from None


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _bad(f"{shown(digits)} is too large a number")
    return value


def _check(body: dict[str, Any]) -> None:
    """Strings and depth, field by field, without recursion."""
    for name, value in body.items():
        _check_text(name, name)
        level = [value]
        for _ in range(MAX_DEPTH):
            level = _inner(level, name)
            if not level:
                break
        else:
            raise Problem(400, "invalid_json", f"{name} is nested deeper than {MAX_DEPTH} levels", param=name)


def _inner(level: list[Any], field: str) -> list[Any]:
    """Check the texts of one level of nesting, and give the values of the next."""
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
        detail = f"{param}: half of a surrogate pair stands alone; it is no text"
        raise Problem(400, "invalid_value", detail, param=param) from None


def _printable(name: str) -> str:
    return shown(name).encode("utf-8", "backslashreplace").decode()
