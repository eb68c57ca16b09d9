"""Shards: every program has one that begins with it, and one shard packs each build."""

import threading

import pytest
from tests.threads import in_threads

from prejit.compiler.pipeline.build_interface import MAX_SHARDS, Packed, Packing, Shard, Turn
from prejit.compiler.progress import Quiet
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.errors import UsageError


def test_a_shard_is_named_by_its_number_from_one_and_their_count():
    assert Shard.parse("1/4") == Shard(1, 4)
    assert str(Shard.parse(f"{MAX_SHARDS}/{MAX_SHARDS}")) == f"{MAX_SHARDS}/{MAX_SHARDS}"
    for text in ("", "0/4", "5/4", "1", "1/", "-1/2", "1/0", "a/b", "1/2/3", f"1/{MAX_SHARDS + 1}"):
        with pytest.raises(UsageError, match="expected i/N"):
            Shard.parse(text)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 20])
def test_all_programs_are_begun_and_shards_help_from_different_ends(count):
    """A program that no shard begins with would wait until all others are done."""
    items, begun = list(range(10)), list[int]()
    for number in range(1, count + 1):
        order = Shard(number, count).ordered(items)
        assert sorted(order) == items, "any shard can do all"
        begun += order[: len(items[number - 1 :: count])]
    assert sorted(begun) == items
    assert Shard(2, 2).ordered(items) == [1, 3, 5, 7, 9, 8, 6, 4, 2, 0]


@pytest.fixture
def store(tmp_path):
    return DirectoryStore.open(tmp_path)


def packing(store, number, bundle="demo"):
    return Packing(Shard(number, 4), bundle, store)


def test_one_shard_packs_and_the_others_learn_of_it(store):
    found = list[tuple[int, Packed | Turn]]()
    all_run = threading.Barrier(4)  # one that began after the others would build on another day

    def run(number):
        with packing(store, number) as mine:
            all_run.wait()
            other = mine.wait("x", Quiet())
            if other is Turn.NOW:
                mine.finish(f"digest {number}")
            found.append((number, other))

    in_threads(4, lambda number: run(number + 1))
    [packer] = [number for number, other in found if other is Turn.NOW]
    packed = {other for _, other in found if other is not Turn.NOW}
    assert packed == {Packed(packer, f"digest {packer}")}


def test_a_build_on_another_day_packs_its_own_bundle(store):
    """Its shards find all executables there, and the mark of the last build too."""
    with packing(store, 3) as failing:
        assert failing.wait("x", Quiet()) is Turn.NOW  # and it never finishes
    for day in range(9):
        first, late = packing(store, 1), packing(store, 2)
        with first:
            assert first.wait("x", Quiet()) is Turn.NOW, day
            with late:
                assert late.wait("x", Quiet(), give_up=lambda: True) is Turn.LATER
            first.finish("digest")
        with late:
            assert late.wait("x", Quiet()) == Packed(1, "digest")
    with packing(store, 4) as ours:  # two commits are built at the same time, under one name
        assert ours.wait("another commit", Quiet()) is Turn.NOW
        ours.finish("ours")
    assert packing(store, 3, "other").wait("another commit", Quiet()) is Turn.NOW
