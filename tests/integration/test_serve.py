"""`prejit serve` and `prejit replay` as processes: what probes, a person at a terminal, and clients see."""

import contextlib
import dataclasses
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import httpx
import numpy as np
import pytest
from tests.fake_registry import fake_registry
from tests.ports import free_port
from tests.waiting import wait_for

from prejit.runtime.__main__ import main
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.shipping import ship

X = np.linspace(-1, 1, 2 * 16, dtype=np.float32).reshape(2, 16)
INFER = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 16], "data": X.tolist()}]}


class Process:
    def __init__(self, *arguments, stdin=subprocess.DEVNULL, port=None, **environment):
        self.port = port or free_port()
        command = [sys.executable, "-m", "prejit.runtime", "serve", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            env={**os.environ, **environment},
            **{"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
        )
        self.errors = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.errors.append(line)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def said(self):
        return "".join(self.errors)

    def wait_until_ready(self):
        return self.wait_until_said("ready in")

    def wait_until_said(self, text, seconds=60):
        wait_for(lambda: text in self.said or self.process.poll() is not None, seconds, text)
        assert text in self.said, self.said
        return self

    def end(self, number=signal.SIGTERM, seconds=60):
        self.process.send_signal(number)
        return self.wait(seconds)

    def wait(self, seconds=60):
        try:
            return self.process.wait(seconds)
        finally:
            self._reader.join()
            for file in (self.process.stdout, self.process.stderr):
                file.close()

    def kill(self):
        self.process.kill()
        self.wait()


def infer(server, content=INFER, **options):
    url = f"{server.url}/v2/models/score/infer"
    return httpx.post(url, json=content, timeout=60, **options)


@pytest.fixture
def foreign_dir(recipe, tmp_path):
    """A bundle for another jaxlib: this machine compiles its programs."""

    def change(config):
        requirement = dataclasses.replace(config.requirement, jaxlib="0.0.1")
        return dataclasses.replace(config, requirement=requirement)

    return recipe.only("cpu-host").configured(change).write(tmp_path / "foreign")


def over(socket_path):
    transport = httpx.HTTPTransport(uds=str(socket_path))
    return httpx.Client(transport=transport, base_url="http://admin", timeout=60)


def check_replay_and_gate(old, new, log, directory, capsys):
    """Check that replay and gate stop a bundle that answers the requests of a log otherwise."""

    def said(*words, status):
        assert main([*map(str, words), "--json"]) == status
        return json.loads(capsys.readouterr().out)

    capsys.readouterr()
    same = said("replay", log, status=0)
    assert (same["equal"], same["skipped"] > 0, same["differences"]) == (3, True, [])
    changed = said("replay", log, "--bundle", new, status=1)
    assert len(changed["differences"]) == 3
    assert "the log is of sha256:" in changed["notes"][0]
    page, comment = directory / "gate.html", directory / "gate.md"
    options = ("--requests", log, "--page", page, "--markdown", comment)
    verdict = said("gate", old, new, *options, status=9)
    assert [each["name"] for each in verdict["checks"] if each["outcome"] == "failed"] == ["tokens"]
    assert (verdict["requests"], len(verdict["differences"])) == (3, 3)
    assert "expected other values" in page.read_text()
    assert comment.read_text().startswith("### The gate stopped the release\n")
    assert main(["gate", f"x={old}", str(new), "--requests", str(log)]) == 2


def test_a_server_from_start_to_replay_of_its_log(
    serve, bundle_dir, make_recipe, tmp_path, capsys, said
):
    path, log = tmp_path / "admin", tmp_path / "log.jsonl"
    with socket.socket(socket.AF_UNIX) as left_behind:  # as by a server that was killed
        left_behind.bind(str(path))
    options = ("--admin", path, "--cors", "https://app.example", "--log", log)
    server = serve(bundle_dir, *options)
    # Nothing was imported yet, and the port takes connections: a client waits instead of being refused.
    wait_until_it_listens(server)
    assert httpx.get(f"{server.url}/health/live", timeout=60).status_code == 200
    server.wait_until_ready()
    assert f"{server.url}  example  ready in " in server.said
    assert f"admin: {path}\n" in server.said
    assert path.stat().st_mode & 0o777 == 0o600
    ready = httpx.get(f"{server.url}/health/ready", timeout=60)
    assert (ready.status_code, ready.json()) == (200, {"state": "ready", "models": ["example"]})
    version = httpx.get(f"{server.url}/version", timeout=60)
    assert version.json() == {"version": metadata.version("prejit")}
    assert httpx.get(f"{server.url}/health", timeout=60).json()["state"] == "ready"
    found = infer(server)
    assert found.status_code == 200
    assert found.json()["outputs"][0]["shape"] == [2, 4]
    page, foreign = ({"Origin": f"https://{name}.example"} for name in ("app", "evil"))
    assert infer(server, headers=page).status_code == 200
    assert infer(server, headers=foreign).status_code == 403
    with over(path) as admin, httpx.Client(timeout=60) as client:
        check_drain(server, admin, client)
    profiled = json.loads(said("profile", f"unix:{path}", "--seconds", "0.1", "--json"))
    assert profiled["seconds"] >= 0.1
    assert server.end() == 0
    assert not path.exists()
    assert "Traceback" not in server.said
    other = make_recipe(score_scale=2.0).write(tmp_path / "other")
    check_replay_and_gate(bundle_dir, other, log, tmp_path, capsys)


def test_a_canary_that_answers_otherwise_is_dropped_alone(serve, bundle_dir, make_recipe, tmp_path):
    other, path = make_recipe(score_scale=2.0).write(tmp_path / "other"), tmp_path / "admin"
    server = serve(bundle_dir, "--admin", path, "--canary", other, "--share", "0%")
    server.wait_until_ready()
    with over(path) as admin:

        def state():
            found = admin.get("/canary").json()["canaries"]
            return found[0] if found else {"stage": ""}

        wait_for(lambda: state()["stage"] in ("sharing", "rolled back"))
        expected = infer(server).json()["outputs"]

        def has_ended():
            assert infer(server).json()["outputs"] == expected
            return state()["stage"] != "sharing"

        wait_for(has_ended)
        ended = state()
        assert (ended["stage"], ended["model"]) == ("rolled back", "example")
        assert "expected other values" in ended["why"]
        assert infer(server).json()["outputs"] == expected
        wrong = [
            ({"bundle": str(other), "model": "x"}, 404, "expected one of the served models"),
            ({}, 400, "expected the release to try, found none"),
            ({"bundle": str(other), "share": "150%"}, 409, "share: expected"),
            ({"action": "abort"}, 409, "expected one of 'example' that runs, found none"),
            ({"action": "stop"}, 400, "action"),
        ]
        for body, status, text in wrong:
            answer = admin.post("/canary", json=body)
            assert (answer.status_code, text in answer.text) == (status, True), answer.text
    assert f"example: canary {other} rolled back: tokens: " in server.said
    assert server.end() == 0
    assert "Traceback" not in server.said


@pytest.mark.thorough
def test_a_swap_that_stalls_holds_up_neither_others_nor_the_end(serve, bundle_dir, tmp_path):
    path = tmp_path / "admin"
    server = serve(bundle_dir, "--admin", path, "--drain-seconds", "1")
    server.wait_until_ready()
    with socket.create_server(("127.0.0.1", 0)) as silent, over(path) as admin:
        reference = f"oci://127.0.0.1:{silent.getsockname()[1]}/x:y"
        with ThreadPoolExecutor(8) as pool:
            swaps = [pool.submit(admin.post, "/swap", json={"bundle": reference}) for _ in range(8)]
            silent.accept()[0].detach()  # it stays open
            assert admin.post("/undrain").status_code == 200
            assert admin.post("/sleep").status_code == 200
            other = {"model": "other", "bundle": str(bundle_dir)}
            assert admin.post("/add", json=other).status_code == 200
            assert admin.post("/swap", json=other).status_code == 200
            assert admin.post("/wake", json={"model": "example"}).status_code == 200
            began = time.monotonic()
            assert server.end() == 0
            assert time.monotonic() - began < 25  # it waits 30 s for a registry
            for each in swaps:
                assert isinstance(each.exception(60), httpx.HTTPError) or each.result().is_error


def check_drain(server, admin, client):
    """A drained server refuses and stays until that is undone."""
    assert admin.post("/drain").json() == {"state": "draining", "idle": True}
    assert client.get(f"{server.url}/health/live").json() == {"state": "draining"}
    probes = [
        client.get(f"{server.url}{url}") for url in ("/health/ready", "/health", "/v2/health/ready")
    ]
    for refused in (*probes, infer(server)):
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
    assert refused.headers["retry-after"]
    assert admin.post("/undrain").json() == {"state": "ready"}
    assert infer(server).status_code == 200
    wrong = admin.get("/drain")
    assert wrong.status_code == 405
    assert wrong.json()["error"]["message"] == "/drain: expected POST, found GET"
    assert admin.get("/metrics").status_code == 404
    for path in ("/profile", "/drain"):
        wrong = client.post(f"{server.url}{path}")  # it is not the users'
        assert wrong.status_code == 404
    assert wrong.json()["error"]["message"].startswith("POST /drain: expected a path of this")


def wait_until_it_listens(server):
    def listens():
        with socket.socket() as trial:
            return trial.connect_ex(("127.0.0.1", server.port)) == 0

    wait_for(listens)


def test_a_server_that_compiles_is_live_and_not_ready(serve, foreign_dir):
    server, states = serve(foreign_dir), []
    wait_until_it_listens(server)
    while not states or states[-1] != "ready":
        found = httpx.get(f"{server.url}/health/ready", timeout=60)
        states.append(found.json()["state"])
        assert (found.status_code == 200) == (states[-1] == "ready")
        if found.status_code == 503:
            assert found.headers["retry-after"]
            assert infer(server).status_code in (200, 503)  # it may have become ready meanwhile
    assert "compiling" in states
    assert "warning: " in server.said
    assert infer(server).status_code == 200
    assert server.end() == 0


@pytest.mark.parametrize(("number", "answers"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_signal_while_it_loads_ends_it(number, answers, serve, foreign_dir):
    server = serve(foreign_dir)
    wait_until_it_listens(server)  # the stack is not imported yet
    if answers:
        assert httpx.get(f"{server.url}/health/live", timeout=60).status_code == 200
    assert server.end(number) == 0


def test_the_admin_address_answers_no_foreign_page_and_a_terminal_may_close(
    serve, bundle_dir, make_recipe, tmp_path
):
    port, (person, terminal) = free_port(), pty.openpty()
    other = make_recipe(score_scale=2.0, name="other").write(tmp_path / "other")
    bundles = (bundle_dir, f"second={other}", "--admin", f"127.0.0.1:{port}")
    server = serve(*bundles, stdin=terminal).wait_until_ready()
    url = f"http://127.0.0.1:{port}/drain"
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        assert httpx.post(url, headers=headers, timeout=60).status_code == 403
    found = httpx.get(f"{server.url}/health", timeout=60)
    assert (found.status_code, found.json()["models"]) == (200, ["example", "second"])
    assert httpx.post(url, timeout=60).status_code == 200
    os.close(terminal)
    os.close(person)
    assert server.end(signal.SIGHUP) == 0
    assert "SIGHUP: finishing what runs" in server.said


def test_keys_and_a_log_that_signals_open_again(serve, bundle_dir, tmp_path):
    keys, log = tmp_path / "keys", tmp_path / "log"
    keys.write_text("alice: 0123456789abcdef\n")
    server = serve(bundle_dir, "--keys", keys, "--log", log, "-vv").wait_until_ready()
    headers = {"Authorization": "Bearer 0123456789abcdef", "X-Request-Id": "mine"}
    for number in (signal.SIGHUP, signal.SIGUSR1):
        log.rename(tmp_path / f"before {number.name}")
        server.process.send_signal(number)
        wait_for(lambda: log.exists() or server.process.poll() is not None)
        assert infer(server).status_code == 401
        assert infer(server, headers=headers).status_code == 200
        assert httpx.get(f"{server.url}/health/ready", timeout=60).status_code == 200
    assert server.end() == 0
    for path in (log, tmp_path / "before SIGUSR1"):
        start, refused, found = (json.loads(line) for line in path.read_text().splitlines())
        assert [start["event"], refused["status"]] == ["start", 401]
        assert (found["id"], found["client"], found["status"]) == ("mine", "alice", 200)
        assert found["calls"][0]["arrays"]["result"]["shape"] == [2, 4]
    assert "target cpu-host, runs its executables" in server.said
    assert "drained: nothing runs" in server.said
    assert "0123456789abcdef" not in server.said


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("{bundle}", "{foreign}", "--on-mismatch", "error"), 3, "error[mismatch]"),
        (("{bundle}", "--port", "{taken}"), 6, "cannot listen"),
        (("{bundle}", "--admin", "{bundle}"), 6, "give another --admin"),
    ],
)
def test_a_server_that_cannot_serve_says_why(
    arguments, status, message, serve, bundle_dir, foreign_dir
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        names = {"bundle": bundle_dir, "foreign": foreign_dir, "taken": port}
        server = serve(*(each.format(**names) for each in arguments))
        assert server.wait() == status, server.said
    assert message in server.said
    assert "Traceback" not in server.said


COMPLETION = {"model": "decoder", "prompt": [1, 2, 3], "max_tokens": 60, "ignore_eos": True}


def complete(server, **changed):
    return httpx.post(f"{server.url}/v1/completions", json=COMPLETION | changed, timeout=120)


def begin_many(server, count):
    """Sends requests at the same time, and returns when the engine has taken them."""
    connections = []
    for seed in range(count):
        body = json.dumps({**COMPLETION, "seed": seed, "temperature": 1.0})
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        connections.append(socket.create_connection(("127.0.0.1", server.port), timeout=100))
        connections[-1].sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    states = ("num_requests_running", "num_requests_waiting", "request_success_total")
    begun = tuple(f"vllm:{state}{{" for state in states)

    def all_are_taken():
        lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(begun)) == count

    wait_for(all_are_taken)
    return connections


