"""`prejit serve` and `prejit replay` as processes: what probes, a person at a terminal, and clients see."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

X = np.linspace(-1, 1, 2 * 16, dtype=np.float32).reshape(2, 16)
INFER = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 16], "data": X.tolist()}]}


class Process:
    """A server as a process of its own."""

    def __init__(self, *arguments: str | Path, **environment: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "prejit.runtime", "serve", *map(str, arguments)]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def said(self) -> str:
        return "".join(self.errors)

    def wait_until_ready(self, seconds: float = 60) -> Process:
        while not any("ready in" in line for line in self.errors):
            assert self.process.poll() is None, self.said
            assert time.monotonic() - self.started < seconds, self.said
            time.sleep(0.01)
        return self

    def end(self, number: int = signal.SIGTERM, seconds: float = 60) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        return self.wait(seconds)

    def wait(self, seconds: float = 60) -> int:
        try:
            return self.process.wait(seconds)
        finally:
            self._reader.join()
            for file in (self.process.stdout, self.process.stderr):
                assert file is not None
                file.close()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        if self._reader.is_alive() or self.process.returncode is None:
            self.wait()


Serve = Callable[..., Process]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server; it ends with the test."""
    begun: list[Process] = []

    def start(*arguments: str | Path, **environment: str) -> Process:
        begun.append(Process(*arguments, **environment))
        return begun[-1]

    yield start
    for each in begun:
        each.kill()


@pytest.fixture
def foreign_dir(recipe: Any, tmp_path: Path) -> Path:
    """A bundle for another jaxlib: this machine compiles its programs."""

    def change(config: Any) -> Any:
        requirement = dataclasses.replace(config.requirement, jaxlib="0.0.1")
        return dataclasses.replace(config, requirement=requirement)

    found: Path = recipe.only("cpu-host").configured(change).write(tmp_path / "foreign")
    return found


def test_a_server_starts_answers_and_ends_in_order(serve: Serve, bundle_dir: Path) -> None:
    server = serve(bundle_dir)
    # Nothing was imported yet, and the port takes connections: a client waits instead of being refused.
    live = httpx.get(f"{server.url}/health/live", timeout=60) if _binds(server) else None
    assert live is not None
    assert live.status_code == 200
    server.wait_until_ready()
    ready = httpx.get(f"{server.url}/health/ready")
    assert (ready.status_code, ready.json()) == (200, {"state": "ready", "models": ["example"]})
    assert f"{server.url}  example  ready in " in server.said
    found = httpx.post(f"{server.url}/v2/models/score/infer", json=INFER)
    assert found.status_code == 200
    assert found.json()["outputs"][0]["shape"] == [2, 4]
    assert server.end() == 0
    assert "Traceback" not in server.said


def _binds(server: Process) -> bool:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", server.port)).close()
        except ConnectionRefusedError:
            time.sleep(0.005)
        else:
            return True
    return False


def test_a_server_that_compiles_is_live_and_not_ready(serve: Serve, foreign_dir: Path) -> None:
    server = serve(foreign_dir)
    states = []
    assert _binds(server)
    while not states or states[-1] != "ready":
        found = httpx.get(f"{server.url}/health/ready", timeout=60)
        states.append(found.json()["state"])
        assert (found.status_code == 200) == (states[-1] == "ready")
        if found.status_code == 503:
            assert found.headers["retry-after"]
            refused = httpx.post(f"{server.url}/v2/models/score/infer", json=INFER, timeout=60)
            assert refused.status_code in (200, 503)  # it may have become ready meanwhile
    assert "compiling" in states
    assert "warning: " in server.said
    assert httpx.post(f"{server.url}/v2/models/score/infer", json=INFER).status_code == 200
    assert server.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_loads_ends_it(number: int, serve: Serve, foreign_dir: Path) -> None:
    server = serve(foreign_dir)
    assert _binds(server)
    assert httpx.get(f"{server.url}/health/live", timeout=60).status_code == 200
    assert server.end(number) == 0


def test_a_drained_server_refuses_and_stays(serve: Serve, bundle_dir: Path) -> None:
    server = serve(bundle_dir).wait_until_ready()
    assert httpx.post(f"{server.url}/drain").json() == {"state": "draining", "idle": True}
    assert httpx.get(f"{server.url}/health/ready").status_code == 503
    assert httpx.get(f"{server.url}/health/live").status_code == 200
    refused = httpx.post(f"{server.url}/v2/models/score/infer", json=INFER)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert server.process.poll() is None
    assert server.end() == 0


