"""A start in parts: they add up, each moment has one part, and a slow stage shows in its own part."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prejit.runtime
from prejit.runtime import StartReport
from prejit.runtime.base import files, process_facts
from prejit.runtime.base.process_facts import LoadTimes, Span
from prejit.runtime.device.device import Device
from prejit.runtime.format.blob_hashing import HashingVerification, Job
from prejit.runtime.loader import load
from prejit.runtime.programs import placing
from prejit.runtime.start_report import split

X = np.ones((2, 16), np.float32)
PARTS = ("process", "imports", "reading", "verifying", "loading", "first_run", "other")
ME, OTHER = 1, 2
SLOW = 0.7


def parts(found: StartReport) -> dict[str, float]:
    return {name: getattr(found, f"{name}_seconds") for name in PARTS}


def parts_of(*spans: Span, **options: Any) -> dict[str, float]:
    """Parts of a start from 0 to 100: loads from 20 to 60, first request from 70, by thread 1."""
    given: dict[str, Any] = {
        "loaded": Span("loading", ME, 20, 60),
        "asked": (70.0, ME),
        "answered": (100.0, ME),
        "times": LoadTimes(20, True, (), 1, 2, 3),
        "read_share": 0.25,
    }
    found = split(spans=spans, **{**given, **options})
    assert sum(parts(found).values()) == pytest.approx(found.total_seconds)
    return {name: value for name, value in parts(found).items() if value}


@pytest.fixture
def at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process started at 0, and the first line of prejit ran at 5."""
    monkeypatch.setattr(process_facts, "exec_time", lambda: 0.0)
    monkeypatch.setattr(prejit.runtime, "first_line", 5.0)
    monkeypatch.setattr(process_facts, "imports", [])


def test_a_start_is_process_load_and_first_run_of_one_thread(at_zero: None) -> None:
    """One thread loads, another makes the first request, and waits while the first still prepares."""
    assert parts_of() == {"process": 5, "loading": 40, "first_run": 30, "other": 25}
    busy = [Span("verification", OTHER, 22, 59), Span("loading", OTHER, 70, 99)]
    assert parts_of(*busy) == parts_of()
    both = [Span("loading", ME, 62, 80), Span("loading", OTHER, 75, 85)]
    found = parts_of(*both, asked=(70.0, OTHER), answered=(100.0, OTHER))
    assert found == {"process": 5, "loading": 40 + 8 + 10, "first_run": 20, "other": 17}
    for unfinished in ({"asked": None}, {"answered": None}, {"asked": None, "answered": None}):
        assert parts_of(**unfinished) == {"process": 5, "loading": 40, "other": 15}


def test_the_inner_part_has_the_time_and_a_later_load_begins_later(
    at_zero: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        process_facts, "imports", [Span("imports", ME, 6, 18), Span("imports", ME, 21, 24)]
    )
    found = parts_of(
        Span("reading", ME, 30, 40),
        Span("verification", ME, 34, 38),
        Span("loading", ME, 72, 92),
        Span("verification", ME, 80, 88),
    )
    assert found == {
        "process": 5,
        "imports": 15,
        "reading": 6 + 3,  # a quarter of verification was reading
        "verifying": 9,
        "loading": 40 - 3 - 10 + 12,
        "first_run": 10,
        "other": 100 - 5 - 15 - 9 - 9 - 39 - 10 + 0,
    }
    monkeypatch.setattr(process_facts, "imports", [Span("imports", ME, 6, 18)])
    assert parts_of(times=LoadTimes(20, False, (), 1, 2, 3)) == {
        "loading": 40,
        "first_run": 30,
        "other": 10,
    }


@pytest.mark.parametrize("forked", [10.0, 50.0, 90.0])
def test_a_fork_begins_later(forked: float, at_zero: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_facts, "exec_time", lambda: forked)
    found = parts_of()
    assert "process" not in found
    assert sum(found.values()) == 100 - forked
    if forked > 60:  # after the load: it has no start of its own
        assert parts_of(asked=None) == {}


def test_reading_and_hashing_share_what_a_caller_waits() -> None:
    def run(reading: float, hashing: float) -> float:
        time.sleep(reading + hashing)
        return reading

    jobs = [Job("a", 0, 1, lambda: run(0.3, 0.0)), Job("a", 1, 2, lambda: run(0.0, 0.1))]
    verification = HashingVerification(jobs)
    assert verification.read_share == 0
    verification.finish()
    (wait,) = verification.waits
    assert wait.thread == threading.get_ident()
    assert wait.end - wait.start >= 0.4
    assert 0.5 < verification.read_share <= 0.75
    verification.finish()
    verification.wait("a")
    assert len(verification.waits) == 1, "what is verified keeps nobody waiting"


def slow_verifying(patch: pytest.MonkeyPatch) -> None:
    first = [True]

    class Slow:
        def __init__(self, content: bytes = b"") -> None:
            self.real = hashlib.sha256(content)
            self.hexdigest = self.real.hexdigest

        def update(self, content: Any) -> None:
            if first:
                first.clear()
                time.sleep(SLOW)
            self.real.update(content)

    fake = type("hashlib", (), {"sha256": Slow})
    patch.setattr(files, "hashlib", fake)


def slow_method(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def slow(patch: pytest.MonkeyPatch) -> None:
        real, first = getattr(owner, name), [True]

        def method(*args: Any) -> Any:
            if first:
                first.clear()
                time.sleep(SLOW)
            return real(*args)

        patch.setattr(owner, name, method)

    return slow


@pytest.mark.parametrize(
    ("part", "make_slow"),
    [
        ("reading", slow_method(os, "preadv")),
        ("verifying", slow_verifying),
        ("loading", slow_method(Device, "load")),
        ("first_run", slow_method(placing, "to_numpy")),
    ],
)
def test_a_slow_stage_shows_in_its_part(
    part: str, make_slow: Callable[[pytest.MonkeyPatch], None], settled_dir: Path
) -> None:
    load(settled_dir).call("score", x=X)  # the imports, and a receipt
    for receipt in Path(os.environ["PREJIT_RUNTIME_CACHE"]).rglob("*.json"):
        receipt.unlink()
    with pytest.MonkeyPatch.context() as patch:
        make_slow(patch)
        bundle = load(settled_dir)
        bundle.call("score", x=X)
    found = bundle.start_report()
    assert found.process_seconds == 0
    assert found.hashed_bytes > 0
    assert found.receipt_bytes == 0
    assert sum(parts(found).values()) == pytest.approx(found.total_seconds)
    assert parts(found)[part] > 0.9 * SLOW, found
    assert max(parts(found), key=parts(found).__getitem__) == part, found
