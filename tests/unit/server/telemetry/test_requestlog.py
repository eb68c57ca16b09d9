"""A line of the log without what an engine gave cannot be replayed; a full disk must stop nothing."""

import asyncio
import errno
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from tests.served import StandIn, StandInStream, stats

from prejit.runtime.errors import StoreError
from prejit.server.engine.fair_queue import NO_LIMITS
from prejit.server.served.process_upkeep import say
from prejit.server.served.served import Models
from prejit.server.telemetry.requestlog import (
    Entry,
    RequestLog,
    current,
    describe_array,
    log_lines,
    record,
)
from prejit.server.telemetry.watched_engine import WatchedEngine


def entry():
    return Entry("id", "POST", "/v1/completions", {}, 0.0)


@pytest.fixture
def stand_in():
    return StandIn()


@pytest.fixture
def engine(stand_in):
    return WatchedEngine("demo", stand_in, record)


def recorded(work, seeds=None):
    async def go():
        one = entry()
        one.seeds = seeds
        current.set(one)
        found = work()
        if asyncio.iscoroutine(found):
            await found
        return [call.described() for call in one.calls]

    return asyncio.run(go())


def test_calls_of_a_request_are_recorded_with_their_results(engine, stand_in):
    async def work():
        engine.submit("a", seed=3)
        async for _ in engine.stream("b"):
            pass
        stream = engine.stream("c")
        async for _ in stream:
            break
        await stream.aclose()
        assert stream.closed

    first, whole, cut = recorded(work)
    names = ("prompt_tokens", "reused_tokens", "new_tokens", "queue_seconds", "first_token_seconds")
    call = {"kind": "generate", "model": "demo", "token_ids": [1, 2, 3], "finish_reason": "length"}
    call |= {name: getattr(stats(), name) for name in names}
    assert (first, whole) == (call | {"seed": 3}, call | {"seed": None})
    assert (cut["token_ids"], cut["finish_reason"]) == ([1], "")
    stand_in.result = {"a": (np.zeros(2), None), "b": np.array([True])}
    [encoded] = recorded(lambda: engine.submit_encode(["a"]))
    [called] = recorded(lambda: engine.submit_client_call("", NO_LIMITS, "score", x=1))
    assert encoded["arrays"]["embeddings"]["shape"] == [2, 3]
    assert (encoded["sentences"], encoded["tokens"]) == (2, 7)  # `prejit suggest` reads them
    assert called["program"] == "score"
    assert called["arrays"].keys() == {"result.a.0", "result.b"}


def test_a_replay_gives_each_call_its_seed_and_records_no_call_of_others(engine, stand_in):
    calls = recorded(lambda: [engine.submit("a", seed=1) for _ in range(3)], [7, None])
    assert [call["seed"] for call in calls] == [7, 1, 1]
    assert [options["seed"] for options in stand_in.options] == [7, 1, 1]
    assert engine.submit("a").result().token_ids == (1, 2, 3)
    assert isinstance(engine.stream("a"), StandInStream)
    assert engine.metrics().slots == 8

    # Requests at the same time keep their calls apart.
    async def one(count):
        current.set(mine := entry())
        for _ in range(count):
            await asyncio.sleep(0)
            engine.submit("a")
        assert len(mine.calls) == count

    async def together():
        await asyncio.gather(*map(one, range(10)))

    asyncio.run(together())


def test_rounding_changes_the_digest_and_hardly_the_norm():
    array = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    moved = np.nextafter(array, np.float32(2))
    one, other = describe_array(array), describe_array(moved)
    assert one["digest"] != other["digest"]
    assert one["norm"] == pytest.approx(other["norm"], rel=1e-5)
    assert describe_array(array.T)["digest"] != one["digest"]
    assert "norm" not in describe_array(np.array([np.nan]))
    assert "norm" not in describe_array(np.array([True]))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_reported_once_and_stops_nothing(capsys):
    log, models = RequestLog("/dev/full"), Models()
    log.start(models, max_tokens=None)
    for _ in range(3):
        log.end(entry())
    log.close()
    assert capsys.readouterr().err.count("cannot write") == 1
    assert models.log_lines_lost == 4


