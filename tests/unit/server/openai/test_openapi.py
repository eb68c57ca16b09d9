"""The OpenAPI document describes the routes that there are, and nothing in it is dangling."""

import json
import re

import jsonschema
from starlette.routing import Route

from prejit.server.gate.server_settings import Settings
from prejit.server.http.app import OPERATIONS, make_app
from prejit.server.openai.openapi import document
from prejit.server.served.served import Models


def test_each_route_is_described_by_schemas_that_are_there():
    made = document(OPERATIONS)
    text = json.dumps(made)
    for name in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert name in made["components"]["schemas"]
    routes = {}
    for route in make_app(Models(), Settings()).routes:
        assert isinstance(route, Route)
        routes[route.path.replace(":path}", "}")] = {each.lower() for each in route.methods or ()}
    for path, described in made["paths"].items():
        assert described.keys() <= routes[path]
    hidden = {path for path in routes if path not in made["paths"] and "/versions/" not in path}
    pages = {path for path in hidden if path == "/" or path.startswith("/page/")}
    assert hidden == pages | {"/openapi.json"}
    schemas = made["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert "\n" not in schema.get("description", "")
    for name in ("ChatRequest", "CompletionRequest", "ResponseRequest", "EmbeddingRequest"):
        for field, described in schemas[name]["properties"].items():
            assert described.get("description"), f"{name}.{field}"
