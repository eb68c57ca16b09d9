"""Drills of production faults: clients see what is documented, the alert fires, and its runbook helps."""

import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.integration.test_serve import INFER, infer
from tests.store_servers import docker_registry, running
from tests.waiting import wait_for

from .campaign import ROOT
from .drill_stage import FETCH, Stage, another_jaxlib, damage, small_disk, weights_file
from .faults import compile_shim
from .honest_clients import KEYS, expected

pytestmark = pytest.mark.thorough
SWAP = """curl --fail --silent --unix-socket ADMIN -X POST http://admin/swap -d '{"bundle": "BUNDLE"}'"""
DRAIN = "curl --fail --silent --unix-socket ADMIN -X POST http://admin/drain"
SWAPPED = "`curl ... -X POST http://admin/swap` with the right bundle"
STARTED = f"`{FETCH}`, and a start with that"
DAY = 86_400
STORM = 16
CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.fixture(scope="module")
def answers(lettered_dir):
    return expected(lettered_dir)


@pytest.fixture
def make_stage(request, tmp_path):
    with contextlib.ExitStack() as ends:

        def make(source, answers):
            name = request.node.name.removeprefix("test_")
            found = Stage(name, tmp_path, source, answers)
            ends.callback(found.close)
            return found

        yield make


@pytest.fixture
def stage(make_stage, lettered_dir, answers):
    return make_stage(lettered_dir, answers)


def test_a_killed_server(stage):
    killed, other = stage.serve(), stage.serve()
    stage.begin_watch()
    cut, beside = stage.load(killed), stage.load(other)
    assert not cut.failures
    killed.kill()
    stage.alert("PrejitDown")
    assert stage.watch.value("up") == 1
    cut.end()
    assert cut.failures
    assert cut.texts <= stage.answers
    stage.follow("prejit verify BUNDLE", BUNDLE=stage.bundle)
    assert "`prejit serve BUNDLE`" in (stage.watch.runbooks / "PrejitDown.md").read_text()
    again = stage.serve(port=killed.port).wait_until_ready()
    stage.end_alert()
    requests = stage.check(beside, stage.load(again))
    assert stage.watch.fired() == {"PrejitDown"}
    stage.record(
        "one of two servers is killed (SIGKILL)",
        f"those of the other: 0 of {requests} failed; those of the killed one: no connection",
        "up 1 to 0",
        "`prejit serve BUNDLE`",
    )


def test_a_bundle_damaged_before_a_restart(stage):
    restarted, other = stage.serve(), stage.serve(stage.source)
    stage.begin_watch()
    beside = stage.load(other)
    assert restarted.end() == 0
    damage(weights_file(stage.bundle))
    refused = stage.serve(port=restarted.port)
    assert refused.wait() == 4
    assert "error[reject]" in refused.said
    stage.alert("PrejitDown")
    found = stage.follow("prejit verify BUNDLE", status=4, BUNDLE=stage.bundle)
    assert weights_file(stage.bundle).name[:12] in found.stderr
    again = stage.serve(stage.fetched(), port=restarted.port).wait_until_ready()
    stage.end_alert()
    requests = stage.check(beside, stage.load(again))
    assert stage.watch.fired() == {"PrejitDown"}
    stage.record(
        "bytes of the weights change before a restart",
        f"0 of {requests} failed: the server refuses the bundle and ends with status 4",
        "up 1 to 0",
        STARTED,
    )


