"""Models that share one server's memory sleep and wake, and their clients get the same tokens."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.integration.test_serve import Process, over
from tests.lettered import write_lettered
from tests.waiting import wait_for

from prejit.runtime import load
from prejit.server import Engine

pytestmark = pytest.mark.thorough

TOKENS = 24
PROMPTS = [f"{number} name abc 12 " for number in range(4)]


class Model:
    """A bundle with what it answers, and how much memory its engine needs."""

    def __init__(self, path):
        self.path = path
        options = {"max_new_tokens": TOKENS, "temperature": 0, "stop_token_ids": ()}
        with load(path, on_mismatch="error") as bundle:
            self.need = Engine(bundle).sleeper.need_bytes
            self.texts = {each: bundle.generate(each, **options).text for each in PROMPTS}


@pytest.fixture(scope="module")
def models(make_decoder, tmp_path_factory):
    buckets = {"batch": (1, 8), "prompt": (16,), "context": (64,)}  # as in campaigns/test_swaps.py
    found = {}
    for name, layers in (("a", 2), ("b", 1)):
        source = write_lettered(tmp_path_factory.mktemp("model") / name, n_layer=layers)
        found[name] = Model(make_decoder(source, **buckets))
    return found


class Server:
    """A server of both models, with memory for one of them."""

    def __init__(self, models, socket_path):
        self._models = models
        limit = max(model.need for model in models.values())
        assert limit < sum(model.need for model in models.values())
        self.process = Process(
            *(f"{name}={model.path}" for name, model in models.items()),
            *("--memory", str(limit), "--admin", socket_path, "-v"),
        ).wait_until_ready()
        self.admin = over(socket_path)

    def ask(self, name, number):
        """Ask a model, and compare its text; return the status. Others than 200 have no text."""
        prompt = PROMPTS[number % len(PROMPTS)]
        body = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        url = f"{self.process.url}/v1/completions"
        answer = httpx.post(url, json={**body, "ignore_eos": True}, timeout=60)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == self._models[name].texts[prompt]
        return answer.status_code

    def change(self, path, **body):
        return self.admin.post(path, json=body)

    def sleeping(self):
        return httpx.get(f"{self.process.url}/health/ready").json().get("sleeping", [])

    def metric(self, name, model):
        lines = httpx.get(f"{self.process.url}/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f'{name}{{model_name="{model}"}}')]
        return float(found[0].split()[-1])

    def own_bytes(self):
        text = Path(f"/proc/{self.process.process.pid}/status").read_text()
        return next(int(x.split()[1]) << 10 for x in text.splitlines() if x.startswith("RssAnon"))

    def asleep(self, name):
        wait_for(lambda: self.change("/sleep", model=name).status_code == 200)
        return self.own_bytes()


@pytest.fixture
def server(models, tmp_path):
    found = Server(models, tmp_path / "admin")
    yield found
    found.admin.close()
    found.process.kill()


def test_two_models_take_turns_in_the_memory_of_one(server, lettered_dir):
    assert server.sleeping() == ["a", "b"]
    for number in range(4):
        name = "ab"[number % 2]
        assert server.ask(name, number) == 200
        assert server.sleeping() == ["ba"[number % 2]]
    with ThreadPoolExecutor(8) as pool:
        assert {*pool.map(lambda n: server.ask("ab"[n % 2], n), range(32))} == {200}
    assert server.metric("prejit_sleeps_total", "a") >= 2
    assert (wakes := server.metric("prejit_wakes_total", "b")) >= 2
    assert server.metric("prejit_wake_seconds_count", "b") == wakes
    # What it gives back, measured here.
    _, first = server.asleep("a"), server.asleep("b")
    assert server.change("/wake", model="a").json() == {"model": "a", "is_sleeping": False}
    assert server.ask("a", 0) == 200
    awake = server.own_bytes()
    again = server.asleep("a")
    assert awake > first
    assert again < first + (awake - first) / 2, (first, awake, again)
    # What cannot fit is refused with the numbers, and the others go on.
    for path, body in (("/add", {"model": "c"}), ("/swap", {"model": "b"})):
        refused = server.change(path, bundle=str(lettered_dir), **body)
        assert refused.status_code == 507, refused.text
        assert "bytes for its programs, found " in refused.json()["error"]["message"]
    assert server.change("/sleep", model="c").status_code == 404
    assert [server.ask(name, 1) for name in "ab"] == [200, 200]
    assert server.process.end() == 0
    assert "Traceback" not in server.process.said, server.process.said


def test_a_model_is_added_and_removed_while_others_run(server, models):
    with ThreadPoolExecutor(4) as pool:
        asking = pool.map(lambda n: server.ask("ab"[n % 2], n), range(24))
        while (added := server.change("/add", model="c", bundle=str(models["a"].path))).is_error:
            assert added.status_code == 507, added.text  # both models are busy now
        server._models = {**models, "c": models["a"]}
        assert server.ask("c", 1) == 200
        assert server.change("/add", model="c", bundle=str(models["a"].path)).status_code == 409
        assert server.change("/add", bundle=str(models["a"].path / "none")).status_code == 409
        assert server.change("/add").status_code == 400
        for name in ("a\nb", "a\0b", "a//b", "-a", " a"):
            refused = server.change("/add", model=name, bundle=str(models["a"].path))
            assert refused.status_code == 400
            assert "model: expected a letter or a digit, then" in refused.json()["error"]["message"]
        assert server.change("/remove", model="c").status_code == 200
        assert server.ask("c", 1) == 404
        assert {*asking} == {200}
    server.process.wait_until_said("c: freed")
