"""What breaks in production, done on purpose: what clients see, which alert fires, what its runbook says."""

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
from typing import Any

import httpx
import pytest
from tests.integration.test_serve import INFER, infer
from tests.store_servers import running_registry
from tests.waiting import wait_for

from .campaign import ROOT, setting
from .drill_records import Drill, keep
from .drill_stage import Stage, another_jaxlib, damage, small_disk, weights_file
from .faults import compile_shim
from .honest_clients import KEYS, expected, start

IS_WHOLE = setting("DRILLS", 0) > 0
pytestmark = pytest.mark.thorough
SWAP = """curl --fail --silent --unix-socket ADMIN -X POST http://admin/swap -d '{"bundle": "BUNDLE"}'"""
DRAIN = "curl --fail --silent --unix-socket ADMIN -X POST http://admin/drain"
FETCH = "prejit copy SOURCE FRESH"
SWAPPED = "`curl ... -X POST http://admin/swap` with the right bundle"
DAY = 86_400


@pytest.fixture(scope="module")
def answers(lettered_dir):
    return expected(lettered_dir)


@pytest.fixture
def stage(lettered_dir, answers, tmp_path):
    found = Stage(tmp_path, lettered_dir, answers)
    yield found
    found.close()


@pytest.fixture
def record(request):
    """Keep what a drill found, if all are run."""

    def kept(*found):
        drill = Drill(*found)
        print(drill)
        if IS_WHOLE:
            keep(request.node.name.removeprefix("test_"), drill)

    return kept


def test_a_killed_server(stage, record):
    killed, other = stage.serve(), stage.serve()
    for each in (killed, other):
        each.wait_until_ready()
    watch = stage.watch()
    cut, beside = stage.load(killed), stage.load(other)
    assert not cut.failures
    killed.kill()
    seconds = watch.wait_for_alert("PrejitDown")
    assert watch.value("up") == 1
    cut.end()
    assert cut.failures
    assert cut.texts <= stage.answers
    verified = watch.follow("PrejitDown", "prejit verify BUNDLE", BUNDLE=stage.bundle)
    assert verified.returncode == 0, verified.stderr
    assert "`prejit serve BUNDLE`" in (watch.runbooks / "PrejitDown.md").read_text()
    again = stage.serve(port=killed.port).wait_until_ready()
    watch.wait_for_end("PrejitDown")
    requests = stage.check(beside, stage.load(again))
    assert watch.fired() == {"PrejitDown"}
    record(
        "one of two servers is killed (SIGKILL)",
        f"those of the other: 0 of {requests} failed; those of the killed one: no connection",
        "up 1 to 0",
        "PrejitDown",
        seconds,
        "`prejit serve BUNDLE`",
    )


def test_a_bundle_damaged_before_a_restart(stage, record):
    restarted, other = stage.serve(), stage.serve(stage.source)
    for each in (restarted, other):
        each.wait_until_ready()
    watch = stage.watch()
    beside = stage.load(other)
    assert restarted.end() == 0
    ended = time.monotonic()
    damage(weights_file(stage.bundle))
    refused = stage.serve(port=restarted.port)
    assert refused.wait() == 4
    assert "error[reject]" in refused.said
    watch.wait_for_alert("PrejitDown")
    seconds = time.monotonic() - ended
    found = watch.follow("PrejitDown", "prejit verify BUNDLE", BUNDLE=stage.bundle)
    assert found.returncode == 4
    assert weights_file(stage.bundle).name[:12] in found.stderr
    fresh = stage.directory / "fresh"
    copied = watch.follow("PrejitDown", FETCH, SOURCE=stage.source, FRESH=fresh)
    assert copied.returncode == 0, copied.stderr
    again = stage.serve(fresh, port=restarted.port).wait_until_ready()
    watch.wait_for_end("PrejitDown")
    requests = stage.check(beside, stage.load(again))
    assert watch.fired() == {"PrejitDown"}
    record(
        "bytes of the weights change before a restart",
        f"0 of {requests} failed: the server refuses the bundle and ends with status 4",
        "up 1 to 0",
        "PrejitDown",
        seconds,
        f"`{FETCH}`, and a start with that",
    )


