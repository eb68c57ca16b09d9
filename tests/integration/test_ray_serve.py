"""A bundle in Ray Serve on this machine: a replica is killed, and no request is lost that had not begun."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from tests.ports import free_port
from tests.ray_cluster import descendants
from tests.waiting import wait_for

pytestmark = [
    # Ray leaves files open.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.thorough,  # Ray takes 40 s of CPU time, and its parts give up on a busy machine
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None or importlib.util.find_spec("bentoml") is None,
        reason="the packages of platforms are not installed: `make test-platforms` does it",
    ),
]
AT_ONCE = 4
"""Requests that a replica takes at once; others wait in the proxy."""
CLIENTS = 16
TOKENS = 32
SETTINGS = {
    **{"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
    # A busy machine.
    **{f"RAY_SERVE_PROXY_{each}_CHECK_TIMEOUT_S": "300" for each in ("READY", "HEALTH")},
    "RAY_agent_register_timeout_ms": "300000",
    **{"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"},
}

_SERVING = """
import sys, time
import ray
from ray import serve
from prejit.server.adapters.ray_serve_app import make_ray_app

path, port, temporary, at_once = sys.argv[1:]
replicas = {"num_replicas": 2, "max_ongoing_requests": int(at_once), "ray_actor_options": {"num_cpus": 0.5}}
app = make_ray_app(path, **replicas)
small = {"num_cpus": 3, "include_dashboard": False, "object_store_memory": 80_000_000}
for begin in (
    lambda: ray.init(address="local", _temp_dir=temporary, **small),
    lambda: serve.start(http_options={"port": int(port)}),
    lambda: serve.run(app),
):
    for _ in range(5):  # Ray waits for 30 or 60 s, which is not enough on a busy machine
        try:
            begin()
            break
        except Exception as error:
            print(error, file=sys.stderr)
            if "startup" in str(error):
                ray.shutdown()
before = 0
while True:
    states = serve.status().applications["default"].deployments["PrejitBundle"].replica_states
    if (running := states.get("RUNNING", 0)) != before:
        print("running", running, flush=True)
        before = running
    time.sleep(0.02)
"""


class Replicas:
    """An application of two replicas in Ray Serve.

    Attributes:
        running: how many replicas answer, by Ray's own status, each time that this changes.
    """

    def __init__(self, path, temporary):
        self.port = free_port()
        self.running = []
        command = map(str, (sys.executable, "-c", _SERVING, path, self.port, temporary, AT_ONCE))
        env = {**os.environ, **SETTINGS}
        self._process = subprocess.Popen([*command], env=env, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            if line.startswith("running "):
                self.running.append(int(line.split()[1]))

    def wait_for(self, *running):
        wait_for(
            lambda: tuple(self.running[-len(running) :]) == running or self._process.poll(),
            800,
            f"expected {running} replicas, found {self.running}",
        )
        assert self._process.poll() is None, "Ray ended"

    def pids(self):
        found = set()
        for each in descendants(self._process.pid):
            with suppress(OSError):
                if "ray::ServeReplica" in Path(f"/proc/{each}/cmdline").read_text():
                    found.add(each)
        return found

    def complete(self, prompt):
        body = {"model": "decoder", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        return httpx.post(url, json=body, timeout=300)

    def close(self):
        found = [*descendants(self._process.pid), self._process.pid]
        for each in found:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self._process.wait()
        self._reader.join()


@contextmanager
def replicas(path):
    started = Replicas(path, f"/tmp/rs{os.getpid()}")  # short: the path of a socket is
    try:
        started.wait_for(2)
        yield started
    finally:
        started.close()


@contextmanager
def clients(service, texts, failures):
    """Threads that send one request after the other until the block ends."""
    ends = threading.Event()

    def send(_):
        while not ends.is_set():
            try:
                found = service.complete("ab").raise_for_status()
                texts.append(found.json()["choices"][0]["text"])
            except httpx.HTTPError as error:
                failures.append(repr(error))

    with ThreadPoolExecutor(CLIENTS) as pool:
        sending = pool.map(send, range(CLIENTS))
        try:
            yield
        finally:
            ends.set()
    list(sending)


def test_a_killed_replica_loses_only_what_it_had_begun(lettered_dir):
    with replicas(lettered_dir) as service:
        both = service.pids()
        assert len(both) == 2
        expected = service.complete("ab").json()["choices"][0]["text"]
        texts, failures = [], []
        with clients(service, texts, failures):
            wait_for(lambda: len(texts) >= 2 * CLIENTS, 300)
            os.kill(min(both), signal.SIGKILL)
            service.wait_for(1, 2)
            count = len(texts)
            wait_for(lambda: len(texts) >= count + 2 * CLIENTS, 300)
            assert len(service.pids() - both) == 1
    assert set(texts) == {expected}
    assert len(failures) <= AT_ONCE, failures
