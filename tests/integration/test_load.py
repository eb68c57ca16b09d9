"""`prejit load` against real servers: each API, and limits that are missed."""

import json
import sys

import pytest
from tests.extent import one_in
from tests.integration.test_serve import Process
from tests.processes import ran

WINDOW = ("--rate", "20", "--seconds", "1", "--json")


def load(*arguments, status=0):
    """Run the command; return its JSON, or what it printed to stderr where it fails."""
    done = ran(sys.executable, "-m", "prejit.runtime", "load", *arguments, status=status)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr if status else json.loads(done.stdout)


@pytest.fixture(scope="module")
def server(lettered_dir, encoder_dir):
    """A server of a decoder and an encoder."""
    named = (f"letters={lettered_dir}", f"vectors={encoder_dir}")
    process = Process(*named).wait_until_ready()
    yield process
    process.kill()


APIS = [
    ("chat", "letters", True),
    ("completions", "letters", True),
    ("embeddings", "vectors", False),
]


@pytest.mark.parametrize(("api", "model", "has_tokens"), one_in(3, APIS))
def test_each_api_is_measured(server, api, model, has_tokens):
    lengths = ("--prompt-tokens", "2..4", "--new-tokens", "6", "--prefix-tokens", "3")
    url = server.url
    with_login = url.replace("//", "//me:secret@")
    found = load(with_login, *WINDOW, "--api", api, "--model", model, *lengths)
    assert found["server"] == url
    [rate] = found["rates"]
    assert (rate["requests"], rate["failed"], rate["failures"]) == (20, 0, {})
    assert rate["e2e_ms"]["p50"] <= rate["e2e_ms"]["p99"] <= rate["e2e_ms"]["max"]
    assert (rate["ttft_ms"] is not None) is has_tokens
    if has_tokens:
        assert rate["new_tokens"] == 6  # ignore_eos
        assert rate["ttft_ms"]["p50"] <= rate["e2e_ms"]["p50"]
        assert 5 <= rate["prompt_tokens"] <= 40


@pytest.mark.thorough
def test_what_cannot_be_measured_is_said(server, tmp_path):
    url = server.url
    missed = load(url, *WINDOW, "--model", "letters", "--p95-ms", "0.001", status=9)
    assert "expected 95% of the requests within E2E <= 0.001 ms" in missed
    assert "did you mean 'letters'?" in load(url, *WINDOW, "--model", "lettesr", status=2)
    assert "cannot connect" in load("http://127.0.0.1:1", *WINDOW, status=7)
    assert "no-such-bundle" in load(tmp_path / "no-such-bundle", *WINDOW, status=6)
