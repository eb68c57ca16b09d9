"""Costs of an encoder's programs, which choose buckets."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace as Stub

import pytest

from prejit.compiler.compile.worker import worker_requests
from prejit.compiler.pipeline.measure import measured_speed
from prejit.compiler.progress import Quiet
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.store.store_interface import Key


def executable(name):
    return Stub(
        spec=Stub(kind="layer", name=name, bucket={"batch": 2, "length": 8}),
        job=Stub(key=Key("compile", name, (("name", name),))),
        compiled=Stub(executable=Stub(digest=name)),
        lowered=Stub(weight_sets={}, weights=(), arguments=(), estimated_microseconds=7),
    )


@pytest.fixture
def costs_of(tmp_path, monkeypatch):
    """Return the costs of programs by name, and the programs that were measured.

    The first takes the machine's speed in microseconds, the next twice as long, and so on.
    """
    monkeypatch.setattr(measured_speed, "requirement_of", lambda *_: None)
    monkeypatch.setattr(measured_speed, "compare", lambda *_: Stub(matches=True))
    services = Stub(progress=Quiet(), jobs=Stub(wait=lambda: None), timeout_seconds=9)
    services.store = DirectoryStore.open(tmp_path / "cache")
    tools = Stub(name="cpu-host", toolchain=Stub(target=Stub(platform="cpu")))
    manifest, weights = Stub(encode=True), Stub(content=Path("w"))

    def costs(names, speed, measure=None, shard=None):
        def timed(requests, *_):
            asked.extend(request["executable"] for request in requests)
            return [speed * (place + 1) for place in range(len(requests))]

        asked, worker = [], nullcontext(Stub(measure=timed))
        monkeypatch.setattr(measured_speed, "WorkerProcess", lambda *_: worker)
        services.measure, services.shard = measure, shard
        target = Stub(tools=tools, library=None, executables=[*map(executable, names)], results=())
        found = measured_speed.measure_costs(manifest, [target], weights, services)
        return {name: cost for (name, _), cost in found.items()}, asked

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


def test_programs_are_measured_with_sentences_that_fill_them():
    """Sentences of one token left attention out, and long shapes looked too cheap."""
    for bucket, lengths in (
        ({"batch": 3}, [1] * 3),  # of images
        ({"batch": 2, "length": 8}, [8, 8]),
        ({"batch": 1, "length": 300, "sentences": 5}, [128, 128, 44, 0, 0]),
        ({"batch": 1, "length": 1000, "sentences": 4}, [250] * 4),
        ({"batch": 1, "length": 64, "sentences": 2}, [64, 0]),
    ):
        assert measured_speed._lengths(bucket) == lengths


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
