"""Costs of an encoder's programs, which choose buckets."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace as Stub

import pytest

from prejit.compiler.compile.worker import worker_requests
from prejit.compiler.pipeline.measure import measured_speed
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.store.store_interface import Key


class Worker:
    """A worker that takes so many microseconds for the first program, twice as many for the next, ..."""

    def __init__(self, speed):
        self.speed, self.asked = speed, []

    def __call__(self, *_):
        return nullcontext(self)

    def measure(self, requests, *_):
        self.asked += [request["executable"] for request in requests]
        return [self.speed * (place + 1) for place in range(len(requests))]


@pytest.fixture
def costs_of(tmp_path, monkeypatch):
    """Return the costs of programs by name, on a machine of a speed, and the programs that it measured."""
    store = DirectoryStore.open(tmp_path / "cache")
    progress = Stub(phase=lambda text: nullcontext())
    monkeypatch.setattr(measured_speed, "requirement_of", lambda *_: None)
    monkeypatch.setattr(measured_speed, "compare", lambda *_: Stub(matches=True))

    def costs(names, speed, measure=None, shard=None):
        worker = Worker(speed)
        monkeypatch.setattr(measured_speed, "WorkerProcess", worker)
        executables = [
            Stub(
                spec=Stub(kind="layer", name=name),
                job=Stub(key=Key("compile", name, (("name", name),))),
                compiled=Stub(executable=Stub(digest=name)),
                lowered=Stub(weight_sets={}, weights=(), arguments=(), estimated_microseconds=7),
            )
            for name in names
        ]
        tools = Stub(name="cpu-host", toolchain=Stub(target=Stub(platform="cpu")))
        target = Stub(tools=tools, library=None, executables=executables, results=())
        services = Stub(
            store=store,
            progress=progress,
            jobs=Stub(wait=lambda: None),
            timeout_seconds=9,
            measure=measure,
            shard=shard,
        )
        manifest = Stub(encode=True)
        found = measured_speed.measure_costs(manifest, [target], Stub(content=Path("w")), services)
        return {name: cost for (name, _), cost in found.items()}, worker.asked

    return costs


def test_costs_that_are_compared_are_measured_together(costs_of):
    assert costs_of(["a", "b"], speed=100) == ({"a": 100, "b": 200}, ["a", "b"])  # a busy machine
    assert costs_of(["a", "b"], speed=10) == ({"a": 100, "b": 200}, [])
    assert costs_of(["a", "b", "c"], speed=10) == ({"a": 10, "b": 20, "c": 30}, ["a", "b", "c"])


def test_a_build_that_measures_nothing_has_the_costs_of_any_machine(costs_of):
    """Its bundle differed between two builds. Shards measure no products, but share these figures."""
    assert costs_of(["a"], speed=100) == ({"a": 100}, ["a"])
    assert costs_of(["a", "b"], speed=100, measure=False) == ({"a": 7, "b": 7}, [])
    assert costs_of(["a"], speed=10, measure=False, shard="1/2") == ({"a": 100}, [])


def test_measuring_ends_in_time_where_a_program_is_faster_than_its_call(monkeypatch):
    """An encoder of one layer took a minute: only the microseconds of the programs were counted."""
    now = [0.0]
    monkeypatch.setattr(worker_requests.time, "perf_counter", lambda: now[0])
    runs = []

    def run():
        runs.append(None)
        now[0] += 0.01  # copies of the arguments, mostly
        return 1e-6

    assert worker_requests._least_of(run, 0.1) == 1e-6
    assert len(runs) <= 12
