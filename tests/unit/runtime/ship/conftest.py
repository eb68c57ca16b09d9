"""A store of this machine for each test, a registry with golden bundles, and no pauses between attempts."""

import base64
import json

import pytest
from tests.fake_registry import fake_registry
from tests.http_serving import QuietHandler, serving
from tests.layouts import GOLDEN

from prejit.runtime.base import process_facts
from prejit.runtime.format.audit import audit
from prejit.runtime.generation.options import check_generation
from prejit.runtime.ship import registry_client, repository
from prejit.runtime.ship.machine_store import BUNDLES, MachineStore
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.shipping import open_repository, ship


def moved(source, target, *targets, form=""):
    return ship(parse_reference(str(source)), parse_reference(str(target)), targets, form=form)


def audited(path):
    return audit(path, check_generation)


def place_at(place):
    return open_repository(parse_reference(place))


def keep(file, users, **more):
    """Keep logins of places as docker and podman do, each of a user with the password `secret`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    logins = {
        place: {"auth": base64.b64encode(f"{user}:secret".encode()).decode(), **more}
        for place, user in users.items()
    }
    file.write_text(json.dumps({"auths": logins}))


def answering(reply, *where):
    """Serve: `reply` gets the handler of each request."""

    class Answering(QuietHandler):
        def answer(self):
            self.content()
            reply(self)

        do_GET = do_PUT = do_HEAD = do_POST = answer

    return serving(Answering, *where)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(repository, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(registry_client, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(process_facts, "SYSTEM_POLICY", tmp_path / "system.toml")
    monkeypatch.delenv("PREJIT_TRUST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv(BUNDLES, str(tmp_path / "store"))
    return MachineStore(tmp_path / "store")


@pytest.fixture
def registry():
    """A registry that holds golden bundles, as NAME:v1. It has seen no request."""
    with fake_registry() as found:
        for name in ("fleet", "call", "decoder"):
            moved(GOLDEN / name, f"oci://{found.host}/{name}:v1")
        found.seen.clear()
        yield found
