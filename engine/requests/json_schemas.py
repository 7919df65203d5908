"""Rewrites JSON Schema keywords that llguidance does not support into ones that it does.

The rewritten schema allows no text that the original forbids. What cannot be rewritten is refused by the
library, or here with the keyword and its JSON pointer. Covers what pydantic emits for paths, secrets, UUID
versions, base64, IP addresses and mappings with constrained keys.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Formats that do not constrain the text.
_ANY_TEXT = frozenset({"path", "file-path", "directory-path", "password", "binary"})
_HEX = "[0-9a-f]"
_BASE64 = r"^(?:[A-Za-z0-9{0}]{{4}})*(?:[A-Za-z0-9{0}]{{2}}==|[A-Za-z0-9{0}]{{3}}=)?$"
_PATTERNS = {
    **{
        f"uuid{version}": rf"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}$"
        for version in range(1, 9)
    },
    "base64": _BASE64.format("+/"),
    "base64url": _BASE64.format("_-"),
}
_SCHEMAS = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def rewrite_schema(schema: Any) -> Any:
    """A rewritten copy. Raises `ValueError` with the keyword and its JSON pointer."""
    return _rewrite(schema, schema, "#")


def find_keyword(schema: Any, keyword: str, value: str | None = None) -> str | None:
    """The JSON pointer of the first subschema with `keyword`, and with `value` if given; None if absent."""
    pointers = (
        pointer for node, pointer in _nodes(schema, "#") if keyword in node and value in (None, node[keyword])
    )
    return next(pointers, None)


def _rewrite(node: Any, root: Any, pointer: str) -> Any:
    if not isinstance(node, dict):
        return node
    node = dict(node)
    # First, since it reads values that are rewritten below.
    _rewrite_names(node, root, pointer)
    _rewrite_unique(node, pointer)
    _rewrite_format(node)
    for keyword in (*_LISTS, *_NAMED):
        if isinstance(node.get(keyword), (dict, list)):
            node[keyword] = node[keyword].copy()
    for holder, key, inner, inner_pointer in _children(node, pointer):
        holder[key] = _rewrite(inner, root, inner_pointer)
    return node


def _children(node: dict[str, Any], pointer: str) -> list[tuple[Any, Any, Any, str]]:
    """The direct subschemas: (container, key, subschema, JSON pointer)."""
    children: list[tuple[Any, Any, Any, str]] = [
        (node, keyword, node[keyword], f"{pointer}/{keyword}")
        for keyword in _SCHEMAS
        if isinstance(node.get(keyword), dict)
    ]
    for keyword in _LISTS:
        if isinstance(inner := node.get(keyword), list):
            children += (
                (inner, index, one, f"{pointer}/{keyword}/{index}") for index, one in enumerate(inner)
            )
    for keyword in _NAMED:
        if isinstance(inner := node.get(keyword), dict):
            children += ((inner, name, one, f"{pointer}/{keyword}/{name}") for name, one in inner.items())
    return children


def _nodes(node: Any, pointer: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    if isinstance(node, dict):
        yield node, pointer
        for _, _, inner, inner_pointer in _children(node, pointer):
            yield from _nodes(inner, inner_pointer)


def _rewrite_format(node: dict[str, Any]) -> None:
    name = node.get("format")
    if not isinstance(name, str):
        return
    if name in _ANY_TEXT:
        del node["format"]
    elif name in _PATTERNS and "pattern" not in node:
        del node["format"]
        node["pattern"] = _PATTERNS[name]
    elif name == "ipvanyaddress" and "anyOf" not in node:
        del node["format"]
        node["anyOf"] = [{"type": "string", "format": one} for one in ("ipv4", "ipv6")]


def _rewrite_unique(node: dict[str, Any], pointer: str) -> None:
    if "uniqueItems" not in node:
        return
    max_items = node.get("maxItems")
    if node["uniqueItems"] is not False and not (isinstance(max_items, int) and max_items <= 1):
        raise ValueError(
            f"the keyword `uniqueItems` (at {pointer}) is not supported: no grammar can compare items; leave "
            "it out, for example with a list instead of a set"
        )
    del node["uniqueItems"]


def _rewrite_names(node: dict[str, Any], root: Any, pointer: str) -> None:
    """Turn `propertyNames` into `properties` or `patternProperties` without additional properties."""
    if "propertyNames" not in node:
        return
    names = _resolved(node["propertyNames"], root)
    if names is True or (isinstance(names, dict) and _is_unconstrained(names)):
        del node["propertyNames"]
        return
    if "properties" in node or "patternProperties" in node or not isinstance(names, dict):
        raise ValueError(
            f"the keyword `propertyNames` (at {pointer}) is not supported beside named properties"
        )
    values = node.get("additionalProperties", True)
    allowed = names.get("enum", [names["const"]] if "const" in names else None)
    if isinstance(allowed, list):
        node["properties"] = {name: values for name in allowed if isinstance(name, str)}
    elif (pattern := _pattern_of(names)) is not None:
        node["patternProperties"] = {pattern: values}
    else:
        raise ValueError(
            f"the keyword `propertyNames` (at {pointer}) is supported with `enum`, `const`, `pattern` or "
            "lengths alone"
        )
    node["additionalProperties"] = False
    del node["propertyNames"]


def _is_unconstrained(names: Mapping[str, Any]) -> bool:
    return not (names.keys() - {"type", "title", "description"}) and names.get("type", "string") == "string"


def _pattern_of(names: Mapping[str, Any]) -> str | None:
    keywords = names.keys() - {"type", "title", "description"}
    if keywords == {"pattern"}:
        return str(names["pattern"])
    if keywords == {"format"} and str(names["format"]) in _PATTERNS:
        return _PATTERNS[names["format"]]
    if keywords and keywords <= {"minLength", "maxLength"}:
        return f"^(?s:.){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


def _resolved(node: Any, root: Any) -> Any:
    """Follow local `$ref`s, at most ten; a node without one is returned."""
    for _ in range(10):
        if not (isinstance(node, dict) and isinstance(node.get("$ref"), str)):
            return node
        node = _at_pointer(root, node["$ref"])
    return node


def _at_pointer(root: Any, reference: str) -> Any:
    if not re.match("#/", reference):
        return None
    node = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) else None
    return node