def statuses_of(connections):
    found = []
    for each in connections:
        with each:
            content = b""
            while part := each.recv(1 << 16):
                content += part
        head, _, body = content.partition(b"\r\n\r\n")
        json.loads(body)  # whole
        found.append(int(head.split(b" ")[1]))
    return found


def test_what_runs_is_finished_after_a_signal_and_the_rest_is_refused(serve, decoder_dir, tmp_path):
    path = tmp_path / "admin"
    server = serve(decoder_dir, "--slots", "1", "--admin", path).wait_until_ready()
    connections = begin_many(server, 60)
    with over(path) as admin:
        undrain = admin.build_request("POST", "/undrain")
        server.process.send_signal(signal.SIGTERM)
        server.wait_until_said("finishing what runs")
        # All may be finished, and the server may have ended.
        with contextlib.suppress(httpx.TransportError):
            refused = complete(server)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert httpx.get(f"{server.url}/health/ready", timeout=60).status_code == 503
            assert admin.send(undrain).status_code == 409
    assert statuses_of(connections) == [200] * 60
    assert server.wait() == 0


def test_what_is_left_after_the_time_fails_and_the_server_ends(serve, decoder_dir):
    server = serve(decoder_dir, "--slots", "1", "--drain-seconds", "0").wait_until_ready()
    connections = begin_many(server, 200)  # more than it does before the signal comes
    server.process.send_signal(signal.SIGTERM)
    statuses = statuses_of(connections)
    assert set(statuses) <= {200, 503}
    assert 503 in statuses
    assert server.wait() == 0


