"""/v2: the Open Inference Protocol, with the extension of binary tensors."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future, InvalidStateError
from importlib.metadata import version
from typing import Any, final

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.errors import DeadlineError, UsageError
from prejit.server.gate.api_keys import ApiKey
from prejit.server.gate.http_errors import RETRY_SECONDS, ApiError, json_response
from prejit.server.gate.request_clients import unless_gone
from prejit.server.gate.server_settings import Settings
from prejit.server.inference.inference_models import InferenceModel, InferenceModels, results
from prejit.server.inference.inference_protocol import (
    InferError,
    InferRequest,
    InferResponse,
    InferResult,
    ModelMetadata,
    ServerMetadata,
    datatype_of,
    dtype_of,
    from_bytes,
    from_json,
    to_json,
)
from prejit.server.openai.bodies import check_parts
from prejit.server.openai.openapi import Operation
from prejit.server.openai.prompts import off_loop
from prejit.server.served.served import Models

VERSION = "1"
"""The only version of each model."""

_JSON_LENGTH = "Inference-Header-Content-Length"
"""The header that says how long the JSON is, if bytes follow it."""


OPERATIONS = (
    Operation("get", "/v2", "Describe the server", None, ServerMetadata, error=InferError),
    Operation("get", "/v2/health/live", "Say that the process runs", error=InferError),
    Operation("get", "/v2/health/ready", "Say whether the server is ready", error=InferError),
    Operation(
        "get", "/v2/models/{model}", "Describe a program", None, ModelMetadata, error=InferError
    ),
    Operation("get", "/v2/models/{model}/ready", "Say whether it is ready", error=InferError),
    Operation(
        "post",
        "/v2/models/{model}/infer",
        "Run a program",
        InferRequest,
        InferResponse,
        error=InferError,
    ),
)
"""The entries of these routes in the OpenAPI document."""


def routes(models: Models, settings: Settings) -> list[Route]:
    """Return the routes of /v2."""
    protocol = _Protocol(models, settings)
    model = "/v2/models/{model}"
    versioned = model + "/versions/{version}"
    found = [
        Route("/v2", protocol.server),
        Route("/v2/health/live", protocol.live),
        Route("/v2/health/ready", protocol.ready),
    ]
    for path in (model, versioned):
        found += [
            Route(path, protocol.metadata),
            Route(f"{path}/ready", protocol.model_ready),
            Route(f"{path}/infer", protocol.infer, methods=["POST"]),
        ]
    return found


@final
class _Protocol:
    """The handlers."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models = models
        self._settings = settings
        self._changes = -1
        self._served = InferenceModels(())
        self._tried: dict[str, InferenceModels] = {}
        """By name of a served model, the programs of a release that answers a share of its requests."""

    async def server(self, request: Request) -> Response:
        """Answer what this server is."""
        described = ServerMetadata(
            name="prejit", version=version("prejit"), extensions=["binary_tensor_data"]
        )
        return json_response(described)

    async def live(self, request: Request) -> Response:
        """Answer that the process runs."""
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        """Answer whether all bundles are loaded and nothing is left to compile."""
        ready = self._models.is_ready
        headers = {} if ready else {"Retry-After": str(RETRY_SECONDS)}
        return json_response({"ready": ready}, 200 if ready else 503, headers)

    async def metadata(self, request: Request) -> Response:
        """Answer what a model takes and gives."""
        model = self._model(request)
        return json_response(
            ModelMetadata(
                name=request.path_params["model"],
                versions=[VERSION],
                platform="prejit",
                inputs=model.inputs,
                outputs=model.outputs,
            )
        )

    async def model_ready(self, request: Request) -> Response:
        """Answer that a model is ready; the server refuses this path before it is."""
        self._model(request)
        return json_response({"name": request.path_params["model"], "ready": True})

    async def infer(self, request: Request) -> Response:
        """Run a program."""
        model = self._model(request)
        body = await request.body()
        length = request.headers.get(_JSON_LENGTH)
        asked, given = await off_loop(len(body), lambda: _read(body, length, model))
        args, kwargs = model.arguments(given, asked.parameters)
        key: ApiKey = request.state.key
        future = model.served.engine.submit_client_call(
            key.name, key.limits, model.program, *args, **kwargs
        )
        seconds = self._settings.timeout_seconds
        # A call that waits in the engine ends with the wait; one that runs ends by itself.
        timer = asyncio.get_running_loop().call_later(seconds, _expire, future, model, seconds)
        try:
            value = await unless_gone(request.receive, asyncio.wrap_future(future))
        finally:
            timer.cancel()
        name = request.path_params["model"]
        arrays = results(value)
        size = sum(array.nbytes for array in arrays.values())
        return await off_loop(size, lambda: _answer(asked, name, arrays))

    def _model(self, request: Request) -> InferenceModel:
        """Return the model of a path; for a share of the requests, that of a canary."""
        if (changes := self._models.changes) != self._changes:
            tried = [*self._models.canaries.items()]
            self._tried = {name: InferenceModels([each.served]) for name, each in tried}
            self._served, self._changes = InferenceModels(self._models), changes
        model = self._served.get(request.path_params["model"])
        name = model.served.name
        if name in self._tried and self._models.get(name).bundle is not model.served.bundle:
            model = self._tried[name].get(f"{name}.{model.program}")
        if (found := request.path_params.get("version", VERSION)) != VERSION:
            raise ApiError(404, f"version: expected {VERSION}, found {found!r:.80}")
        return model