def test_a_bundle_damaged_under_a_server(stage):
    damaged = stage.serve(stage.bundle, "--check-seconds", "1", "--admin", stage.admin)
    other = stage.serve(stage.source)
    stage.begin_watch()
    hurt, beside = stage.load(damaged), stage.load(other)
    damage(weights_file(stage.bundle))
    stage.alert("PrejitWrongAnswers")
    ready = httpx.get(f"{damaged.url}/health/ready", timeout=60)
    assert (ready.status_code, "wrong_answers" in ready.json()) == (503, True)
    stage.follow(DRAIN, ADMIN=stage.admin)
    hurt.end()
    wrong = len(hurt.texts - stage.answers)
    fresh = stage.fetched()
    assert damaged.end() == 0
    again = stage.serve(fresh, port=damaged.port).wait_until_ready()
    stage.end_alert()
    requests = stage.check(beside, stage.load(again))
    assert stage.watch.fired("page") - {"PrejitDown"} == {"PrejitWrongAnswers"}
    stage.record(
        "bytes of the weights change under a running server (`--check-seconds 1`)",
        f"0 of {requests} failed at the others; this one gave {wrong} wrong texts until it was drained",
        "prejit_wrong_answers 0 to 1",
        STARTED,
    )


def test_a_swap_to_a_damaged_bundle(stage):
    server = stage.serve(f"m={stage.source}", "--admin", stage.admin)
    stage.begin_watch()
    beside = stage.load(server)
    damage(weights_file(stage.bundle))
    failed, metric = "PrejitSwapFailed", 'prejit_swaps_total{outcome="failed"}'
    by_curl = 22  # the server answered an error
    stage.follow(SWAP, status=by_curl, alert=failed, ADMIN=stage.admin, BUNDLE=stage.bundle)
    stage.alert(failed)
    assert stage.watch.value(metric) == 1
    stage.follow(SWAP, ADMIN=stage.admin, BUNDLE=stage.source)
    stage.end_alert()
    requests = stage.check(beside)
    assert stage.watch.fired() == {failed}
    clients = f"0 of {requests} failed, all from the bundle before"
    stage.record("a swap to a damaged bundle", clients, f"{metric} 0 to 1", SWAPPED)


def test_shapes_that_no_bucket_has(make_recipe, tmp_path, make_stage):
    before = make_recipe().write(tmp_path / "before")
    after = make_recipe(buckets=(2, 8, 32)).write(tmp_path / "after")
    stage = make_stage(before, set())
    server = stage.serve(f"m={before}", "--admin", stage.admin)
    stage.begin_watch()
    url = f"{server.url}/v2/models/score/infer"
    right = infer(server).json()["outputs"][0]["data"]
    ends, seen = threading.Event(), []

    def send():
        with httpx.Client(timeout=120) as client:
            while not ends.is_set():
                answer = client.post(url, json=INFER)
                seen.append((answer.status_code, answer.json()["outputs"][0]["data"]))
                time.sleep(0.05)

    honest = threading.Thread(target=send)
    honest.start()
    try:
        strange = [
            {"inputs": [{**INFER["inputs"][0], "shape": [rows, 16], "data": [0.5] * rows * 16}]}
            for rows in (9, 11, 32)
        ]
        for each in strange * 10:
            refused = infer(server, each)
            assert refused.status_code == 400
            assert "buckets" in refused.text
        counted = 'prejit_http_requests_total{status="400"}'
        wait_for(lambda: stage.watch.value(counted) == 30, what="the refused are not counted")
        assert stage.watch.value("prejit_compile_seconds_total") == 0
        stage.follow(SWAP, alert="PrejitRequestsCompile", ADMIN=stage.admin, BUNDLE=after)
        assert infer(server, strange[-1]).status_code == 200  # a call of the new bucket
    finally:
        ends.set()
        honest.join()
    assert {status for status, _ in seen} == {200}
    assert all(data == pytest.approx(right, rel=1e-5) for _, data in seen)
    assert stage.watch.fired() == set()
    stage.record(
        "calls with sizes that no bucket has",
        f"0 of {len(seen)} with sizes of buckets failed; the others got 400, and nothing was compiled",
        f"{counted} 0 to 30",
        SWAPPED,
    )