def test_a_bundle_damaged_under_a_server(stage, record):
    admin = stage.directory / "admin"
    damaged = stage.serve(stage.bundle, "--check-seconds", "1", "--admin", admin)
    other = stage.serve(stage.source)
    for each in (damaged, other):
        each.wait_until_ready()
    watch = stage.watch()
    hurt, beside = stage.load(damaged), stage.load(other)
    damage(weights_file(stage.bundle))
    seconds = watch.wait_for_alert("PrejitWrongAnswers")
    ready = httpx.get(f"{damaged.url}/health/ready", timeout=60)
    assert (ready.status_code, "wrong_answers" in ready.json()) == (503, True)
    drained = watch.follow("PrejitWrongAnswers", DRAIN, ADMIN=admin)
    assert drained.returncode == 0, drained.stderr
    hurt.end()
    wrong = len(hurt.texts - stage.answers)
    fresh = stage.directory / "fresh"
    copied = watch.follow("PrejitWrongAnswers", FETCH, SOURCE=stage.source, FRESH=fresh)
    assert copied.returncode == 0, copied.stderr
    assert damaged.end() == 0
    again = stage.serve(fresh, port=damaged.port).wait_until_ready()
    watch.wait_for_end("PrejitWrongAnswers")
    requests = stage.check(beside, stage.load(again))
    assert watch.fired("page") - {"PrejitDown"} == {"PrejitWrongAnswers"}
    record(
        "bytes of the weights change under a running server (`--check-seconds 1`)",
        f"0 of {requests} failed at the others; this one gave {wrong} wrong texts until it was drained",
        "prejit_wrong_answers 0 to 1",
        "PrejitWrongAnswers",
        seconds,
        f"`{FETCH}`, and a start with that",
    )


def test_a_swap_to_a_damaged_bundle(stage, record):
    admin = stage.directory / "admin"
    server = stage.serve(f"m={stage.source}", "--admin", admin).wait_until_ready()
    watch = stage.watch()
    beside = stage.load(server)
    damage(weights_file(stage.bundle))
    refused = watch.follow("PrejitSwapFailed", SWAP, ADMIN=admin, BUNDLE=stage.bundle)
    assert refused.returncode == 22  # curl: the server answered an error
    seconds = watch.wait_for_alert("PrejitSwapFailed")
    metric = 'prejit_swaps_total{outcome="failed"}'
    assert watch.value(metric) == 1
    again = watch.follow("PrejitSwapFailed", SWAP, ADMIN=admin, BUNDLE=stage.source)
    assert again.returncode == 0, again.stderr
    watch.wait_for_end("PrejitSwapFailed")
    requests = stage.check(beside)
    assert watch.fired() == {"PrejitSwapFailed"}
    record(
        "a swap to a damaged bundle",
        f"0 of {requests} failed, all from the bundle before",
        f"{metric} 0 to 1",
        "PrejitSwapFailed",
        seconds,
        SWAPPED,
    )


def test_shapes_that_no_bucket_has(make_recipe, tmp_path, record):
    before = make_recipe().write(tmp_path / "before")
    after = make_recipe(buckets=(2, 8, 32)).write(tmp_path / "after")
    admin = tmp_path / "admin"
    stage = Stage(tmp_path, before, set())
    try:
        server = stage.serve(f"m={before}", "--admin", admin).wait_until_ready()
        watch = stage.watch()
        url = f"{server.url}/v2/models/score/infer"
        right = infer(server).json()["outputs"][0]["data"]
        ends, seen = threading.Event(), list[Any]()

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
            wait_for(lambda: watch.value(counted) == 30, what="the refused calls are not counted")
            assert watch.value("prejit_compile_seconds_total") == 0
            swapped = watch.follow("PrejitRequestsCompile", SWAP, ADMIN=admin, BUNDLE=after)
            assert swapped.returncode == 0, swapped.stderr
            assert infer(server, strange[-1]).status_code == 200  # a call of the new bucket
        finally:
            ends.set()
            honest.join()
        assert {status for status, _ in seen} == {200}
        assert all(data == pytest.approx(right, rel=1e-5) for _, data in seen)
        assert watch.fired() == set()
    finally:
        stage.close()
    record(
        "calls with sizes that no bucket has",
        f"0 of {len(seen)} with sizes of buckets failed; the others got 400, and nothing was compiled",
        f"{counted} 0 to 30",
        "",
        0,
        SWAPPED,
    )


