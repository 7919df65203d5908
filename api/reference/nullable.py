"""Writes optional values as OpenAPI 3.1 does: `type: [string, "null"]` instead of `anyOf` with null."""

from typing import Any

NULL = {"type": "null"}


def without_noise(value: Any) -> Any:
    """A copy of a schema or document, without generated titles, null defaults and alternatives of null."""
    if isinstance(value, list):
        return [without_noise(item) for item in value]
    if not isinstance(value, dict):
        return value
    schema = {
        name: inner if name in ("example", "examples", "default", "enum", "const") else _inner(name, inner)
        for name, inner in value.items()
    }
    if schema.get("default", ...) is None:
        del schema["default"]
    return _merged(schema) if NULL in _alternatives(schema) else schema


def _inner(name: str, value: Any) -> Any:
    """`properties` and the like have names of their own, such as `default`."""
    if name in ("properties", "schemas") and isinstance(value, dict):
        return {key: _untitled(without_noise(inner)) for key, inner in value.items()}
    return _untitled(without_noise(value)) if name in ("schema", "items") else without_noise(value)


def _untitled(schema: Any) -> Any:
    return _without(schema, "title") if isinstance(schema, dict) else schema


def _without(schema: dict[str, Any], omitted: str) -> dict[str, Any]:
    return {name: inner for name, inner in schema.items() if name != omitted}


def _alternatives(schema: dict[str, Any]) -> list[Any]:
    found = schema.get("anyOf")
    return found if isinstance(found, list) else []


def _merged(schema: dict[str, Any]) -> dict[str, Any]:
    """Null as a further type of the only other alternative; a reference keeps its `anyOf`."""
    others = [one for one in schema["anyOf"] if one != NULL]
    if len(others) > 1 and all(one.keys() == {"type"} for one in others):
        types = [one["type"] for one in others]
        return {
            "type": [*types, "null"],
            **{name: inner for name, inner in schema.items() if name != "anyOf"},
        }
    if len(others) != 1 or not isinstance(others[0].get("type"), str):
        return schema
    rest = _without(schema, "anyOf")
    merged = {**others[0], "type": [others[0]["type"], "null"], **rest}
    if "const" in merged:
        merged["enum"] = [merged.pop("const"), None]
    elif "enum" in merged:
        merged["enum"] = [*merged["enum"], None]
    return merged
