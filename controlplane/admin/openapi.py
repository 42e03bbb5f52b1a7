"""The OpenAPI 3.1 document, made from the route table and the answer structs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from relume.controlplane.admin import models as m
from relume.controlplane.admin.route_table import PUBLIC, Route
from relume.events.wire.headers import ROLE_FIELD

_MEANING = {
    304: "The caller's copy is current",
    307: "It is at another address",
    202: "In the log; the leader has not answered yet",
    400: "The call does not make sense",
    401: "No token, or an unknown one",
    403: "The token's role may not do this",
    404: "There is no such thing",
    409: "The leader refused, or the idempotency key was used for another change",
    410: "Trimmed from the log; see the archive",
    429: "Too many event streams",
    503: "Not now; Retry-After says when",
}


def document(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """The document for these routes."""
    routes = tuple(routes)
    types = [m.ErrorAnswer, *_types(routes)]
    _, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Relume admin API",
            "version": version,
            "description": "What the fleet is, what the log says, and changes to it.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _types(routes: Iterable[Route]) -> list[type]:
    found: dict[type, None] = {}
    for route in routes:
        for kind in (route.answer, route.body):
            if kind is not None and kind is not dict:
                found[kind] = None
    return list(found)


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.summary,
        "responses": {"200": {"description": "Done", "content": _content(route)}},
    }
    if route.params:
        operation["parameters"] = [
            {
                "name": p.name,
                "in": p.where,
                "description": p.description,
                "required": p.where == "path",
                "schema": {"type": p.kind},
            }
            for p in route.params
        ]
    if route.body is not None:
        operation["requestBody"] = {
            "required": route.body_required,
            "content": _json(_ref(route.body)),
        }
    statuses = list(route.statuses)
    if route.role != PUBLIC:
        operation["security"] = [{"token": []}]
        operation[ROLE_FIELD] = route.role
        statuses += [401, 403]
    for status in sorted(statuses):
        if status < 400 and status != 202:  # without a body
            operation["responses"][str(status)] = {"description": _MEANING[status]}
            continue
        body = route.answer if status == 202 or route.role == PUBLIC else m.ErrorAnswer
        operation["responses"][str(status)] = {
            "description": _MEANING[status],
            "content": _json(_ref(body)),
        }
    return operation


def _content(route: Route) -> dict[str, Any]:
    if route.answer is None:
        return {route.text: {"schema": {"type": "string"}}}
    content = _json(_ref(route.answer))
    if any(p.name == "follow" for p in route.params):
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(kind: type | None) -> dict[str, Any]:
    if kind is None or kind is dict:
        return {"type": "object"}
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
