"""What the OpenAPI document says of all routes. The rooms of the two protocols have their own parts."""

from __future__ import annotations

from prejit.server.inference.inference_routes import OPERATIONS as OF_INFERENCE
from prejit.server.openai.openai_routes import OPERATIONS as OF_OPENAI
from prejit.server.openai.openapi import Operation

_OF_SERVER = (
    Operation("get", "/health/live", "Say that the process runs"),
    Operation("get", "/health/ready", "Say whether the server takes requests"),
    Operation("get", "/health", "Say whether the server takes requests"),
    Operation("get", "/version", "Return the version of prejit"),
    Operation("get", "/metrics", "Return figures for Prometheus", media_type="text/plain"),
)

OPERATIONS = (*OF_OPENAI, *_OF_SERVER, *OF_INFERENCE)
"""All routes but those of the page, and the paths of the inference protocol that name a version."""
