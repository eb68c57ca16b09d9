"""The OpenAPI document of a server, made from the Structs that read and write its bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from inspect import cleandoc
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prejit.server.gate.http_errors import ErrorBody
from prejit.server.openai.bodies import encode

_ATTRIBUTES = "\n\nAttributes:\n"
"""Where a docstring begins to describe attributes."""
_ATTRIBUTE = re.compile(r"^ {4}(?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n {8,}.*)*)$", re.MULTILINE)
"""An attribute in a docstring. Its further lines are indented."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path.

    Attributes:
        method: `get` or `post`.
        path: with its parameters in braces.
        summary: what it does.
        request: the Struct of its body; None: it has none.
        response: the Struct of its response; None: it is no JSON of a known form.
        streams: whether the response may be server-sent events.
        media_type: of the response.
        error: the Struct of its errors.
    """

    method: str
    path: str
    summary: str
    request: type[msgspec.Struct] | None = None
    response: type[msgspec.Struct] | None = None
    streams: bool = False
    media_type: str = "application/json"
    error: type[msgspec.Struct] = ErrorBody


def openapi_route(operations: Sequence[Operation]) -> Route:
    """Return the route of /openapi.json, about the operations of all routes of the server."""

    @cache
    def content() -> bytes:
        return encode(document(operations))

    async def answer(request: Request) -> Response:
        return Response(content(), media_type="application/json")

    return Route("/openapi.json", answer)


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document."""
    kinds = [
        kind
        for each in operations
        for kind in (each.request, each.response, each.error)
        if kind is not None
    ]
    unique = list(dict.fromkeys(kinds))
    references, schemas = msgspec.json.schema_components(
        unique, ref_template="#/components/schemas/{name}"
    )
    for kind in unique:  # a Struct's own docstring has only the fields that it adds
        for base in kind.__mro__:
            _describe_fields(schemas[kind.__name__], base.__doc__ or "")
    for schema in schemas.values():
        _describe_fields(schema, schema.get("description", ""))
        if "description" in schema:
            schema["description"] = " ".join(
                cleandoc(schema["description"]).partition(_ATTRIBUTES)[0].split()
            )
    by_kind = dict(zip(unique, references, strict=True))
    paths: dict[str, Any] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method] = _operation(each, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "prejit", "version": version("prejit")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _describe_fields(schema: dict[str, Any], docstring: str) -> None:
    """Give the properties of a schema their descriptions from a docstring.

    Python 3.13 removes the indentation of docstrings, older ones keep it.
    """
    properties = schema.get("properties", {})
    for found in _ATTRIBUTE.finditer(cleandoc(docstring).partition(_ATTRIBUTES)[2]):
        for name in found["names"].split(", "):
            if name in properties:
                properties[name]["description"] = " ".join(found["text"].split())


def _operation(each: Operation, by_kind: dict[Any, Any]) -> dict[str, Any]:
    name = each.path.strip("/").replace("/", "_").replace("{", "").replace("}", "") or "root"
    schema = {} if each.response is None else by_kind[each.response]
    content: dict[str, Any] = {each.media_type: {"schema": schema}}
    if each.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "operationId": f"{each.method}_{name.replace('.', '_')}",
        "summary": each.summary,
        "responses": {
            "200": {"description": "The answer", "content": content},
            "default": {
                "description": "An error",
                "content": {"application/json": {"schema": by_kind[each.error]}},
            },
        },
    }
    if each.request is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": by_kind[each.request]}},
        }
    parameters = [part[1:-1] for part in each.path.split("/") if part.startswith("{")]
    if parameters:
        described["parameters"] = [
            {"name": part, "in": "path", "required": True, "schema": {"type": "string"}}
            for part in parameters
        ]
    return described
