"""What the OpenAPI document says of all routes. The rooms of the two protocols have their own parts."""

from __future__ import annotations

<<<<<<< HEAD
from prejit.runtime.server.inference.routes import OPERATIONS as OF_INFERENCE
from prejit.runtime.server.openai.openapi import Operation
from prejit.runtime.server.openai.routes import OPERATIONS as OF_OPENAI

_OF_SERVER = (
=======
from prejit.runtime.server.inference.schema import (
    InferError,
    InferRequest,
    InferResponse,
    ModelMetadata,
    ServerMetadata,
)
from prejit.runtime.server.openai.openapi import Operation
from prejit.runtime.server.openai.routes import OPERATIONS as OF_OPENAI

_MODEL = "/v2/models/{model}"
_OF_HEALTH = (
>>>>>>> h-app
    Operation("get", "/health/live", "Say that the process runs"),
    Operation("get", "/health/ready", "Say whether the server takes requests"),
    Operation("post", "/drain", "Take no more requests, and wait for those that run"),
    Operation("get", "/metrics", "Return figures for Prometheus", media_type="text/plain"),
)
<<<<<<< HEAD
=======
_OF_INFERENCE = (
    Operation("get", "/v2", "Describe the server", None, ServerMetadata, error=InferError),
    Operation("get", "/v2/health/live", "Say that the process runs", error=InferError),
    Operation("get", "/v2/health/ready", "Say whether the server takes requests", error=InferError),
    Operation("get", _MODEL, "Describe a program", None, ModelMetadata, error=InferError),
    Operation("get", f"{_MODEL}/ready", "Say whether a program is ready", error=InferError),
    Operation(
        "post", f"{_MODEL}/infer", "Run a program", InferRequest, InferResponse, error=InferError
    ),
)
>>>>>>> h-app

OPERATIONS = (*OF_OPENAI, *_OF_SERVER, *OF_INFERENCE)
"""All routes but those of the page, and the paths of the inference protocol that name a version."""
