"""A server whose model gives wrong answers must not stay ready, and one that is right again must."""

import shutil
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.unit.server.running import Running, running, served, wait_for

from prejit.runtime import Bundle, load
from prejit.server.gate.server_settings import Settings
from prejit.server.served.answer_checks import AnswerChecks
from prejit.server.served.served import Models


@dataclass
class Server:
    """A server and the file of its weights."""

    running: Running
    models: Models
    weights: Path

    def get(self, path):
        return httpx.get(f"{self.running.url}{path}", timeout=60)

    def completion(self):
        """Return the status of a completion."""
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.running.url}/v1/completions", json=body, timeout=60).status_code

    def readiness(self):
        return [self.get(path).status_code for path in ("/health/ready", "/v2/health/ready")]

    def change_weights(self, change):
        """Overwrite the weights in place; return what was there."""
        before = self.weights.read_bytes()
        first = 8 + int.from_bytes(before[:8], "little")
        first += -first % 64
        values = np.frombuffer(before[first : len(before) // 4 * 4], np.float32)
        changed = np.ascontiguousarray(change(values), np.float32).tobytes()
        self.write(before[:first] + changed + before[first + len(changed) :])
        return before

    def write(self, content):
        with open(self.weights, "r+b") as file:  # in place: it is mapped
            file.write(content)


@pytest.fixture
def server(decoder_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("prejit.server.served.answer_checks._PAUSE_SECONDS", 0.01)
    own = tmp_path / "own"
    shutil.copytree(decoder_dir, own)
    blobs = own.glob("blobs/sha256/*")
    weights = next(file for file in blobs if file.read_bytes()[4:9] == b"\0\0\0\0{")
    bundle = load(own, on_mismatch="error")
    with closing(Models(served(bundle, "m", slots=1))) as models:
        with running(models, Settings()) as found:
            yield Server(found, models, weights)


def test_a_server_is_not_ready_while_requests_fail(server, capsys):
    assert server.completion() == 200
    with closing(AnswerChecks(server.models, None)):
        before = server.change_weights(lambda values: np.full_like(values, np.nan))
        assert server.completion() == 500
        wait_for(lambda: server.readiness() == [503, 503])
        assert "m" in server.get("/health/ready").json()["wrong_answers"]
        assert server.get("/health/live").status_code == 200
        server.write(before)
        wait_for(lambda: server.readiness() == [200, 200])
        assert server.completion() == 200
    assert capsys.readouterr().err.count("m: not ready, because a golden answer is wrong") == 1


@pytest.mark.parametrize("every", [None, 0.01])
def test_finite_garbage_is_found_by_a_check_at_an_interval(server, every):
    def logprobs():
        return server.models.get("m").engine.generate([1, 2], max_new_tokens=2, logprobs=0).logprobs

    right = logprobs()
    with closing(AnswerChecks(server.models, every)):
        server.change_weights(lambda values: values[::-1] * 3)
        assert server.completion() == 200
        assert logprobs() != right
        wait_for(lambda: server.readiness() == [200 if every is None else 503] * 2)


def test_requests_that_fail_do_not_make_checks_without_end(server, monkeypatch):
    checks, check = [], Bundle.wrong_answers
    monkeypatch.setattr(Bundle, "wrong_answers", lambda self: checks.append(1) or check(self))
    monkeypatch.setattr("prejit.server.served.answer_checks._PAUSE_SECONDS", 3600)
    with closing(AnswerChecks(server.models, None)):
        server.models.suspected.set()
        wait_for(lambda: checks)
        for _ in range(20):
            server.models.suspected.set()
            time.sleep(0.005)
    assert len(checks) == 1


def test_a_model_that_sleeps_is_not_woken_to_be_checked(server):
    assert server.completion() == 200
    (one,) = server.models
    wait_for(one.engine.sleep)
    with closing(AnswerChecks(server.models, 0.01)):
        time.sleep(0.2)
        server.models.suspected.set()
        time.sleep(0.2)
        assert one.bundle._programs._ready == {}
        assert server.get("/health/ready").json()["sleeping"] == ["m"]
        assert server.completion() == 200
        assert one.bundle._programs._ready


def test_a_server_that_ends_does_not_wait_for_a_check_that_takes_long(server, monkeypatch):
    began, ends = threading.Event(), threading.Event()

    def answers(bundle):
        began.set()
        assert ends.wait(60)
        yield from ()

    monkeypatch.setattr(Bundle, "wrong_answers", answers)
    monkeypatch.setattr("prejit.server.served.answer_checks._CLOSE_SECONDS", 0.1)
    with closing(AnswerChecks(server.models, 0.01)) as checks:
        assert began.wait(60)
        late = threading.Timer(5, ends.set)
        late.start()
        assert not checks.close()
        assert not ends.is_set()
        late.cancel()
        ends.set()
        wait_for(checks.close)
