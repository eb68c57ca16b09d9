"""Bundles ship through real servers and registries, in this process and in fresh ones without jax."""

import base64
import contextlib
import json
import os
import ssl
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from tests.extent import one_in
from tests.fake_registry import fake_registry
from tests.http_serving import QuietHandler, serving
from tests.processes import ran
from tests.store_servers import KINDS, docker_registry, moto_as_google, running

from prejit.runtime import load
from prejit.runtime.__main__ import main
from prejit.runtime.errors import StoreError
from prejit.runtime.format.audit import audit
from prejit.runtime.generation.options import check_generation
from prejit.runtime.machine.kept_files import SETTLED_SECONDS
from prejit.runtime.ship.machine_store import BUNDLES
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.shipping import ship

GOLDEN = Path(__file__).parents[1] / "format" / "v1"
SERVERS = {each.__name__: each for each in (*KINDS[1:], moto_as_google)}
CALL = """
import sys, numpy
from prejit.runtime import load
bundle = load(sys.argv[1])
print(bundle.call("score", x=numpy.ones((2, 16), numpy.float32)).sum())
start = bundle.start_report()
print(start.hashed_bytes, start.receipt_bytes)
"""


@pytest.fixture
def env(tmp_path):
    """A machine of its own: an empty store, and no receipts."""
    own = {"PREJIT_BUNDLES": str(tmp_path / "store")}
    return {**os.environ, **own, "PREJIT_RUNTIME_CACHE": str(tmp_path / "cache")}


def prejit(env, *words):
    """Run a command in a fresh process in which nobody can import jax. Return what it printed."""
    command = "import sys; sys.modules['jax'] = None; from prejit.runtime.__main__ import main; "
    return ran(sys.executable, "-c", f"{command}sys.exit(main())", *words, env=env).stdout


@pytest.mark.parametrize("kind", SERVERS)
def test_through_a_real_server_to_an_empty_machine(kind, tmp_path, env):
    with running(SERVERS[kind](tmp_path), kind) as server:
        env |= server.env
        at = f"{server.url}/call" + ("" if kind == "nginx" else ":v1")
        pushed = json.loads(prejit(env, "push", GOLDEN / "call", at, "--json"))
        again = json.loads(prejit(env, "push", GOLDEN / "call", at, "--json"))
        assert again["moved_bytes"] < pushed["moved_bytes"]
        prejit(env, "pull", at)
        prejit(env, "pull", at, "--all", "-o", tmp_path / "out")
        if kind != "nginx":  # a web server lists nothing
            assert pushed["digest"] in prejit(env, "ls", f"{server.url}/call")
        if kind not in ("nginx", "docker_registry"):
            assert "no tag leads to" in prejit(env, "rm", at)
    assert audit(tmp_path / "out", check_generation).digest == pushed["digest"]
    copied = f"{at.partition(':v1')[0]}@{pushed['digest']}"  # the server is gone: the store has it
    ran(sys.executable, "-W", "ignore", "-c", CALL, copied, env=env)


def test_a_first_start_hashes_nothing_that_the_pull_has_hashed(env):
    with fake_registry() as registry:
        at = f"oci://{registry.host}/call:v1"
        prejit(env, "push", GOLDEN / "call", at)
        prejit(env, "pull", at)
        done = ran(sys.executable, "-W", "ignore", "-c", CALL, at, env=env)
    hashed, held = map(int, done.stdout.split()[-2:])
    assert (hashed, held > 0) == (0, True), SETTLED_SECONDS


