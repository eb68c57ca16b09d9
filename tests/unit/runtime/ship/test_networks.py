"""Places behind private CAs and proxies, and the logins that other tools keep."""

import contextlib
import os
import ssl
import urllib.error
import urllib.request

import pytest
import trustme
from tests.fake_registry import fake_registry
from tests.layouts import GOLDEN

from prejit.runtime.errors import StoreError
from prejit.runtime.ship import registry_login
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.registry_client import RegistryClient
from prejit.runtime.ship.registry_login import HUB_HOST, find_login

from .conftest import answering, keep, moved

CALL = GOLDEN / "call"
VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY")


@pytest.fixture(autouse=True)
def plain(monkeypatch, tmp_path):
    for name in (*VARIABLES, *PROXIES, "REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


def send_file(handler):
    file = CALL / handler.path.removeprefix("/call/")
    found = file.is_file()
    handler.reply(200 if found else 404, file.read_bytes() if found else b"")


def test_a_certificate_of_a_private_ca(tmp_path, monkeypatch):
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.2").configure_cert(context)
    with answering(send_file, "127.0.0.2", context) as host:
        at = parse_reference(f"https://{host}/call")
        with pytest.raises(StoreError, match=r"(?i)certificate") as raised:
            moved(at, tmp_path / "refused")
        assert "SSL_CERT_FILE" in str(raised.value.hint)
        authority.cert_pem.write_to_path(tmp_path / "authority.pem")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
        moved(at, tmp_path / "back")


@pytest.mark.parametrize("place", ["oci://inside.example/call:v1", "http://inside.example/call"])
def test_a_place_behind_proxies(place, tmp_path, monkeypatch):
    seen, direct = [], urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with fake_registry() as registry, answering(send_file) as files:
        inside = registry.host if place.startswith("oci") else files
        moved(CALL, f"oci://{registry.host}/call:v1")

        def pass_on(handler):
            seen.append(handler.path)
            url = handler.path.replace("inside.example", inside)
            headers = dict(handler.headers)
            asked = urllib.request.Request(url, headers=headers, method=handler.command)
            try:
                with direct.open(asked) as answer:
                    kind = answer.headers.get("content-type", "")
                    handler.reply(answer.status, answer.read(), content_type=kind)
            except urllib.error.HTTPError as error:
                handler.reply(error.code)
                error.close()

        with answering(pass_on) as host:
            monkeypatch.setenv("PREJIT_PLAIN_HTTP", "inside.example")
            for name in ("http_proxy", "HTTP_PROXY"):
                monkeypatch.setenv(name, f"http://{host}")
            moved(place, tmp_path / "back")
    assert (tmp_path / "back" / "index.json").read_bytes() == (CALL / "index.json").read_bytes()
    assert any("inside.example" in each for each in seen)


def test_the_login_of_the_narrowest_place_in_the_first_file(tmp_path, monkeypatch):
    assert find_login("host", "team/demo") is None
    docker, named = tmp_path / "docker" / "config.json", tmp_path / "named.json"
    podman = tmp_path / "run" / "containers" / "auth.json"
    monkeypatch.setenv("DOCKER_CONFIG", str(docker.parent))
    keep(docker, {"host": "docker"})
    keep(podman, {"host/team": "narrow", "host": "wide", "other": "other"})
    for repository, user in (("team/demo", "narrow"), ("teams", "wide")):
        found = find_login("host", repository)
        assert (found.user, found.secret, found.source) == (user, "secret", str(podman))
    podman.unlink()
    assert find_login("host", "team/demo").user == "docker"
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(named))
    keep(named, {"host": ""}, identitytoken="token")
    assert find_login("host", "team/demo").identity == "token"
    assert find_login("elsewhere", "team/demo") is None
    # Of a tool that has logged in nowhere, where a registry may ask for no login.
    named.write_text("{}\n")
    assert find_login("host", "team/demo").user == "docker"
    keep(named, {"https://index.docker.io/v1/": "hub", "https://old.example/v1/": "old"})
    for host, user in (("docker.io", "hub"), (HUB_HOST, "hub"), ("old.example", "old")):
        assert find_login(host, "team/demo").user == user
    named.unlink()
    said = r"named\.json: cannot read the logins: No such file"
    with pytest.raises(StoreError, match=said) as raised:
        find_login("host", "team/demo")
    assert "REGISTRY_AUTH_FILE" in raised.value.hint


def test_the_hub_of_docker_has_its_registry_elsewhere():
    for path, place in (("team/demo", "team/demo"), ("demo", "library/demo")):
        client = RegistryClient(parse_reference(f"oci://docker.io/{path}"), "x", 1.0, None)
        assert client._base == f"https://{HUB_HOST}/v2/{place}/"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not JSON", "expected logins as JSON"),
        ('{"auths": {"host": {"auth": "?"}}}', "expected a login in base64"),
        ('{"credsStore": "none-such"}', "expected its helper docker-credential-none-such"),
    ],
)
def test_a_file_of_logins_that_is_damaged_is_named(content, said, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(content)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(StoreError, match=said) as raised:
        find_login("host", "demo")
    assert str(tmp_path) in str(raised.value)
    assert raised.value.hint


def test_a_helper_that_knows_a_login_or_none_and_one_that_fails(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"credsStore": "tests"}')
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    helper = tmp_path / "docker-credential-tests"
    for script, said in (
        ("echo credentials not found in native keychain; exit 1", ""),
        ("echo '{}'", ""),
        ("echo no credential providers >&2; exit 1", "gives no login: no credential providers"),
        ("exec sleep 60", r"did not answer in 0\.3 s"),
    ):
        monkeypatch.setattr(registry_login, "_HELPER_SECONDS", 0.3 if "sleep" in script else 60.0)
        helper.write_text(f"#!/bin/sh\n{script}\n")
        helper.chmod(0o755)
        with pytest.raises(StoreError, match=said) if said else contextlib.nullcontext():
            assert find_login("host", "demo") is None
    monkeypatch.setattr(registry_login, "_HELPER_SECONDS", 60.0)
    for user, identity in (("me", ""), ("<token>", "secret")):
        helper.write_text(f'#!/bin/sh\necho \'{{"Username":"{user}","Secret":"secret"}}\'\n')
        found = find_login("host", "demo")
        assert (found.user, found.secret, found.identity) == (user, "secret", identity)
