"""A web page that reaches a server of this machine must not use it, by its own name or by another's."""

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


def test_a_foreign_host_is_refused():
    own = "localhost localhost:8000 LocalHost.:80 127.0.0.1:8000 [::1]:8000 10.1.2.3:8000"
    foreign = "evil.example evil.example:8000 localhost.evil.example notlocalhost"
    foreign += " 127.0.0.1.evil.example [evil localhost@evil.example \xff"
    for method in ("GET", "POST"):
        for host in (*own.split(), "me.localhost:1", "app.example"):
            assert check(OWN, method, host=host) == "", host
        for host in foreign.split():
            assert check(OWN, method, host=host) == "foreign_host", host


def test_a_foreign_page_changes_nothing():
    own = "http://127.0.0.1:8000 http://localhost:3000 http://[::1] https://app.example"
    foreign = "https://app.example:8443 https://evil.example http://203.0.113.5 null"
    foreign += " http://localhost.evil.example file:// http://["
    for origin in (*own.split(), *foreign.split()):
        asked = {"host": "127.0.0.1:8000", "origin": origin}
        refusal = "foreign_origin" if origin in foreign.split() else ""
        assert check(OWN, "POST", **asked) == refusal, origin
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