@pytest.fixture(autouse=True)
def nobody(tmp_path, monkeypatch):
    """A user who has logged in nowhere, on a machine without bundles."""
    of_tools = ("REGISTRY_AUTH_FILE", "XDG_CONFIG_HOME", "DOCKER_CONFIG")
    for name in (*of_tools, "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name, place in (("HOME", "home"), ("XDG_RUNTIME_DIR", "run"), (BUNDLES, "store")):
        monkeypatch.setenv(name, str(tmp_path / place))


ADDRESS = "127.0.0.2"
"""An address of this machine that prejit does not reach without TLS, unlike 127.0.0.1."""


@contextlib.contextmanager
def guarded_registry(directory):
    """Serve a real docker-registry with TLS of a private CA, which takes tokens of a service of ours."""
    authority = trustme.CA()
    tls, signing = (
        authority.issue_cert(ADDRESS),
        authority.issue_cert("tokens", key_type=trustme.KeyType.RSA),
    )
    files = {name: directory / f"{name}.pem" for name in ("authority", "certificate", "key")}
    authority.cert_pem.write_to_path(files["authority"])
    tls.cert_chain_pems[0].write_to_path(files["certificate"])
    tls.private_key_pem.write_to_path(files["key"])
    state = SimpleNamespace(
        **{"host": "", "authority": files["authority"], "asked": []},  # the scopes of each request
        passwords={"me": "secret", "reader": "glasses"},  # a `reader` may only pull
        identities={"an-identity": "me"},  # tokens that stand for a user's password
        **{"begins": -5.0, "ends": 300.0},  # of a token, in seconds from now
    )
    certificate = x509.load_pem_x509_certificate(signing.cert_chain_pems[0].bytes())
    chain = [base64.b64encode(certificate.public_bytes(Encoding.DER)).decode()]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.configure_cert(context)

    class Handler(QuietHandler):
        def do_GET(self):
            query = parse_qs(urlsplit(self.path).query)
            pair = self.headers.get("authorization", "").removeprefix("Basic ")
            user, _, password = base64.b64decode(pair).decode().partition(":")
            self.give(user if state.passwords.get(user) == password else "", query)

        def do_POST(self):
            form = parse_qs(self.content().decode())
            self.give(state.identities.get(form["refresh_token"][0], ""), form)

        def give(self, user, query):
            scopes = [each for some in query.get("scope", []) for each in some.split()]
            state.asked.append(scopes)
            if not user:
                self.reply(401, b'{"errors":[{"code":"UNAUTHORIZED","message":"wrong"}]}')
                return
            access = []
            for scope in scopes:
                kind, name, actions = scope.split(":")
                may = [each for each in actions.split(",") if each == "pull" or user != "reader"]
                access.append({"type": kind, "name": name, "actions": may})
            now = time.time()
            claims = {
                **{"iss": "tests", "sub": user, "aud": query["service"][0]},
                **{"exp": int(now + state.ends), "nbf": int(now + state.begins), "iat": int(now)},
                **{"jti": uuid.uuid4().hex, "access": access},
            }
            key = signing.private_key_pem.bytes()
            token = jwt.encode(claims, key, "RS256", headers={"x5c": chain})
            self.reply(200, json.dumps({"token": token}).encode())

    with serving(Handler, ADDRESS, context) as service:
        server = docker_registry(
            directory,
            address=ADDRESS,
            http=f"tls: {{certificate: {files['certificate']}, key: {files['key']}}}",
            more=f"auth: {{token: {{realm: 'https://{service}/token', service: a-registry, issuer: tests, "
            f"rootcertbundle: {files['authority']}}}}}\n",
        )
        with running(server):
            state.host = server.url.removeprefix("oci://").partition("/")[0]
            yield state


@pytest.fixture
def guarded(tmp_path, monkeypatch):
    with guarded_registry(tmp_path) as found:
        monkeypatch.setenv("SSL_CERT_FILE", str(found.authority))
        yield found


def log_in(file, host, user, password, **more):
    file.parent.mkdir(parents=True, exist_ok=True)
    pair = base64.b64encode(f"{user}:{password}".encode()).decode()
    file.write_text(json.dumps({"auths": {host: {"auth": pair, **more}}}))


def of_docker(home, host):
    log_in(home / ".docker" / "config.json", host, "me", "secret")


def of_an_identity(home, host):
    file = home / ".docker" / "config.json"
    log_in(file, host, "00000000-0000-0000-0000-000000000000", "", identitytoken="an-identity")


def moved(source, target):
    return ship(parse_reference(str(source)), parse_reference(str(target)))


@pytest.mark.parametrize("kept", one_in(2, [of_docker, of_an_identity]))
def test_the_commands_with_a_login_that_another_tool_keeps(guarded, kept, tmp_path, capsys):
    kept(tmp_path / "home", guarded.host)
    at = f"oci://{guarded.host}/team/fleet"
    other = f"oci://{guarded.host}/team/other:v1"
    for words in (
        ("push", str(GOLDEN / "fleet"), f"{at}:v1"),
        ("tag", f"{at}:v1", "stable"),
        ("copy", f"{at}:v1", other),
        ("pull", other),
        ("pull", f"{at}:stable", "--all", "-o", str(tmp_path / "out")),
        ("ls", at),
        ("rm", f"{at}@{audit(GOLDEN / 'fleet', check_generation).digest}"),
    ):
        assert main(words) == 0, (words, capsys.readouterr().err)
    said = capsys.readouterr().out
    assert "were mounted" in said
    expected = audit(GOLDEN / "fleet", check_generation)
    assert said.count(expected.digest) >= 6
    assert audit(tmp_path / "out", check_generation) == expected
    # A mount wants two scopes at the same time.
    assert any(len({each.split(":")[1] for each in scopes}) == 2 for scopes in guarded.asked)


def wrong_password(at):
    at.passwords["me"] = "changed"


def ended(at):
    at.begins, at.ends = -7200, -3600


def behind(at):
    at.begins, at.ends = 3600, 7200


@pytest.mark.parametrize(
    ("breaks", "said", "hint"),
    [
        (wrong_password, r"the login of me \(.*config.json\) is refused", "docker login"),
        (ended, r"the token .* ended 36\d\d s ago by the registry's clock", "set the clocks"),
        (behind, r"the token .* begins in 3[56]\d\d s by the registry's clock", "set the clocks"),
    ],
)
def test_a_login_that_is_refused_says_why(guarded, breaks, said, hint, tmp_path):
    of_docker(tmp_path / "home", guarded.host)
    breaks(guarded)
    with pytest.raises(StoreError, match=said) as raised:
        moved(GOLDEN / "call", f"oci://{guarded.host}/team/call:v1")
    assert hint in str(raised.value.hint)
    assert "secret" not in str(raised.value)
    assert len(guarded.asked) == 1 or breaks is not wrong_password  # accounts are locked otherwise


def test_who_has_no_login_may_only_read_or_trusts_no_private_ca(guarded, tmp_path, monkeypatch):
    at = f"oci://{guarded.host}/team/call:v1"
    with pytest.raises(StoreError, match=r"no login is kept for this host(?! )"):
        moved(GOLDEN / "call", at)
    unread = tmp_path / "home" / ".docker" / "config.json"
    unread.mkdir(parents=True)
    with pytest.raises(StoreError, match=rf"no login .* \(cannot read {unread}: Is a directory\)"):
        moved(GOLDEN / "call", at)
    unread.rmdir()
    of_docker(tmp_path / "home", guarded.host)
    moved(GOLDEN / "call", at)
    log_in(tmp_path / "home" / ".docker" / "config.json", guarded.host, "reader", "glasses")
    moved(at, tmp_path / "back")
    with pytest.raises(StoreError, match=r"reader .* may not do this here") as raised:
        moved(GOLDEN / "fleet", f"oci://{guarded.host}/team/call:v2")
    assert "as another" in str(raised.value.hint)
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(StoreError, match="CERTIFICATE_VERIFY_FAILED") as raised:
        moved(GOLDEN / "call", at)
    assert "SSL_CERT_FILE" in str(raised.value.hint)


def test_a_registry_that_mirrors_another_one_stands_in_for_it(tmp_path, monkeypatch):
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(running(docker_registry(tmp_path)))
        host = upstream.url.removeprefix("oci://").partition("/")[0]
        proxy = docker_registry(tmp_path, more=f"proxy: {{remoteurl: 'http://{host}'}}\n")
        mirror = stack.enter_context(running(proxy))
        digest = moved(GOLDEN / "call", f"{upstream.url}:v1").digest
        with load(f"{mirror.url}:v1") as bundle:
            assert bundle.digest == digest
        with pytest.raises(StoreError, match="405") as raised:
            moved(GOLDEN / "fleet", f"{mirror.url}:v2")
        assert "mirror" in str(raised.value.hint)
        upstream.kill()
        monkeypatch.setenv(BUNDLES, str(tmp_path / "second"))
        with load(f"{mirror.url}@{digest}") as bundle:
            assert bundle.digest == digest
