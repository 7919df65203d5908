"""Closes the objects of JSON schemas, as vLLM's default backend, llama.cpp and OpenAI's strict mode do.

By JSON Schema's rule an object may have any further members. People do not mean that of an answer, and a
small model writes members until its tokens run out.
"""

from collections.abc import Iterator
from typing import Any

_ONE = ("items", "contains", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")
_SAYS_SO = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})
_JOINING = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"})
"""Keywords whose schemas apply to the same object as the `properties` beside them."""


def closed(schema: Any) -> Any:
    """A copy in which objects have no members besides their `properties`, unless they say so.

    Objects whose members several schemas describe together stay open: closed, no value would fit them all.
    """
    may_close_definitions = not any(_joins(part) for part in _objects(schema))
    return _closed(schema, (*_MAPPINGS, *_DEFINITIONS) if may_close_definitions else _MAPPINGS)


def _closed(schema: Any, mappings: tuple[str, ...]) -> Any:
    if not isinstance(schema, dict):
        return schema
    joins = _joins(schema)
    result = {
        name: value if joins and name in _LISTS else _closed_below(name, value, mappings)
        for name, value in schema.items()
    }
    if isinstance(schema.get("properties"), dict) and not joins and not _SAYS_SO & schema.keys():
        result["additionalProperties"] = False
    return result


def _closed_below(name: str, value: Any, mappings: tuple[str, ...]) -> Any:
    """The value of the keyword `name` with the schemas in it closed."""
    if name in mappings and isinstance(value, dict):
        return {key: _closed(one, mappings) for key, one in value.items()}
    if name in _LISTS and isinstance(value, list):
        return [_closed(one, mappings) for one in value]
    return _closed(value, mappings) if name in _ONE else value


def _joins(schema: dict[str, Any]) -> bool:
    """Whether several schemas describe the members of one object."""
    all_of = schema.get("allOf")
    is_joined = isinstance(all_of, list) and len(all_of) > 1
    return is_joined or ("properties" in schema and bool(_JOINING & schema.keys()))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """`value` and everything below it that is an object."""
    below = [value]
    while below:
        part = below.pop()
        if isinstance(part, dict):
            yield part
            below.extend(part.values())
        elif isinstance(part, list):
            below.extend(part)
