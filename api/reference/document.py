"""Completes the document that flask-openapi3 generates."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from api.reference.bodies import BODIES
from api.reference.errors import Operation, error_examples, error_replies
from api.reference.events import EVENT_MODELS, STREAMS, TaskEnded, webhooks
from api.reference.examples import EXAMPLES
from api.reference.nullable import without_noise

_METHODS = ("get", "put", "post", "delete", "patch")
_REF = "#/components/schemas/"
_SMALL_WORDS = frozenset({"a", "an", "the", "of"})


def complete(generated: dict[str, Any], *, is_secured: bool) -> dict[str, Any]:
    """The document. `is_secured`: calls of `/v1/` need an API key."""
    document: dict[str, Any] = without_noise(generated)
    schemas = document["components"]["schemas"]
    schemas.update(_event_schemas())
    for name, example in EXAMPLES.items():
        if name in schemas:
            schemas[name]["example"] = example
    document["components"]["examples"] = error_examples()
    for path, method, operation in operations(document):
        _complete_operation(path, method, operation, schemas, is_secured=is_secured)
    document["webhooks"] = webhooks(EXAMPLES["TaskEnded"])
    return document


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, method and operation."""
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                yield path, method, item[method]


def _event_schemas() -> dict[str, Any]:
    models = [(model, "serialization") for model in (*EVENT_MODELS, TaskEnded)]
    _, definitions = models_json_schema(models, ref_template=_REF + "{model}")  # type: ignore[arg-type]
    found: dict[str, Any] = without_noise(definitions["$defs"])
    return found


def _complete_operation(
    path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any], *, is_secured: bool
) -> None:
    operation["operationId"] = _operation_id(operation["summary"])
    if "description" in operation:
        operation["description"] = (
            operation["description"].replace("<br/><br/>", "\n\n").replace("<br/>", " ")
        )
    if body := BODIES.get((method, path)):
        operation["requestBody"] = body
    for parameter in operation.get("parameters", ()):
        _simplify(parameter)
    about = Operation(
        path=path,
        method=method,
        has_body="requestBody" in operation,
        has_parameters=bool(operation.get("parameters")),
        is_secured=is_secured and path.startswith("/v1/"),
    )
    replies = operation["responses"]
    replies.pop("default", None)
    for status, reply in error_replies(about).items():
        replies.setdefault(status, reply)
    operation["responses"] = dict(sorted(replies.items()))
    for reply in (operation.get("requestBody"), *replies.values()):
        _add_example(reply or {}, schemas)
    if events := STREAMS.get((method, path)):
        replies["200"]["content"]["text/event-stream"] = {"schema": {"anyOf": list(_frames(events))}}


def _frames(events: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Each event of a stream, as an object: how OpenAPI 3.2 describes `text/event-stream`."""
    for name, schema in events.items():
        yield _frame(name, schema)
        if schema.endswith("Chunk"):
            yield _frame("", "StreamError")
            yield {"type": "object", "required": ["data"], "properties": {"data": {"const": "[DONE]"}}}


def _frame(name: str, schema: str) -> dict[str, Any]:
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": _REF + schema},
    }
    named = {"event": {"const": name}} if name else {}
    properties = {"id": {"type": "string"}, **named, "data": data}
    return {"type": "object", "required": [*named, "data"], "properties": properties}


def _operation_id(summary: str) -> str:
    """`Submit a task` -> `submit_task`."""
    words = re.findall(r"[a-z0-9]+", summary.lower())
    return "_".join(word for word in words if word not in _SMALL_WORDS)


def _simplify(parameter: dict[str, Any]) -> None:
    """A parameter that is left out is not null, and its description is said once."""
    schema = parameter["schema"]
    schema.pop("description", None)
    if isinstance(schema.get("type"), list):
        (schema["type"],) = [one for one in schema["type"] if one != "null"]
    if "enum" in schema:
        schema["enum"] = [one for one in schema["enum"] if one is not None]


def _add_example(part: dict[str, Any], schemas: dict[str, Any]) -> None:
    """The example of the schema, where it is used."""
    for content in part.get("content", {}).values():
        name = content.get("schema", {}).get("$ref", "").removeprefix(_REF)
        example = schemas.get(name, {}).get("example")
        if example is not None and "examples" not in content:
            content["example"] = example


DESCRIPTION = """\
Tokenmill runs a language model behind a durable queue. A call submits a **task**, which is kept in Redis. A
worker computes it, and its tokens can be polled, followed as server-sent events from any position, or
received with a webhook. A task survives restarts of every process.

- **Tasks** under `/v1/tasks` are the native interface. `/v1/chat/completions`, `/v1/completions` and
  `/v1/responses` accept the bodies of OpenAI's API and run the same tasks.
- Where the service has API keys, each call of `/v1/` needs one: `Authorization: Bearer <key>`.
- Errors are problem details (RFC 9457), `application/problem+json`, with the `error` object of OpenAI's API.
  Programs read `error.code`.
- `X-Request-ID` is accepted and returned with every reply. It is in the logs, the task and its webhook.
- Durations are seconds; moments are seconds since the epoch.
"""
