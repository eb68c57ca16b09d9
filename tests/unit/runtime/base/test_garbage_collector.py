"""A load saves work of the garbage collector, and the host program keeps its settings."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from prejit.runtime.device.quick_start import collector_off


class Node:
    """An object in a circle, which only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process without other threads; pytest-xdist has one."""
    monkeypatch.setattr("prejit.runtime.device.quick_start.is_alone", lambda: True)


@pytest.fixture(autouse=True)
def collector_on() -> Iterator[None]:
    assert gc.isenabled()
    assert not gc.get_freeze_count()
    yield
    gc.unfreeze()
    gc.enable()


def collections() -> int:
    return sum(one["collections"] for one in gc.get_stats())


@pytest.mark.usefixtures("alone")
def test_nothing_looks_through_the_new_objects_afterwards() -> None:
    gc.collect()
    before = collections()
    with collector_off():
        assert not gc.isenabled()
        made = [[number] for number in range(10 * gc.get_threshold()[0])]
    assert gc.isenabled()
    [
        [] for _ in range(gc.get_threshold()[0] // 2)
    ]  # without aging, the first of these would collect
    assert collections() == before
    assert any(one is made for one in gc.get_objects(generation=2))


@pytest.mark.usefixtures("alone")
def test_the_next_full_collection_frees_garbage_of_a_load() -> None:
    with collector_off():
        gone = weakref.ref(Node())
    assert gone() is not None
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("alone")
def test_settings_of_the_host_stay_and_an_error_turns_it_on_again() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with pytest.raises(ValueError, match="broken"), collector_off():
        raise ValueError("broken")
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen // 2  # freed objects leave the count
    gc.disable()
    with collector_off():
        pass
    assert not gc.isenabled()
