"""A hole in the gate would be a request without a key, without a limit, or without a record."""

import asyncio
import json

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from prejit.runtime.errors import RejectError, UsageError
from prejit.server.gate import gate
from prejit.server.gate.api_keys import Keys
from prejit.server.gate.gate import Gate
from prejit.server.gate.request_clients import Origins
from prejit.server.gate.server_settings import Settings
from prejit.server.served.served import Models
from prejit.server.telemetry.requestlog import RequestLog

ERRORS = {
    "usage": UsageError("x: expected 1, found 2"),
    "reject": RejectError("/srv/bundle", "damaged"),
    "bug": RuntimeError("a bug"),
}


async def echo(request):
    state, size = request.state, len(await request.body())
    return JSONResponse({"bytes": size, "id": state.id, "client": state.key.name})


async def fail(request):
    raise ERRORS[request.path_params["how"]]


async def late(request):
    await asyncio.sleep(30)
    return Response()


async def broken_stream(request):
    async def parts():
        yield b"data: 1\n\n"
        raise RuntimeError("a bug after the first part")

    return StreamingResponse(parts())


def app(models, settings):
    return Starlette(
        routes=[
            Route("/v1/echo", echo, methods=["POST"]),
            Route("/v1/fail/{how}", fail),
            Route("/v1/late", late),
            Route("/v1/broken", broken_stream),
            Route("/metrics", lambda request: Response("up 1")),
        ],
        middleware=[Middleware(Gate, models=models, settings=settings)],
    )


def models_in(state):
    models = Models()
    models.change("loading", state)
    return models


def ask(method, path, settings=None, models=None, **more):
    asked = app(models_in("ready") if models is None else models, settings or Settings())
    client = TestClient(asked, base_url="http://test", raise_server_exceptions=False)
    return client.request(method, path, **more)


def test_a_request_keeps_its_id_and_a_body_that_is_too_large_or_compressed_is_refused():
    given = ask("POST", "/v1/echo", content=b"abc", headers={"X-Request-Id": "mine-1"})
    assert given.json() == {"bytes": 3, "id": "mine-1", "client": ""}
    assert given.headers["x-request-id"] == "mine-1"
    for bad in ("x" * 129, "with space", "tab\tbed"):
        made = ask("POST", "/v1/echo", headers={"X-Request-Id": bad})
        assert made.headers["x-request-id"] == made.json()["id"] != bad
    assert ask("GET", "/nowhere").headers["x-request-id"]
    for content in ((b"x" * 100 for _ in range(11)), b"x" * 1100):
        found = ask("POST", "/v1/echo", Settings(body_bytes=1000), content=content)
        assert (found.status_code, found.json()["error"]["code"]) == (413, "body_too_large")
    assert ask("POST", "/v1/echo", Settings(body_bytes=1000), content=b"x" * 1000).is_success
    for coding, status in (("gzip", 415), ("Identity", 200)):
        found = ask("POST", "/v1/echo", content=b"abc", headers={"Content-Encoding": coding})
        assert found.status_code == status
        assert status == 200 or "compressed, found 'gzip'" in found.json()["error"]["message"]


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text("alice: 0123456789\n")
    return Keys(file)


