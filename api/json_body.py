"""Bytes of a body to plain JSON values, or a problem.

Law: what comes out can be stored, hashed and printed as UTF-8 JSON again: no NaN, no infinity, no lone
surrogate, no duplicate name, no nesting that a recursive encoder could fall over. Knows no field.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from flask import Request
from werkzeug.exceptions import RequestEntityTooLarge

from api.presence import silence_limit
from api.problems import Problem, shown

BODY_SILENCE_SECONDS = 10.0
"""A client that sends nothing for so long in the middle of a body is not waited for."""
DISCARD_BYTES = 64 * 1024 * 1024
DISCARD_CHUNK = 64 * 1024
DISCARD_SECONDS = 2.0

MAX_DEPTH = 104
"""Of one field. A JSON schema may be nested 100 deep, as its text may be."""
MAX_NAMES = 256
"""Fields of the body itself; each unknown one would otherwise cost an error of its own."""


class JsonRequest(Request):
    """A request whose JSON is an object that keeps the law above."""

    def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> dict[str, Any]:  # noqa: ARG002 - the base class's signature
        """The body. Raises `Problem` whatever `silent` says: a bad body is never taken for an absent one."""
        if not self.is_json:
            raise Problem(415, "unsupported_media_type", "send the body as `Content-Type: application/json`")
        if self.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            raise Problem(415, "unsupported_encoding", "send the body without `Content-Encoding`")
        with silence_limit(self.environ, BODY_SILENCE_SECONDS):
            return parse_object(self._read(cache))

    def _read(self, cache: bool) -> bytes:
        try:
            body = self.get_data(cache=cache)
            if self._goes_on():
                raise RequestEntityTooLarge
        except RequestEntityTooLarge:
            discard_body(self.environ)
            detail = f"the body may have at most {self.max_content_length} bytes"
            raise Problem(413, "body_too_large", detail, param="body") from None
        except Exception as error:
            # Each server has errors of its own for a body that is wrongly framed.
            raise _unreadable(error) from error
        if self.content_length is not None and len(body) < self.content_length:
            detail = f"the body ends after {len(body)} of {self.content_length} bytes"
            raise Problem(400, "unreadable_body", detail, param="body")
        return body

    def _goes_on(self) -> bool:
        """A body that named no length is cut at the limit in silence: is there more of it?"""
        if self.content_length is not None or not self.environ.get("wsgi.input_terminated"):
            return False
        return bool(self.environ["wsgi.input"].read(1))


def discard_body(environ: Mapping[str, Any]) -> None:
    """Take what else is sent, within bounds: most clients read no answer before they have sent all.

    Never raises: servers have errors of their own for a body that is wrongly framed.
    """
    until = time.monotonic() + DISCARD_SECONDS
    with contextlib.suppress(Exception), silence_limit(environ, DISCARD_SECONDS):
        for _ in range(DISCARD_BYTES // DISCARD_CHUNK):
            if not environ["wsgi.input"].read(DISCARD_CHUNK) or time.monotonic() > until:
                return


def _unreadable(error: Exception) -> Problem:
    if isinstance(error.__context__, TimeoutError) or isinstance(error, TimeoutError):
        detail = f"nothing more of the body came for {BODY_SILENCE_SECONDS:g} seconds"
        return Problem(408, "body_timeout", detail, param="body")
    return Problem(400, "unreadable_body", f"the body cannot be read: {error}", param="body")


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises `Problem` (400)."""
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_float
        )
    except UnicodeDecodeError:
        raise _bad("the body is not UTF-8") from None
    except RecursionError:
        raise _bad(f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise _bad(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _bad("the body must be a JSON object")
    if len(value) > MAX_NAMES:
        raise _bad(f"the body has more than {MAX_NAMES} fields")
    _check(value)
    return value


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
