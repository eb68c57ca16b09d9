"""The files of the page: all are there, none needs another host, and no code can hide in text."""

import re
from contextlib import closing

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from tests.unit.server.running import served

from prejit.runtime import load
from prejit.server.http.page_routes import routes
from prejit.server.served.served import Models


@pytest.fixture(scope="module")
def models(lettered_dir):
    with closing(Models(served(load(lettered_dir), "chatty", slots=2))) as found:
        yield found


@pytest.fixture
def get(models):
    return lambda path, of=models: TestClient(Starlette(routes=routes(of))).get(path)


def test_every_file_that_the_page_names_is_served_and_nothing_from_elsewhere(get):
    named = set(re.findall(r'(?:href|src)="([^"]+)"', get("/").text))
    kinds = {name: get(f"/{name}").headers["content-type"].partition(";")[0] for name in named}
    types = {"icon.svg": "image/svg+xml", "style.css": "text/css", "script.js": "text/javascript"}
    assert kinds == {f"page/{name}": kind for name, kind in types.items()}
    for path in ("/", "/page/style.css", "/page/script.js", "/page/icon.svg"):
        answer = get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        text = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|wss?:|[\"'(`]//", text), path
    html = get("/").text
    assert not re.search(r"<script[^>]*>[^<]|\son\w+=|\sstyle=", html)
    assert "innerHTML" not in get("/page/script.js").text


def test_the_page_gets_what_it_shows(get, models, bundle_dir):
    (found,) = get("/page/models").json()["models"]
    bundle = models.get("chatty").bundle
    assert found["digest"] == bundle.digest
    can = [found[name] for name in ("chat", "complete", "embed", "calls")]
    assert can == [True, True, False, []]
    assert found["max_tokens"] == 512
    programs = {each["program"] for each in found["programs"]}
    assert programs == {each.name for each in bundle.config.programs}
    figures = get("/page/figures").json()
    assert figures["state"] == "ready"
    assert figures["models"]["chatty"]["first_token_p50"] is None  # NaN is no JSON
    assert figures["models"]["chatty"]["slots"] == 2
    loading = Models()  # a server without bundles has a page, too
    assert get("/", loading).status_code == 200
    assert get("/page/models", loading).json() == {"state": "loading", "models": []}
    assert get("/page/figures", loading).json() == {"state": "loading", "models": {}}
    with closing(Models(served(load(bundle_dir)))) as models:
        (found,) = get("/page/models", models).json()["models"]
    assert found["calls"] == ["nest", "score", "tick"]
    assert (found["chat"], found["complete"], found["embed"]) == (False, False, False)
    assert found["max_tokens"] is None