def test_only_who_has_a_key_gets_in_and_no_foreign_host_or_page(keys):
    settings = Settings(keys=keys)
    refused = ask("POST", "/v1/echo", settings)
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert refused.json()["error"]["code"] == "invalid_api_key"
    wrong = {"Authorization": "Bearer 0123456780"}
    for path in ("/v1/echo", "/nowhere", "//v1/echo", "/metrics/../v1/echo", "/page"):
        assert ask("POST", path, settings, headers=wrong).status_code == 401
    right = {"Authorization": "Bearer 0123456789"}
    assert ask("POST", "/v1/echo", settings, headers=right).json()["client"] == "alice"
    assert ask("GET", "/metrics", settings).status_code == 200
    settings = Settings(origins=Origins("test"))
    for path in ("/v1/echo", "/metrics"):
        refused = ask("POST", path, settings, headers={"Host": "evil.example"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_host")
    evil = {"Origin": "https://evil.example"}
    assert ask("POST", "/v1/echo", settings, headers=evil).status_code == 403
    assert ask("POST", "/v1/echo", settings).status_code == 200


def test_a_server_that_is_not_ready_says_when_to_come_again_and_one_that_drains_sends_clients_away():
    for state in ("loading", "compiling", "draining"):
        models = models_in(state)
        refused = ask("POST", "/v1/echo", models=models)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert state in refused.json()["error"]["message"]
        assert ask("GET", "/metrics", models=models).status_code == 200
    # A client that keeps its connection would meet the same server for ever.
    models = models_in("ready")
    assert "connection" not in ask("POST", "/v1/echo", models=models).headers
    models.drain()
    assert ask("POST", "/v1/echo", models=models).headers["connection"] == "close"
    assert "connection" not in ask("GET", "/metrics", models=models).headers
    models.undrain()
    assert ask("POST", "/v1/echo", models=models).status_code == 200


def test_an_error_of_a_handler_has_its_status_and_only_ours_are_printed(capsys):
    for how, status in {"usage": 400, "reject": 500, "bug": 500}.items():
        found = ask("GET", f"/v1/fail/{how}", headers={"X-Request-Id": "the-id"})
        assert found.status_code == status
        assert found.headers["x-request-id"] == "the-id"
        printed = capsys.readouterr().err
        assert ("the-id" in printed and "Traceback" in printed) == (status == 500)


def test_a_request_beyond_its_time_is_504_and_beyond_the_limit_503_until_there_is_room(monkeypatch):
    monkeypatch.setattr(gate, "GRACE_SECONDS", 0.0)
    found = ask("GET", "/v1/late", Settings(timeout_seconds=0.05))
    assert (found.status_code, found.json()["error"]["code"]) == (504, "deadline")

    async def go():
        transport = httpx.ASGITransport(app(models_in("ready"), Settings(clients=3)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            waiting = [asyncio.create_task(client.get("/v1/late")) for _ in range(3)]
            await asyncio.sleep(0.05)
            refused = await client.post("/v1/echo")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert (await client.get("/metrics")).status_code == 200
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert (await client.post("/v1/echo")).status_code == 200

    asyncio.run(go())


def test_an_error_after_the_first_part_cuts_the_connection(capsys):
    cuts, sent = [], []

    async def send(message):
        sent.append(message["type"])

    receive = asyncio.Event().wait
    scope = {"type": "http", "method": "GET", "path": "/v1/broken", "raw_path": b"/v1/broken"}
    scope |= {"query_string": b"", "headers": []}
    scope["extensions"] = {gate.ABORT: lambda: cuts.append(True)}
    asyncio.run(app(models_in("ready"), Settings())(scope, receive, send))
    assert sent == ["http.response.start", "http.response.body"]
    assert cuts == [True]
    assert "a bug after the first part" in capsys.readouterr().err


def test_each_request_is_one_line_of_the_log(tmp_path, keys):
    path = tmp_path / "log"
    settings = Settings(log=RequestLog(str(path)), keys=keys, body_bytes=100)
    key = {"Authorization": "Bearer 0123456789", "Content-Type": "text/plain"}
    for content in ("héllo".encode(), b"\xff\x00", b"x" * 101):
        ask("POST", "/v1/echo", settings, content=content, headers=key)
    ask("POST", "/v1/echo", settings, content=b"secret")
    assert ask("GET", "/metrics", settings).status_code == 200
    assert ask("GET", "/health/ready", settings).status_code == 404  # there is no such probe
    settings.log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    expected = [(200, "alice"), (200, "alice"), (413, "alice"), (401, ""), (404, "")]
    assert [(line["status"], line["client"]) for line in lines] == expected
    assert lines[0]["body"] == "héllo"
    assert lines[0]["headers"] == {"content-type": "text/plain"}
    assert lines[1]["body_base64"] == "/wA="
    assert "0123456789" not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