def _expire(future: Future[Any], model: InferenceModel, seconds: float) -> None:
    """End a call that has no result in time, for its client and for the engine's metrics."""
    with contextlib.suppress(InvalidStateError):  # it has its result just now
        future.set_exception(
            DeadlineError(
                f"{model.program}: expected a result within {seconds:g} seconds, found the call still "
                "waiting or running",
                hint="send fewer calls at once, or start the server with a longer --timeout",
            )
        )


def _read(
    body: bytes, length: str | None, model: InferenceModel
) -> tuple[InferRequest, dict[str, np.ndarray[Any, Any]]]:
    """Return the JSON of a request, and its tensors by name."""
    end = len(body)
    if length is not None:
        if not (length.isascii() and length.isdecimal() and int(length) <= len(body)):
            raise UsageError(f"{_JSON_LENGTH}: expected 0 to {len(body)}, found {length!r:.80}")
        end = int(length)
    view = memoryview(body)
    check_parts(body[:end])
    asked = msgspec.json.decode(view[:end], type=InferRequest)
    expected = {tensor.name: tensor.datatype for tensor in model.inputs}
    given: dict[str, np.ndarray[Any, Any]] = {}
    at = end
    for tensor in asked.inputs:
        where = f"inputs: {tensor.name!r:.80}"
        if tensor.name in given:
            raise UsageError(f"{where}: expected each tensor once, found it twice")
        dtype = dtype_of(tensor.datatype, where)
        wanted = expected.get(tensor.name, tensor.datatype)
        if tensor.datatype != wanted:
            raise UsageError(f"{where}: datatype: expected {wanted}, found {tensor.datatype}")
        size = tensor.parameters.get("binary_data_size")
        if (name := _foreign(tensor.parameters)) is not None:
            raise UsageError(f"{where}: expected data in the request, found the parameter {name!r}")
        shape = tuple(tensor.shape)
        if size is None:
            given[tensor.name] = from_json(tensor.data, dtype, shape, where)
            continue
        if type(size) is not int or not 0 <= size <= len(body) - at or tensor.data is not None:
            raise UsageError(
                f"{where}: binary_data_size: expected at most the {len(body) - at} bytes that are left, "
                f"and no data beside them, found {size!r:.80}"
            )
        given[tensor.name] = from_bytes(view[at : at + size], dtype, shape, where)
        at += size
    if at != len(body):
        raise UsageError(f"body: expected {at} bytes in all, found {len(body)}")
    return asked, given


def _foreign(parameters: dict[str, Any]) -> str | None:
    """Return the name of a parameter about shared memory, or of classes in place of numbers; None: none."""
    return next(
        (
            name
            for name in parameters
            if name.startswith("shared_memory") or name == "classification"
        ),
        None,
    )


def _answer(asked: InferRequest, name: str, arrays: dict[str, np.ndarray[Any, Any]]) -> Response:
    """Return the response with the results that a request wants."""
    in_bytes = asked.parameters.get("binary_data_output") is True
    wanted = [(each, in_bytes) for each in arrays]
    if asked.outputs is not None:
        wanted = []
        for output in asked.outputs:
            if output.name not in arrays:
                raise UsageError(
                    f"outputs: expected {', '.join(arrays)}, found {output.name!r:.80}"
                    + did_you_mean(output.name, arrays)
                )
            if (foreign := _foreign(output.parameters)) is not None:
                raise UsageError(
                    f"outputs: {output.name!r}: expected the result itself, found the parameter {foreign!r}"
                )
            binary = output.parameters.get("binary_data", in_bytes) is True
            wanted.append((output.name, binary))
    described: list[InferResult] = []
    behind: list[bytes] = []
    for each, binary in wanted:
        array = arrays[each]
        datatype = datatype_of(array.dtype.name, each)
        one = InferResult(name=each, datatype=datatype, shape=list(array.shape))
        if binary:
            behind.append(array.tobytes())
            one.parameters = {"binary_data_size": len(behind[-1])}
        else:
            one.data = to_json(array)
        described.append(one)
    content = InferResponse(model_name=name, model_version=VERSION, outputs=described, id=asked.id)
    if not behind:
        return json_response(content)
    head = msgspec.json.encode(content)
    headers = {_JSON_LENGTH: str(len(head))}
    return Response(
        b"".join([head, *behind]), headers=headers, media_type="application/octet-stream"
    )
