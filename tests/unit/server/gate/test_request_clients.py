"""One key gets no more than its share and learns nothing of others; who goes ends what it waits for."""

import asyncio
import contextlib
import gc

import httpx
import pytest
from starlette.requests import ClientDisconnect
from tests.unit.server.running import running, served

from prejit.runtime import load
from prejit.server.gate.api_keys import Keys
from prejit.server.gate.http_errors import ApiError
from prejit.server.gate.request_clients import Origins, unless_gone
from prejit.server.gate.server_settings import Settings
from prejit.server.served.served import Models

KEYS = """\
other: sk-other-0
few: sk-few-000 waiting=1 running=1
urgent: sk-urgent- priority=-5..5
late: sk-late-00 priority=3..9
metered: sk-metered tokens_per_minute=60
"""


@pytest.fixture(scope="module")
def models(wide_dir):
    bundle = load(wide_dir, on_mismatch="error")
    with contextlib.closing(Models(served(bundle, "m", slots=2, queue=4))) as found:
        yield found


@pytest.fixture
def server(models, tmp_path):
    (tmp_path / "keys.txt").write_text(KEYS)
    with running(models, Settings(keys=Keys(tmp_path / "keys.txt"))) as found:
        yield found


def ask(server, key, **fields):
    body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0, **fields}
    headers = {"Authorization": f"Bearer sk-{key:-<7}"}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def test_a_key_has_no_priority_outside_of_its_range(server, models):
    for key, given, status in (
        *(("other-0", -1, 400), ("other-0", -2_000_000_000, 400), ("other-0", 5, 200)),
        *(("urgent-", -5, 200), ("urgent-", 6, 400), ("late-00", 0, 400), ("late-00", None, 200)),
    ):
        found = ask(server, key, **({} if given is None else {"priority": given}))
        assert found.status_code == status
        if status == 400:
            assert found.json()["error"]["param"] == "priority"
            assert f"found {given}" in found.json()["error"]["message"]
    with running(models, Settings()) as server:  # nobody goes before the others
        assert [ask(server, "", priority=given).status_code for given in (-1, 1)] == [400, 200]


def test_a_key_has_no_more_than_its_share_and_finds_no_prompt_of_another(server):
    fields = {"max_tokens": 60, "ignore_eos": True}
    # Nobody knew how long it would be.
    assert ask(server, "metered", **fields).status_code == 200
    refused = ask(server, "metered", **fields)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["Retry-After"]) <= 5  # 63 tokens of 60, one each second
    assert "60 tokens a minute" in refused.json()["error"]["message"]
    assert ask(server, "other-0").status_code == 200
    refused = ask(server, "few-000", n=4)
    assert refused.status_code == 400  # 429 would say that it may be tried again
    assert "requests of this key may wait" in refused.json()["error"]["message"]

    def cached(key):
        usage = ask(server, key, prompt=list(range(5, 45))).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("other-0") == 0
    assert cached("other-0") == 39
    assert cached("urgent-") == 0


@pytest.mark.parametrize("count", [1, 2])
def test_several_values_that_nobody_waits_for_any_more_are_no_news(count):
    reported = []

    async def gone():
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def leave():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        wanted = [loop.create_future() for _ in range(count)]
        with pytest.raises(ClientDisconnect):
            await unless_gone(gone, asyncio.gather(*wanted))
        assert all(each.cancelled() for each in wanted)
        await asyncio.sleep(0)

    asyncio.run(leave())
    gc.collect()
    assert reported == []


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