def test_another_jaxlib_at_a_restart(stage):
    other, packages = another_jaxlib()
    changed, beside = stage.serve(), stage.serve()
    stage.begin_watch()
    honest = stage.load(beside)
    assert changed.end() == 0
    slow = stage.serve(port=changed.port, PYTHONPATH=str(packages))
    slow.wait_until_said("ready in", 300)
    fallen = stage.load(slow)
    stage.alert("PrejitFallback")
    metric = 'prejit_fallbacks_total{axis="jaxlib"}'
    assert stage.watch.value(metric) > 0
    explain = "prejit explain BUNDLE"
    env = {"PYTHONPATH": str(packages)}
    explained = stage.watch.follow("PrejitFallback", explain, env=env, BUNDLE=stage.bundle)
    assert "jaxlib" in explained.stdout
    assert other in explained.stdout
    requests = stage.check(fallen)
    assert slow.end() == 0
    again = stage.serve(port=changed.port).wait_until_ready()
    stage.end_alert()
    requests += stage.check(honest, stage.load(again))
    # A busy machine may compile for longer than 5 minutes / 15. That alert's runbook gives the same command.
    assert stage.watch.fired("page") <= {"PrejitDown", "PrejitNotReady"}
    assert explain in (stage.watch.runbooks / "PrejitNotReady.md").read_text()
    stage.record(
        f"a server starts again with jaxlib {other}",
        f"0 of {requests} failed, no token changed; this server compiles before it is ready",
        f"{metric} 0 to 1",
        f"`{explain}` names `jaxlib`; a start with that of the target",
    )


def test_a_full_disk(stage):
    with small_disk(stage.directory / "disk") as disk:
        log, other = disk / "log.jsonl", disk / "of another program"
        server = stage.serve(f"m={stage.bundle}", "--log", log)
        stage.begin_watch()
        beside = stage.load(server)
        with contextlib.suppress(OSError), other.open("wb", buffering=0) as filling:
            while filling.write(bytes(1024)):
                pass
        stage.alert("PrejitLogLinesLost")
        assert "100%" in stage.follow("df --human-readable DIRECTORY", DIRECTORY=disk).stdout
        lost = stage.watch.value("prejit_log_lines_lost_total")
        other.unlink()
        moved = shutil.copyfile(log, stage.directory / "moved.jsonl")
        log.unlink()
        stage.follow("kill -USR1 PID", PID=str(server.process.pid))
        wait_for(lambda: log.exists() and log.stat().st_size > 2000, what="the log does not go on")
        requests = stage.check(beside)
        assert server.end() == 0
        stage.follow("prejit replay LOG", LOG=moved)
        assert stage.watch.fired() - {"PrejitDown"} == {"PrejitLogLinesLost"}
    stage.record(
        "the disk of the log is full",
        f"0 of {requests} failed",
        f"prejit_log_lines_lost_total 0 to {lost:.0f}",
        "room on the disk, and `kill -USR1 PID`",
    )


@pytest.mark.parametrize("days", [1, -1])
def test_a_clock_that_jumps(stage, days):
    state, log = stage.directory / "state", stage.directory / "log.jsonl"
    state.write_bytes(bytes(64))
    server = stage.serve(
        f"m={stage.bundle}",
        *("--log", log, "--timeout", "20", "--check-seconds", "1"),
        LD_PRELOAD=str(compile_shim(stage.directory)),
        FAULTS_ROOT=str(stage.directory / "none"),
        FAULTS_STATE=str(state),
    )
    stage.begin_watch()
    beside = stage.load(server)
    before = beside.requests
    with state.open("r+b") as opened:
        opened.seek(24)  # `clock_jumped` of faults.c
        opened.write(struct.pack("=q", days * DAY))
    wait_for(lambda: beside.requests > before + 50, what="no requests after the jump")
    time.sleep(10)  # ten evaluations of the rules
    requests = stage.check(beside)
    assert server.end() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert abs(lines[-1]["time"] - lines[0]["time"] - days * DAY) < 3600
    seconds = [line["seconds"] for line in lines if line["event"] == "request"]
    assert 0 < min(seconds) <= max(seconds) < 60
    assert stage.watch.fired() - {"PrejitDown"} == set()
    way = "forward" if days > 0 else "back"
    stage.record(f"the clock jumps {way} by a day", f"0 of {requests} failed")


