"""A web page that reaches a server of this machine must not use it, by its own name or by another's."""

import pytest

from prejit.server.gate.http_errors import ApiError
from prejit.server.gate.origins import Origins

OWN = Origins("127.0.0.1", ("https://app.example",), "give --cors")


def check(origins, method, **headers):
    """The code of the refusal; empty: there is none."""
    try:
        origins.check(method, {k.encode(): v.encode() for k, v in headers.items()})
    except ApiError as error:
        hinted = ("give --cors" in error.message) == bool(origins.hint)
        return str(error.code) if error.status == 403 and hinted else error.message
    return ""


@pytest.mark.parametrize(
    ("host", "passes"),
    [
        *(("localhost", True), ("localhost:8000", True), ("LocalHost.:80", True)),
        *(("127.0.0.1:8000", True), ("[::1]:8000", True), ("10.1.2.3:8000", True)),
        *(("me.localhost:1", True), ("app.example", True)),
        *(("evil.example", False), ("evil.example:8000", False), ("localhost.evil.example", False)),
        *(("notlocalhost", False), ("127.0.0.1.evil.example", False), ("[evil", False)),
        *(("localhost@evil.example", False), ("\xff", False)),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_foreign_host_is_refused(host, passes, method):
    assert check(OWN, method, host=host) == ("" if passes else "foreign_host")


@pytest.mark.parametrize(
    ("origin", "passes"),
    [
        *(("http://127.0.0.1:8000", True), ("http://localhost:3000", True), ("http://[::1]", True)),
        *(("https://app.example", True), ("https://app.example:8443", False)),
        *(("https://evil.example", False), ("http://203.0.113.5", False), ("null", False)),
        *(("http://localhost.evil.example", False), ("file://", False), ("http://[", False)),
    ],
)
def test_a_foreign_page_changes_nothing(origin, passes):
    asked = {"host": "127.0.0.1:8000", "origin": origin}
    assert check(OWN, "POST", **asked) == ("" if passes else "foreign_origin")
    assert check(OWN, "GET", **asked) == ""


def test_pages_of_the_server_itself_and_of_all_origins_may_use_it():
    named = Origins("box.lan")
    page = {"host": "box.lan:9000", "origin": "http://box.lan:9000"}
    assert check(named, "POST", **page) == ""
    assert check(named, "POST", host="10.0.0.1:9000", origin="http://10.0.0.1:9000") == ""
    assert check(named, "POST", **page | {"origin": "http://10.0.0.1:9000"}) == "foreign_origin"
    assert check(named, "POST", host="other.lan") == "foreign_host"
    assert check(named, "POST") == ""  # no browser leaves Host out
    assert check(Origins("127.0.0.1", ("*",)), "POST", host="a.example", origin="null") == ""
