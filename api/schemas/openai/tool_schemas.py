"""The JSON schema of a list of tool calls, for requests that require one."""

from collections.abc import Sequence
from typing import Any

from api.problems import bad_field

_DEFINITIONS = ("$defs", "definitions")


def all_calls_schema(
    functions: Sequence[tuple[str, dict[str, Any] | None]], *, parallel: bool
) -> dict[str, Any]:
    """A list of one or more calls `{"name", "parameters"}`; exactly one without `parallel`.

    `functions`: names and schemas of parameters. Their `$defs` are moved to the root, where `$ref` finds
    them. Raises `Problem` (400) if two functions define a name differently.
    """
    root: dict[str, Any] = {}
    calls = []
    for name, parameters in functions:
        own = dict(parameters or {"type": "object"})
        for member in _DEFINITIONS:
            _merge(root, member, own.pop(member, {}))
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": own},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    length = {"minItems": 1} if parallel else {"minItems": 1, "maxItems": 1}
    return {**root, "type": "array", **length, "items": {"anyOf": calls}}


def _merge(root: dict[str, Any], member: str, definitions: Any) -> None:
    if not isinstance(definitions, dict):
        raise bad_field("tools", f"{member} must be an object")
    for name, definition in definitions.items():
        known = root.setdefault(member, {})
        if known.setdefault(name, definition) != definition:
            raise bad_field("tools", f"two functions define {name[:128]!r} differently")
