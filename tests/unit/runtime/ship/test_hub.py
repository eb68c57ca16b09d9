"""A repository of the Hugging Face hub is a place of bundles to read from, by its revisions.

The hub here keeps to its rules: a file of a revision is redirected to another host, which gets no token.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from prejit.runtime import load
from prejit.runtime.__main__ import main
from prejit.runtime.errors import RejectError, StoreError, UsageError
from prejit.runtime.ship.pulling import OFFLINE, Wanted, pull
from prejit.runtime.ship.reference import parse_reference

from .conftest import GOLDEN, answering, audited, moved


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub: its token, how many answers it cuts, and what it and the host of its files were asked for.

    Each request has its path, range and authorization.
    """
    state = SimpleNamespace(root=tmp_path / "hub", token="", cuts=0, asked=[], stored=[])
    for revision in ("main", "v1"):
        shutil.copytree(GOLDEN / "call", state.root / "me" / "demo" / revision / "bundle")

    def note(requests, handler):
        wanted, who = (handler.headers.get(name, "") for name in ("range", "authorization"))
        requests.append((handler.path, wanted, who))
        return wanted, who

    def send(handler):
        wanted, _ = note(state.stored, handler)
        start = int(wanted.removeprefix("bytes=").removesuffix("-") or 0)
        content = (state.root / handler.path.lstrip("/")).read_bytes()
        part, status = content[start:], 206 if wanted else 200
        whole = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if not (state.cuts and "/blobs/" in handler.path and len(part) > 1000):
            handler.reply(status, part, content_range=whole)
            return
        state.cuts -= 1
        handler.send_response(status)
        handler.send_header("content-length", str(len(part)))
        handler.send_header("content-range", whole)
        handler.end_headers()
        handler.wfile.write(part[: len(part) // 2])
        handler.close_connection = True

    with answering(send, "127.0.0.2") as elsewhere:

        def resolve(handler):
            _, who = note(state.asked, handler)
            owner, name, _, revision, *path = handler.path.strip("/").split("/")
            file = Path(owner, name, revision, *path)
            if state.token and who != f"Bearer {state.token}":
                handler.reply(401, x_error_code="RepoNotFound")
            elif not (state.root / file).is_file():
                handler.reply(404, x_error_code="EntryNotFound")
            else:
                handler.reply(302, location=f"http://{elsewhere}/{file}")

        with answering(resolve) as host:
            monkeypatch.setattr(constants, "ENDPOINT", f"http://{host}")
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
            monkeypatch.delenv("HF_TOKEN", raising=False)
            monkeypatch.setenv("PREJIT_STORE_TOKEN", "of-another-server")
            yield state


def test_a_revision_of_a_repository_loads_and_the_hub_alone_gets_the_token(hub, store, monkeypatch):
    hub.token = "secret"
    with pytest.raises(StoreError, match="401") as raised:
        load("hf://me/demo/bundle")
    assert "hf auth login" in str(raised.value.hint)
    monkeypatch.setenv("HF_TOKEN", "secret")
    for revision in ("", ":v1"):
        with load(f"hf://me/demo/bundle{revision}") as bundle:
            assert bundle.digest == audited(GOLDEN / "call").digest
    assert {each[2] for each in hub.stored} == {""}
    assert {each[2] for each in hub.asked} <= {"", "Bearer secret"}
    assert any("/resolve/v1/bundle/index.json" in each[0] for each in hub.asked)


def test_a_transfer_that_was_cut_goes_on_by_range(hub, store):
    hub.cuts = 2
    found = pull(parse_reference("hf://me/demo/bundle"), store, Wanted())
    assert audited(found.path).digest == found.digest
    assert any(each[1] for each in hub.stored)


def test_what_is_not_there_what_is_another_and_what_is_offline(hub, store, tmp_path, monkeypatch):
    for place in ("hf://me/demo", "hf://me/none", "hf://me/demo/bundle:v9"):
        with pytest.raises(StoreError, match=r"not found: no index\.json there"):
            load(place)
    with pytest.raises(RejectError, match="expected sha256:aaa"):
        load(f"hf://me/demo/bundle:v1@sha256:{'a' * 64}")
    with pytest.raises(UsageError, match="expected a host and a path"):
        load("hf://me")
    with pytest.raises(UsageError, match="found the hub") as raised:
        moved(GOLDEN / "call", "hf://me/demo")
    assert "hf upload me/demo DIRECTORY" in str(raised.value.hint)
    assert main(("ls", "hf://me/demo")) == 2
    pull(parse_reference("hf://me/demo/bundle"), store, Wanted())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StoreError, match="HF_HUB_OFFLINE is set") as offline:
        load("hf://me/demo/bundle")
    assert OFFLINE in str(offline.value.hint)
    monkeypatch.setenv(OFFLINE, "1")
    with load("hf://me/demo/bundle") as bundle:
        assert bundle.name == "call"
