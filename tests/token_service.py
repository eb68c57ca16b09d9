"""A registry with TLS of a private CA and a token service (the distribution specification's), both real."""

import base64
import json
import ssl
import time
import uuid
from contextlib import contextmanager
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from tests.http_serving import QuietHandler, serving
from tests.store_servers import docker_registry

ADDRESS = "127.0.0.2"
"""An address of this machine that prejit does not reach without TLS, unlike 127.0.0.1."""


@contextmanager
def guarded_registry(directory):
    """Serve a real docker-registry that takes tokens of a service of ours. Skip where it is not installed."""
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
        if server is None:
            pytest.skip("docker-registry is not installed (Debian has it)")
        server.start()
        try:
            state.host = server.url.removeprefix("oci://").partition("/")[0]
            yield state
        finally:
            server.kill()
