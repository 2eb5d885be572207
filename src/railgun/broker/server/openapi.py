"""The HTTP API of a node as an OpenAPI document, made of the table of admin calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from railgun.broker.streams.admin import CALLS, Argument, Call

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


def document(version: str) -> dict[str, Any]:
    """The document.

    >>> sorted(document("1")["paths"]["/streams/{name}"])
    ['delete', 'get', 'put']
    """
    paths: dict[str, dict[str, Any]] = {}
    for call in CALLS.values():
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call)
    paths["/health"] = {
        "get": _open(
            "health",
            "Whether the node is of use: its logs are sound, and in a cluster it takes part; else 503 with reasons.",
        )
    }
    paths["/openapi.json"] = {"get": _open("openapi", "This document.")}
    metrics = _described("metrics", "Figures for Prometheus.")
    metrics["responses"]["200"] = {
        "description": "Figures.",
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
    """The arguments that stand in its path."""
    return set(re.findall(r"{(\w+)}", call.path))


def _operation(call: Call) -> dict[str, Any]:
    made = _described(call.name, call.what)
    here = in_path(call)
    rest = [argument for argument in call.arguments if argument.name not in here]
    in_query = rest if call.method in ("GET", "DELETE") else []
    made["parameters"] = [
        _parameter(argument, "path" if argument.name in here else "query")
        for argument in call.arguments
        if argument.name in here or argument in in_query
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
        made["requestBody"] = {"required": bool(needed), "content": _json(schema)}
    return made


def _described(name: str, what: str) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": what,
        "responses": {
            "200": {"description": "Done.", "content": _json({})},
            "default": {
                "description": "What is wrong.",
                "content": _json({"$ref": "#/components/schemas/Error"}),
            },
        },
    }


def _open(name: str, what: str) -> dict[str, Any]:
    """What needs no secret."""
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