def test_another_jaxlib_at_a_restart(stage, record):
    other, packages = another_jaxlib()
    changed, beside = stage.serve(), stage.serve()
    for each in (changed, beside):
        each.wait_until_ready()
    watch = stage.watch()
    honest = stage.load(beside)
    assert changed.end() == 0
    slow = stage.serve(port=changed.port, PYTHONPATH=str(packages))
    slow.wait_until_said("ready in", 300)
    fallen = stage.load(slow)
    seconds = watch.wait_for_alert("PrejitFallback")
    assert watch.value('prejit_fallbacks_total{axis="jaxlib"}') > 0
    explain = "prejit explain BUNDLE"
    env = {"PYTHONPATH": str(packages)}
    explained = watch.follow("PrejitFallback", explain, env=env, BUNDLE=stage.bundle)
    assert "jaxlib" in explained.stdout
    assert other in explained.stdout
    requests = stage.check(fallen)
    assert slow.end() == 0
    again = stage.serve(port=changed.port).wait_until_ready()
    watch.wait_for_end("PrejitFallback")
    requests += stage.check(honest, stage.load(again))
    # A busy machine may compile for longer than 5 minutes / 15. That alert's runbook gives the same command.
    assert watch.fired("page") <= {"PrejitDown", "PrejitNotReady"}
    assert explain in (watch.runbooks / "PrejitNotReady.md").read_text()
    record(
        f"a server starts again with jaxlib {other}",
        f"0 of {requests} failed, no token changed; this server compiles before it is ready",
        'prejit_fallbacks_total{axis="jaxlib"} 0 to 1',
        "PrejitFallback",
        seconds,
        f"`{explain}` names `jaxlib`; a start with that of the target",
    )


def test_a_full_disk(stage, record):
    with small_disk(stage.directory / "disk") as disk:
        log, other = disk / "log.jsonl", disk / "of another program"
        server = stage.serve(f"m={stage.bundle}", "--log", log).wait_until_ready()
        watch = stage.watch()
        beside = stage.load(server)
        with contextlib.suppress(OSError), other.open("wb", buffering=0) as filling:
            while filling.write(bytes(1024)):
                pass
        seconds = watch.wait_for_alert("PrejitLogLinesLost")
        df = "df --human-readable DIRECTORY"
        shown = watch.follow("PrejitLogLinesLost", df, DIRECTORY=disk)
        assert "100%" in shown.stdout
        lost = watch.value("prejit_log_lines_lost_total")
        other.unlink()
        shutil.copyfile(log, stage.directory / "moved.jsonl")
        log.unlink()
        server_id = server.process.pid
        opened = watch.follow("PrejitLogLinesLost", "kill -USR1 PID", PID=str(server_id))
        assert opened.returncode == 0, opened.stderr
        wait_for(lambda: log.exists() and log.stat().st_size > 2000, what="the log does not go on")
        requests = stage.check(beside)
        assert server.end() == 0
        replay = "prejit replay LOG"
        replayed = watch.follow("PrejitLogLinesLost", replay, LOG=stage.directory / "moved.jsonl")
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert watch.fired() - {"PrejitDown"} == {"PrejitLogLinesLost"}
    record(
        "the disk of the log is full",
        f"0 of {requests} failed",
        f"prejit_log_lines_lost_total 0 to {lost:.0f}",
        "PrejitLogLinesLost",
        seconds,
        "room on the disk, and `kill -USR1 PID`",
    )


@pytest.mark.parametrize("days", [1, -1])
def test_a_clock_that_jumps(stage, record, days):
    state = stage.directory / "state"
    state.write_bytes(bytes(64))
    try:
        shim = compile_shim(stage.directory)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    log = stage.directory / "log.jsonl"
    server = stage.serve(
        f"m={stage.bundle}",
        *("--log", log, "--timeout", "20", "--check-seconds", "1"),
        LD_PRELOAD=str(shim),
        FAULTS_ROOT=str(stage.directory / "none"),
        FAULTS_STATE=str(state),
    ).wait_until_ready()
    watch = stage.watch()
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
    assert watch.fired() - {"PrejitDown"} == set()
    record(
        f"the clock jumps {'forward' if days > 0 else 'back'} by a day",
        f"0 of {requests} failed",
        "",
        "",
        0,
        "",
    )


