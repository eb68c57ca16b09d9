"""A line of the log without what an engine gave cannot be replayed; a full disk must stop nothing."""

from __future__ import annotations

import asyncio
import json
import os
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prejit.runtime.errors import StoreError
from prejit.runtime.generation.generate import Piece
from prejit.server.engine.fair_queue import Limits
from prejit.server.telemetry.requestlog import (
    Entry,
    RecordedEngine,
    RequestLog,
    current,
    describe_array,
)

STATS = SimpleNamespace(
    prompt_tokens=3, reused_tokens=1, new_tokens=2, queue_seconds=0.1, first_token_seconds=0.2
)


class Stream:
    """Pieces for both kinds of iteration."""

    def __init__(self) -> None:
        pieces = [Piece(5, "a"), Piece(6, "b"), Piece(None, "", "stop", None, STATS)]  # type: ignore[arg-type]
        self._left = iter(pieces)
        self.is_closed = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        return next(self._left)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Piece:
        for piece in self._left:
            return piece
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.is_closed = True

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Engine:
    """Gives fixed results, and keeps its options."""

    def __init__(self) -> None:
        self.options: list[Any] = []
        self.streams: list[Stream] = []

    def submit(self, prompt: Any = None, **options: Any) -> Future[Any]:
        self.options.append(options)
        done: Future[Any] = Future()
        done.set_result(SimpleNamespace(token_ids=(5, 6), finish_reason="length", stats=STATS))
        return done

    def stream(self, prompt: Any = None, **options: Any) -> Stream:
        self.options.append(options)
        self.streams.append(Stream())
        return self.streams[-1]

    def submit_encode(self, sentences: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        stats = SimpleNamespace(sentences=2, tokens=9)
        done.set_result(SimpleNamespace(embeddings=np.ones((2, 3), np.float32), stats=stats))
        return done

    def submit_client_call(
        self, client: str, limits: Limits, name: str, /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result({"a": (np.zeros(2), None), "b": np.array([True])})
        return done

    def metrics(self) -> str:
        return "metrics"


def entry() -> Entry:
    return Entry("id", "POST", "/v1/completions", {}, 0.0)


@pytest.fixture
def engine() -> Any:
    return RecordedEngine("demo", Engine())  # type: ignore[arg-type]


def recorded(work: Any, seeds: list[int | None] | None = None) -> list[dict[str, Any]]:
    """The calls of a task."""

    async def go() -> list[dict[str, Any]]:
        one = entry()
        one.seeds = seeds
        current.set(one)
        found = work()
        if asyncio.iscoroutine(found):
            await found
        return [call.described() for call in one.calls]

    return asyncio.run(go())


def test_tokens_of_futures_and_streams_are_recorded(engine: Any) -> None:
    async def work() -> None:
        engine.generate("a", seed=3)
        async with engine.stream("b") as stream:
            async for _ in stream:
                pass
        for _ in engine.stream("c"):
            break

    first, whole, cut = recorded(work)
    assert first == {
        "kind": "generate",
        "model": "demo",
        "seed": 3,
        "token_ids": [5, 6],
        "finish_reason": "length",
        **vars(STATS),
    }
    assert (whole["token_ids"], whole["finish_reason"], whole["seed"]) == ([5, 6], "stop", None)
    assert (cut["token_ids"], cut["finish_reason"]) == ([5], "")


def test_a_recorded_stream_can_be_closed_as_any_other(engine: Any) -> None:
    async def work() -> None:
        stream = engine.stream("a")
        await stream.aclose()
        assert engine._engine.streams[-1].is_closed

    recorded(work)


def test_arrays_of_programs_and_embeddings_are_recorded(engine: Any) -> None:
    encoded, called = recorded(lambda: (engine.encode(["a"]), engine.call("score", x=1)))
    assert encoded["arrays"]["embeddings"]["shape"] == [2, 3]
    assert (encoded["sentences"], encoded["tokens"]) == (2, 9)  # `prejit suggest` reads them
    assert called["program"] == "score"
    assert called["arrays"].keys() == {"result.a.0", "result.b"}


def test_a_replay_gives_each_call_its_seed(engine: Any) -> None:
    def work() -> None:
        for seed in (1, 1, 1):
            engine.submit("a", seed=seed)

    calls = recorded(work, [7, None])
    assert [call["seed"] for call in calls] == [7, 1, 1]
    assert [options["seed"] for options in engine._engine.options] == [7, 1, 1]


def test_calls_outside_of_a_request_are_not_recorded(engine: Any) -> None:
    assert engine.generate("a").token_ids == (5, 6)
    assert isinstance(engine.stream("a"), Stream)
    assert engine.metrics() == "metrics"


def test_requests_at_the_same_time_keep_their_calls_apart(engine: Any) -> None:
    async def one(count: int) -> int:
        mine = entry()
        current.set(mine)
        for _ in range(count):
            await asyncio.sleep(0)
            engine.submit("a")
        return len(mine.calls)

    async def all_() -> list[int]:
        return await asyncio.gather(*map(one, range(10)))

    assert asyncio.run(all_()) == list(range(10))


def test_rounding_changes_the_digest_and_hardly_the_norm() -> None:
    array = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    moved = np.nextafter(array, np.float32(2))
    one, other = describe_array(array), describe_array(moved)
    assert one["digest"] != other["digest"]
    assert one["norm"] == pytest.approx(other["norm"], rel=1e-5)
    assert describe_array(array.T)["digest"] != one["digest"]
    assert "norm" not in describe_array(np.array([np.nan]))
    assert "norm" not in describe_array(np.array([True]))


def test_a_log_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot write the log"):
        RequestLog(str(tmp_path / "no" / "log"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_reported_once_and_stops_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    log = RequestLog("/dev/full")
    for _ in range(3):
        log.end(entry())
    log.close()
    assert capsys.readouterr().err.count("cannot write") == 1


def begin_of(log: RequestLog) -> None:
    """Writes the line of a start."""
    bundle = SimpleNamespace(digest="sha256:0", target="cpu-host")
    log.start([SimpleNamespace(name="demo", bundle=bundle)], {"demo": "x"}, max_tokens=None)  # type: ignore[arg-type]


def test_a_log_that_was_moved_is_opened_again_and_can_be_replayed_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, moved = tmp_path / "log", tmp_path / "log.1"
    log = RequestLog(str(path))
    begin_of(log)
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

    def events(file: Path) -> list[str]:
        return [json.loads(line)["event"] for line in file.read_text().splitlines()]

    assert events(moved) == ["start", "request"]
    assert events(path) == ["start"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_log_that_others_can_read_is_closed_to_them(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    path.chmod(mode)
    RequestLog(str(path)).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_of_another_owner_that_others_can_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    path = tmp_path / "log"
    path.touch()
    path.chmod(0o644)
    monkeypatch.setattr(os, "fchmod", refuse)
    with pytest.raises(StoreError, match=r"its owner alone can read.* found mode 644"):
        RequestLog(str(path))


def test_lines_of_two_servers_stay_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    logs = [RequestLog(path), RequestLog(path)]
    for turn in range(40):
        one = entry()
        one.body += b"x" * 10_000
        logs[turn % 2].end(one)
    for log in logs:
        log.close()
    lines = Path(path).read_text().splitlines()
    assert [len(json.loads(line)["body"]) for line in lines] == [10_000] * 40
