"""Describe a node's HTTP API as an OpenAPI document, generated from the table of admin calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from railgun.broker.streams.admin import CALLS, Argument, Call

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


def document(version: str) -> dict[str, Any]:
    """Return the OpenAPI document of the HTTP API, for the wire `version` that the node speaks.

    >>> sorted(document("1")["paths"]["/streams/{name}"])
    ['delete', 'get', 'put']
    """
    paths: dict[str, dict[str, Any]] = {}
    for call in CALLS.values():
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call)
    paths["/health"] = {
        "get": _unprotected(
            "health",
            "Whether the node works: its logs are sound, and in a cluster it takes part. If not: 503 with the reasons.",
        )
    }
    paths["/openapi.json"] = {"get": _unprotected("openapi", "This document.")}
    metrics = _described("metrics", "Metrics for Prometheus.")
    metrics["responses"]["200"] = {
        "description": "Metrics.",
        "content": {_TEXT: {"schema": {"type": "string"}}},
    }
    paths["/metrics"] = {"get": metrics}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Railgun node", "version": version},
        "security": [{"secret": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "secret": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The node's secret, in hexadecimal digits.",
                }
            },
            "schemas": {"Error": _error()},
        },
    }


def in_path(call: Call) -> set[str]:
    """Return the names of the arguments that stand in the path of `call`."""
    return set(re.findall(r"{(\w+)}", call.path))


def _operation(call: Call) -> dict[str, Any]:
    operation = _described(call.name, call.what)
    path_arguments = in_path(call)
    rest = [argument for argument in call.arguments if argument.name not in path_arguments]
    in_query = rest if call.method in ("GET", "DELETE") else []
    operation["parameters"] = [
        _parameter(argument, "path" if argument.name in path_arguments else "query")
        for argument in call.arguments
        if argument.name in path_arguments or argument in in_query
    ]
    if rest and not in_query:
        needed = [argument.name for argument in rest if not argument.optional]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {a.name: {**a.kind.schema, "description": a.what} for a in rest},
            "additionalProperties": False,
        }
        if needed:
            schema["required"] = needed
        operation["requestBody"] = {"required": bool(needed), "content": _json(schema)}
    return operation


def _described(name: str, what: str) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": what,
        "responses": {
            "200": {"description": "Done.", "content": _json({})},
            "default": {
                "description": "The error.",
                "content": _json({"$ref": "#/components/schemas/Error"}),
            },
        },
    }


def _unprotected(name: str, what: str) -> dict[str, Any]:
    """Describe an operation that needs no secret."""
    return _described(name, what) | {"security": []}


def _parameter(argument: Argument, where: str) -> dict[str, Any]:
    return {
        "name": argument.name,
        "in": where,
        "required": not argument.optional,
        "description": argument.what,
        "schema": dict(argument.kind.schema),
    }


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": dict(schema)}}


def _error() -> dict[str, Any]:
    text = {"type": "string"}
    error = {
        "type": "object",
        "properties": {"code": text, "message": text},
        "required": ["code", "message"],
    }
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