CGROUP = Path("/sys/fs/cgroup/memory")


def test_memory_short(stage, record):
    group = CGROUP / f"prejit-drill-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("limits of memory need root and a control group of version 1")
    try:
        server = stage.serve().wait_until_ready()
        (group / "cgroup.procs").write_text(str(server.process.pid))
        watch = stage.watch()
        beside = stage.load(server)
        limit = group / "memory.limit_in_bytes"
        limit.write_text(str(int(watch.value("prejit_host_memory_bytes") / 0.93)))
        seconds = watch.wait_for_alert("PrejitHostMemoryHigh", 180)
        part = watch.value("prejit_host_memory_bytes / prejit_host_memory_limit_bytes")
        page = (watch.runbooks / "PrejitHostMemoryHigh.md").read_text()
        assert "give the container more memory" in page
        limit.write_text("-1")
        watch.wait_for_end("PrejitHostMemoryHigh")
        requests = stage.check(beside)
        assert watch.fired() == {"PrejitHostMemoryHigh"}
    finally:
        stage.close()
        group.rmdir()
    record(
        "the container's limit of memory is nearly reached",
        f"0 of {requests} failed",
        f"prejit_host_memory_bytes / prejit_host_memory_limit_bytes to {part:.2f}",
        "PrejitHostMemoryHigh",
        seconds,
        "more memory for the container",
    )


def test_wedged_clients(stage, record):
    keys = stage.directory / "keys"
    wedged_key = "wedged-0123456789abcdef"
    keys.write_text("".join(f"{at}: {key}\n" for at, key in enumerate((*KEYS, wedged_key))))
    server = stage.serve(f"m={stage.bundle}", "--keys", keys).wait_until_ready()
    watch = stage.watch()
    beside = stage.load(server)
    kinds = ("slow_head", "slow_body", "slow_reader", "unread_answers")
    words = ("tests.campaigns.hostile_clients", "hostile", server.port, wedged_key, 40, 100, *kinds)
    command = [sys.executable, "-m", *map(str, words)]
    did = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    before, most = (watch.value(f"{of}_over_time(process_open_fds[5m])") for of in ("min", "max"))
    assert most - before > 50, did.stdout
    wait_for(lambda: watch.value("process_open_fds") < before + 50, 120, "connections are left")
    requests = stage.check(beside)
    assert watch.fired() == set()
    record(
        "100 clients that stop in a request, or do not read their answers",
        f"0 of {requests} failed",
        f"process_open_fds {before:.0f} to {most:.0f}",
        "",
        0,
        "",
    )


STORM = 16


def test_a_storm_of_cold_servers(stage, record):
    with running_registry(stage.directory) as registry:
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
        watch = stage.watch()
        seconds = watch.wait_for_alert("PrejitNotReady", 240)
        registry.go_on()
        for each in cold:
            each.wait_until_said("ready in", 300)
        listed = watch.follow(
            "PrejitNotReady", "prejit ls REPOSITORY", REPOSITORY=f"{registry.url}/drill"
        )
        assert listed.returncode == 0, listed.stderr
        assert "v1" in listed.stdout
        watch.wait_for_end("PrejitNotReady")
        gets = registry.requests() - pushed
        found = [start(each, 1) for each in cold[:2]]
        requests = stage.check(*found)
        ready = watch.value('sum(prejit_server_state{state="ready"})')
        assert ready == STORM
        assert watch.fired("page") == {"PrejitNotReady"}
    record(
        f"{STORM} cold servers and one registry, which hangs at first",
        f"0 of {requests} failed; all {STORM} became ready, with {gets} requests to the registry",
        f'prejit_server_state{{state="ready"}} 0 to {STORM}',
        "PrejitNotReady",
        seconds,
        "the registry answers again, as `prejit ls REPOSITORY` shows",
    )
