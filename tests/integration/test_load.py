"""`prejit load` against real servers: each API, a log, a bundle that it serves, limits that are missed."""

import json
import sys

import httpx
import pytest
from tests.extent import one_in
from tests.integration.test_serve import Process
from tests.processes import ran
from tests.waiting import wait_for

WINDOW = ("--rate", "20", "--seconds", "1", "--json")


def load(*arguments, status=0):
    """Run the command; return its JSON, or what it printed to stderr where it fails."""
    done = ran(sys.executable, "-m", "prejit.runtime", "load", *arguments, status=status)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr if status else json.loads(done.stdout)


@pytest.fixture(scope="module")
def server(lettered_dir, encoder_dir, tmp_path_factory):
    """A server of a decoder and an encoder, and its log."""
    log = tmp_path_factory.mktemp("load") / "log.jsonl"
    named = (f"letters={lettered_dir}", f"vectors={encoder_dir}")
    process = Process(*named, "--log", log).wait_until_ready()
    yield process, log
    process.kill()


@pytest.mark.parametrize(
    ("api", "model", "has_tokens"),
    one_in(
        3,
        [
            ("chat", "letters", True),
            ("completions", "letters", True),
            ("embeddings", "vectors", False),
        ],
    ),
)
def test_each_api_is_measured(server, api, model, has_tokens):
    lengths = ("--prompt-tokens", "2..4", "--new-tokens", "6", "--prefix-tokens", "3")
    url = server[0].url
    found = load(
        url.replace("//", "//me:secret@"), *WINDOW, "--api", api, "--model", model, *lengths
    )
    assert found["server"] == url
    [rate] = found["rates"]
    assert (rate["requests"], rate["failed"], rate["failures"]) == (20, 0, {})
    assert rate["e2e_ms"]["p50"] <= rate["e2e_ms"]["p99"] <= rate["e2e_ms"]["max"]
    assert (rate["ttft_ms"] is not None) is has_tokens
    if has_tokens:
        assert rate["new_tokens"] == 6  # ignore_eos
        assert rate["ttft_ms"]["p50"] <= rate["e2e_ms"]["p50"]
        assert 5 <= rate["prompt_tokens"] <= 40


def test_a_log_is_sent_again_at_its_times(server):
    process, log = server
    prompts = {"first": "ab", "second": "abc abc"}
    with httpx.Client(timeout=60) as client:
        for name, prompt in prompts.items():
            body = {"model": "letters", "prompt": prompt, "max_tokens": 3, "ignore_eos": True}
            headers = {"X-Request-Id": name}
            done = client.post(f"{process.url}/v1/completions", json=body, headers=headers)
            assert done.status_code == 200
    logged = []

    def are_logged():  # a line is written after its answer was sent
        lines = [json.loads(each) for each in log.read_text().splitlines()]
        logged[:] = [each for each in lines if each.get("id") in prompts]
        return len(logged) == 2

    wait_for(are_logged)
    part = log.with_name("part.jsonl")
    times = (100.0, 100.5)
    moved = [{**each, "time": at, "seconds": 0} for each, at in zip(logged, times, strict=True)]
    part.write_text("".join(json.dumps(each) + "\n" for each in moved))
    found = load(process.url, "--log", part, "--rate", "log", "--seconds", "2", "--json")
    [rate] = found["rates"]
    assert (rate["rate"], rate["requests"], rate["failed"]) == (2.0, 4, 0)
    assert rate["new_tokens"] == 3


@pytest.mark.thorough
def test_what_cannot_be_measured_is_said(server, tmp_path):
    url = server[0].url
    missed = load(url, *WINDOW, "--model", "letters", "--p95-ms", "0.001", status=9)
    assert "expected 95% of the requests within E2E <= 0.001 ms" in missed
    assert "did you mean 'letters'?" in load(url, *WINDOW, "--model", "lettesr", status=2)
    assert "cannot connect" in load("http://127.0.0.1:1", *WINDOW, status=7)
    assert "no-such-bundle" in load(tmp_path / "no-such-bundle", *WINDOW, status=6)