def test_a_second_signal_ends_at_once(serve, decoder_dir):
    server = serve(decoder_dir, "--slots", "1").wait_until_ready()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        # A request whose body never comes keeps the server from ending by itself.
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        )
        time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until_said("finishing what runs")
        assert server.end(signal.SIGINT) == 128 + signal.SIGINT
    assert "ending at once" in server.said


def test_a_crash_of_native_code_shows_where_each_thread_was(serve, decoder_dir):
    server = serve(decoder_dir).wait_until_ready()
    assert complete(server).status_code == 200
    assert server.end(signal.SIGSEGV) == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in server.said
    assert "engine/generation_loop.py" in server.said


@pytest.mark.thorough
def test_streams_that_clients_left_are_replayed_up_to_there(serve, decoder_dir, tmp_path, said):
    log = tmp_path / "log.jsonl"
    server = serve(decoder_dir, "--log", log, "--slots", "3").wait_until_ready()
    for seed in range(6):
        assert complete(server, seed=seed, temperature=1.0).status_code == 200
    # A replay that runs eight requests at once must not refuse them for its queue.
    for seed in range(8):
        assert complete(server, n=60, seed=seed, max_tokens=2).status_code == 200
    body = {"model": "decoder", "prompt": [4, 5], "max_tokens": 60, "stream": True, "seed": 9}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
    assert server.end() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    calls = [call for line in lines if line["event"] == "request" for call in line["calls"]]
    assert len(calls) == 6 + 8 * 60 + 1
    assert all(call["token_ids"] for call in calls)
    report = json.loads(said("replay", log, "--json"))
    assert (report["equal"], report["differences"]) == (6 + 8 + 1, [])