def test_two_bundles_have_two_names(
    serve: Serve, bundle_dir: Path, make_recipe: Any, tmp_path: Path
) -> None:
    other = make_recipe(score_scale=2.0, name="other").write(tmp_path / "other")
    server = serve(bundle_dir, f"second={other}").wait_until_ready()
    assert httpx.get(f"{server.url}/health/ready").json()["models"] == ["example", "second"]
    assert server.end() == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("{bundle}", "{foreign}", "--on-mismatch", "error"), 3, "error[mismatch]"),
        (("{missing}",), 6, "error[store]"),
        (("{bundle}", "{bundle}"), 2, "two bundles named 'example'"),
        (("a={bundle}", "a={bundle}"), 2, "found 'a' twice"),
        (("{bundle}", "--keys", "{missing}"), 6, "cannot read the keys"),
        (("{bundle}", "--log", "{missing}/log"), 6, "cannot write the log"),
        (("{bundle}", "--host", "192.0.2.1"), 6, "cannot listen"),
        (("{bundle}", "--slots", "0"), 2, "expected 1 or more"),
    ],
)
def test_a_server_that_cannot_serve_says_why_and_ends(
    arguments: tuple[str, ...],
    status: int,
    message: str,
    serve: Serve,
    bundle_dir: Path,
    foreign_dir: Path,
    tmp_path: Path,
) -> None:
    names = {"bundle": bundle_dir, "foreign": foreign_dir, "missing": tmp_path / "missing"}
    server = serve(*(each.format(**names) for each in arguments))
    assert server.wait() == status, server.said
    assert message in server.said
    assert "Traceback" not in server.said


def test_a_port_that_another_server_has_is_an_error(serve: Serve, bundle_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = serve(bundle_dir, "--port", str(taken.getsockname()[1]))
        server.port = 0
        command = [sys.executable, "-m", "prejit.runtime", "serve", str(bundle_dir), "--port"]
        done = subprocess.run(
            [*command, str(taken.getsockname()[1])],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 6
    assert "cannot listen" in done.stderr


def test_keys_and_a_log_of_requests(serve: Serve, bundle_dir: Path, tmp_path: Path) -> None:
    keys, log = tmp_path / "keys", tmp_path / "log.jsonl"
    keys.write_text("alice: 0123456789abcdef\n")
    server = serve(bundle_dir, "--keys", keys, "--log", log).wait_until_ready()
    url = f"{server.url}/v2/models/score/infer"
    assert httpx.post(url, json=INFER).status_code == 401
    headers = {"Authorization": "Bearer 0123456789abcdef", "X-Request-Id": "mine"}
    assert httpx.post(url, json=INFER, headers=headers).status_code == 200
    assert httpx.get(f"{server.url}/health/ready").status_code == 200
    assert server.end() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[0]["event"] == "start"
    found = next(line for line in lines if line.get("id") == "mine")
    assert (found["client"], found["status"]) == ("alice", 200)
    assert found["calls"][0]["arrays"]["result"]["shape"] == [2, 4]


def replay(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prejit.runtime", "replay", *map(str, arguments), "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_log_is_replayed_and_a_changed_bundle_is_found(
    serve: Serve, bundle_dir: Path, make_recipe: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    server = serve(bundle_dir, "--log", log).wait_until_ready()
    for _ in range(3):
        assert httpx.post(f"{server.url}/v2/models/score/infer", json=INFER).is_success
    assert httpx.post(f"{server.url}/v2/models/none/infer", json=INFER).status_code == 404
    assert server.end() == 0
    same = replay(log)
    assert same.returncode == 0, same.stderr
    report = json.loads(same.stdout)
    assert (report["equal"], report["skipped"], report["differences"]) == (3, 1, [])
    other = make_recipe(score_scale=2.0).write(tmp_path / "other")
    changed = replay(log, "--bundle", other)
    assert changed.returncode == 1, changed.stderr
    report = json.loads(changed.stdout)
    assert len(report["differences"]) == 3
    assert "the log is of sha256:" in report["notes"][0]