def test_a_line_that_was_cut_takes_no_other_with_it(tmp_path, monkeypatch):
    path, room, write = tmp_path / "log", [0], os.write

    def short_write(file, content):
        if not room[0]:
            raise OSError(errno.ENOSPC, "no room")
        written = write(file, content[: room[0]])
        room[0] -= written
        return written

    log = RequestLog(str(path))
    monkeypatch.setattr(os, "write", short_write)
    for size in (30, 0, 10_000):
        room[0] = size
        log.end(entry())
    log.close()
    cut, whole = path.read_bytes().splitlines()
    assert len(cut) == 30
    assert json.loads(whole)["id"] == "id"


def test_a_log_that_was_moved_is_opened_again_and_can_be_replayed_alone(tmp_path, capsys):
    path, moved = tmp_path / "log", tmp_path / "log.1"
    log = RequestLog(str(path))
    bundle = SimpleNamespace(digest="sha256:0", target="cpu-host")
    log.start([SimpleNamespace(name="demo", bundle=bundle, path="x")], max_tokens=None)
    log.reopen()  # nobody has moved it
    path.rename(moved)
    log.end(entry())
    log.reopen()
    log.end(entry())
    path.unlink()
    path.mkdir()
    log.reopen()
    assert "cannot write the log: Is a directory" in capsys.readouterr().err
    path.rmdir()
    log.reopen()
    log.close()

    def events(file):
        return [json.loads(line)["event"] for line in file.read_text().splitlines()]

    assert events(moved) == ["start", "request"]
    assert events(path) == ["start"]


def test_neither_the_log_nor_a_message_has_the_password_of_a_bundle(tmp_path, capsys):
    log = RequestLog(str(tmp_path / "log"))
    bundle = SimpleNamespace(digest="sha256:0", target="cpu-host")
    url = "https://me:secret@host/demo:v1"
    log.start([SimpleNamespace(name="demo", bundle=bundle, path=url)], max_tokens=None)
    log.close()
    [line] = (tmp_path / "log").read_text().splitlines()
    assert json.loads(line)["models"][0]["path"] == "https://host/demo:v1"
    say(f"demo: swapped for {url}")
    assert capsys.readouterr().err == "demo: swapped for https://host/demo:v1\n"


def test_a_log_is_for_its_owner_alone(tmp_path, monkeypatch):
    path = tmp_path / "log"
    for mode in (0o644, 0o640, 0o604):
        path.touch()
        path.chmod(mode)
        RequestLog(str(path)).close()
        assert path.stat().st_mode & 0o777 == 0o600

    def refuse(file, mode):
        raise PermissionError(1, "Operation not permitted")

    path.chmod(0o644)
    monkeypatch.setattr(os, "fchmod", refuse)
    with pytest.raises(StoreError, match=r"its owner alone can read.* found mode 644"):
        RequestLog(str(path))
    with pytest.raises(StoreError, match="cannot write the log"):
        RequestLog(str(tmp_path / "no" / "log"))


def test_lines_of_two_servers_stay_whole_and_one_that_a_crash_cut_is_noted(tmp_path):
    path = tmp_path / "log"
    logs = [RequestLog(str(path)), RequestLog(str(path))]
    for turn in range(40):
        one = entry()
        one.body += b"x" * 10_000
        logs[turn % 2].end(one)
    for log in logs:
        log.close()
    bodies = [json.loads(line)["body"] for line in path.read_text().splitlines()]
    assert [len(body) for body in bodies] == [10_000] * 40
    path.write_bytes(b'{"event":"start"}\n[]\n{"event":"request"}\n{"event":"requ')
    notes = []
    assert [line["event"] for line in log_lines(str(path), notes)] == ["start", "request"]
    found = [note.partition("line ")[2] for note in notes]
    assert found == [f"{number} is no JSON object" for number in (2, 4)]
    with pytest.raises(StoreError, match="cannot read the log"):
        list(log_lines(str(tmp_path / "missing")))