def test_a_server_whose_stderr_nobody_reads_serves_and_ends(bundle_dir):
    """A collector of logs may die first; the signal after it must not be lost with the message about it."""
    command = [sys.executable, "-m", "prejit.runtime", "serve", str(bundle_dir)]
    command += ["--port", str(free_port())]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert "ready in" in server.stderr.readline()
        server.stderr.close()
        server.send_signal(signal.SIGTERM)
        try:
            assert server.wait(60) == 0
        finally:
            server.kill()


@pytest.mark.thorough
def test_a_server_follows_a_tag_and_ends_amid_a_transfer(serve, bundle_dir, make_recipe, tmp_path):
    versions = [
        bundle_dir,
        *(make_recipe(score_scale=s).write(tmp_path / f"{s}") for s in (2.0, 3.0)),
    ]
    with fake_registry() as registry:
        at = parse_reference(f"oci://{registry.host}/demo:prod")
        digests = [ship(parse_reference(str(versions[0])), at).digest]
        own = {"PREJIT_BUNDLES": str(tmp_path / "store")}
        server = serve(f"m={at}", "--follow", "1", **own).wait_until_ready()

        def root():
            return httpx.get(f"{server.url}/v1/models").json()["data"][0]["root"]

        assert root() == digests[0]
        before = infer(server).json()["outputs"][0]["data"]
        digests.append(ship(parse_reference(str(versions[1])), at).digest)
        server.wait_until_said(f"m: swapped {digests[0]} for {digests[1]} of {at}")
        assert root() == digests[1]
        assert infer(server).json()["outputs"][0]["data"] != before
        stalls = threading.Event()

        def stall(method, path):
            if method == "GET" and "/blobs/" in path:
                stalls.set()
                time.sleep(20)

        registry.fault = stall
        ship(parse_reference(str(versions[2])), at)
        assert stalls.wait(60)
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 15