def test_memory_short(stage):
    group = CGROUP / f"prejit-drill-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("limits of memory need root and a control group of version 1")
    try:
        server = stage.serve().wait_until_ready()
        (group / "cgroup.procs").write_text(str(server.process.pid))
        stage.begin_watch()
        beside = stage.load(server)
        limit = group / "memory.limit_in_bytes"
        limit.write_text(str(int(stage.watch.value("prejit_host_memory_bytes") / 0.93)))
        stage.alert("PrejitHostMemoryHigh", 180)
        metric = "prejit_host_memory_bytes / prejit_host_memory_limit_bytes"
        part = stage.watch.value(metric)
        page = (stage.watch.runbooks / "PrejitHostMemoryHigh.md").read_text()
        assert "give the container more memory" in page
        limit.write_text("-1")
        stage.end_alert()
        requests = stage.check(beside)
        assert stage.watch.fired() == {"PrejitHostMemoryHigh"}
    finally:
        stage.close()
        group.rmdir()
    stage.record(
        "the container's limit of memory is nearly reached",
        f"0 of {requests} failed",
        f"{metric} to {part:.2f}",
        "more memory for the container",
    )


def test_wedged_clients(stage):
    keys, wedged_key = stage.directory / "keys", "wedged-0123456789abcdef"
    keys.write_text("".join(f"{at}: {key}\n" for at, key in enumerate((*KEYS, wedged_key))))
    server = stage.serve(f"m={stage.bundle}", "--keys", keys)
    stage.begin_watch()
    beside = stage.load(server)
    kinds = ("slow_head", "slow_body", "slow_reader", "unread_answers")
    words = ("tests.campaigns.hostile_clients", server.port, wedged_key, 40, 100, *kinds)
    command = [sys.executable, "-m", *map(str, words)]
    did = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    value = stage.watch.value
    before, most = (value(f"{of}_over_time(process_open_fds[5m])") for of in ("min", "max"))
    assert most - before > 50, did.stdout
    wait_for(lambda: value("process_open_fds") < before + 50, 120, "connections are left")
    requests = stage.check(beside)
    assert stage.watch.fired() == set()
    stage.record(
        "100 clients that stop in a request, or do not read their answers",
        f"0 of {requests} failed",
        f"process_open_fds {before:.0f} to {most:.0f}",
    )


def test_a_storm_of_cold_servers(stage):
    with running(docker_registry(stage.directory)) as registry:
        reference = f"{registry.url}/drill:v1"
        command = [sys.executable, "-m", "prejit.runtime", "push", str(stage.source), reference]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        pushed = registry.requests()
        registry.stop()
        cold = [
            stage.serve(
                f"m={reference}",
                PREJIT_BUNDLES=str(stage.directory / f"bundles-{at}"),
                PREJIT_RUNTIME_CACHE=str(stage.directory / f"cache-{at}"),
            )
            for at in range(STORM)
        ]
        stage.begin_watch(ready=False)
        stage.alert("PrejitNotReady", 240)
        registry.go_on()
        for each in cold:
            each.wait_until_said("ready in", 300)
        listed = stage.follow("prejit ls REPOSITORY", REPOSITORY=f"{registry.url}/drill")
        assert "v1" in listed.stdout
        stage.end_alert()
        gets = registry.requests() - pushed
        requests = stage.check(*(stage.load(each, 1) for each in cold[:2]))
        metric = 'prejit_server_state{state="ready"}'
        assert stage.watch.value(f"sum({metric})") == STORM
        assert stage.watch.fired("page") == {"PrejitNotReady"}
    stage.record(
        f"{STORM} cold servers and one registry, which hangs at first",
        f"0 of {requests} failed; all {STORM} became ready, with {gets} requests to the registry",
        f"{metric} 0 to {STORM}",
        "the registry answers again, as `prejit ls REPOSITORY` shows",
    )
