"""A server with the page and the few endpoints that it uses, on a port of this machine."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from prejit.runtime.bundle import Bundle
from prejit.runtime.errors import PrejitError
from prejit.runtime.server.page.routes import routes


@dataclass(frozen=True)
class Served:
    name: str
    bundle: Bundle
    engine: Any


class Models:
    """The served bundles, as the page reads them."""

    def __init__(self, *bundles: Bundle) -> None:
        self.state = "ready"
        self._served = [Served(one.name, one, one.engine(slots=2)) for one in bundles]

    def get(self, name: str) -> Served:
        return next(one for one in self._served if one.name == name)

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served)

    def close(self) -> None:
        for one in self._served:
            one.engine.close()


def make_app(models: Models, key: str = "") -> Starlette:
    """The page, and OpenAI's and the inference protocol's endpoints as far as the page uses them."""

    def refuse(request: Request) -> Response | None:
        if key and request.headers.get("authorization") != f"Bearer {key}":
            return JSONResponse({"error": {"message": "Authorization: expected a key"}}, 401)
        return None

    async def generate(request: Request) -> Response:
        if (refused := refuse(request)) is not None:
            return refused
        body = await request.json()
        served = models.get(body["model"])
        chats = "messages" in body
        bundle = served.bundle
        prompt = bundle.apply_chat_template(body["messages"]) if chats else body["prompt"]
        ways = {"temperature": body.get("temperature"), "seed": body.get("seed")}
        try:
            stream = served.engine.stream(prompt, max_new_tokens=body["max_tokens"], **ways)
        except PrejitError as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)

        async def events() -> AsyncIterator[bytes]:
            async with stream:
                async for piece in stream:
                    said = {"delta": {"content": piece.text}} if chats else {"text": piece.text}
                    choice = {"index": 0, "finish_reason": piece.finish_reason, **said}
                    yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def embed(request: Request) -> Response:
        body = await request.json()
        encoded = await run_in_threadpool(
            models.get(body["model"]).bundle.encode_batch, body["input"]
        )
        data = [{"index": i, "embedding": row.tolist()} for i, row in enumerate(encoded.embeddings)]
        return JSONResponse({"data": data, "usage": {"prompt_tokens": encoded.stats.tokens}})

    async def describe(request: Request) -> Response:
        inputs = [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
        return JSONResponse({"name": request.path_params["name"], "inputs": inputs, "outputs": []})

    async def infer(request: Request) -> Response:
        body = await request.json()
        name, _, function = request.path_params["name"].partition(".")
        given = {
            one["name"]: np.array(one["data"], np.float32).reshape(one["shape"])
            for one in body["inputs"]
        }
        try:
            found = await run_in_threadpool(models.get(name).bundle.call, function, **given)
        except PrejitError as error:
            return JSONResponse({"error": str(error)}, 400)
        output = {"name": "result", "datatype": "FP32", "shape": list(found.shape)}
        return JSONResponse({"outputs": [{**output, "data": found.ravel().tolist()}]})

    return Starlette(
        routes=[
            *routes(models),  # type: ignore[arg-type]
            Route("/v1/chat/completions", generate, methods=["POST"]),
            Route("/v1/completions", generate, methods=["POST"]),
            Route("/v1/embeddings", embed, methods=["POST"]),
            Route("/v2/models/{name}", describe),
            Route("/v2/models/{name}/infer", infer, methods=["POST"]),
        ]
    )


@contextmanager
def on_a_port(app: Starlette) -> Iterator[str]:
    """Serve an application from a thread; its host and port."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
