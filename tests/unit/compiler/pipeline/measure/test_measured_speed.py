"""Costs of an encoder's programs, which choose buckets."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace as Stub

import pytest

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

    def costs(names, speed):
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
            store=store, progress=progress, jobs=Stub(wait=lambda: None), timeout_seconds=9
        )
        manifest = Stub(encode=True)
        found = measured_speed.measure_costs(manifest, [target], Stub(content=Path("w")), services)
        return {name: cost for (name, _), cost in found.items()}, worker.asked

    return costs


def test_costs_that_are_compared_are_measured_together(costs_of):
    assert costs_of(["a", "b"], speed=100) == ({"a": 100, "b": 200}, ["a", "b"])  # a busy machine
    assert costs_of(["a", "b"], speed=10) == ({"a": 100, "b": 200}, [])
    assert costs_of(["a", "b", "c"], speed=10) == ({"a": 10, "b": 20, "c": 30}, ["a", "b", "c"])
