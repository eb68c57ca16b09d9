"""A store with shared ones behind it: what they hold is checked, and a build goes on without them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.unit.compiler.sharing.fixtures import Memory, private_key

from prejit.compiler.sharing.layered import LayeredStore, Tier
from prejit.compiler.store.directory import LOCAL, DirectoryStore
from prejit.compiler.store.key import Key

KEY = Key("compile", "demo/decode", (("stablehlo", "x"),))
CONTENT = b"executable" * 1000


class Machine:
    """A machine with a cache of its own, and the shared stores of `tiers`."""

    def __init__(self, directory: Path, *tiers: Tier, namespace: str = "") -> None:
        self.notes: list[str] = []
        self.local = DirectoryStore.open(directory, namespace)
        self.store = LayeredStore(self.local, tiers, self.notes.append)

    def make(self, key: Key = KEY, content: bytes = CONTENT) -> str:
        digest = self.store.put_blob(content)
        self.store.put(key, {"executable": digest}, blobs=[digest])
        self.store.finish()
        return digest


@pytest.fixture
def place() -> Memory:
    return Memory()


def test_what_one_machine_made_another_finds(tmp_path: Path, place: Memory) -> None:
    digest = Machine(tmp_path / "a", Tier(place)).make()
    second = Machine(tmp_path / "b", Tier(place))
    assert second.local.get(KEY) is None
    assert second.store.get(KEY, verify=True) == {"executable": digest}
    assert second.store.read_blob(digest) == CONTENT
    assert second.local.get(KEY, verify=True) == {"executable": digest}  # kept on this machine
    assert (second.store.traffic[0].found, second.store.traffic[0].read_bytes) == (1, len(CONTENT))


def test_where_a_result_is_can_be_asked_without_fetching_it(tmp_path: Path, place: Memory) -> None:
    first = Machine(tmp_path / "a", Tier(place))
    assert first.store.where(KEY) is None
    first.make()
    assert first.store.where(KEY) == LOCAL
    second = Machine(tmp_path / "b", Tier(place))
    assert second.store.where(KEY) == "memory://"
    assert second.local.get(KEY) is None


def test_a_result_without_its_contents_is_not_planned_with(tmp_path: Path, place: Memory) -> None:
    digest = Machine(tmp_path / "a", Tier(place)).make()
    del place.files[f"cas/{digest.removeprefix('sha256:')}"]
    assert Machine(tmp_path / "b", Tier(place)).store.where(KEY) is None


def test_contents_that_disappear_here_stop_nothing(tmp_path: Path, place: Memory) -> None:
    machine = Machine(tmp_path / "a", Tier(place))
    digests = [machine.store.put_blob(CONTENT), machine.store.put_blob(b"other")]
    has = place.has

    def gone(path: str) -> bool:
        for digest in digests:  # the first while it is sent, the second before
            if (found := machine.local.blob_path(digest)) is not None:
                found.unlink()
        return has(path)

    place.has = gone  # type: ignore[method-assign]
    machine.store.put(KEY, {"executable": digests[0]}, blobs=digests)
    machine.store.finish()
    assert [path.partition("/")[0] for path in place.files] == ["cas"]  # and no result
    assert not machine.notes


def test_a_result_is_written_after_its_contents(tmp_path: Path, place: Memory) -> None:
    """A machine that finds the result must find what it names."""
    Machine(tmp_path / "a", Tier(place)).make()
    assert [path.partition("/")[0] for path in place.files] == ["cas", "ac"]


def test_contents_that_are_there_are_not_sent_again(tmp_path: Path, place: Memory) -> None:
    Machine(tmp_path / "a", Tier(place)).make()
    other = Machine(tmp_path / "b", Tier(place))
    other.make(Key("compile", "other", (("stablehlo", "y"),)))
    assert other.store.traffic[0].written_bytes == 0
    assert other.store.traffic[0].sent == 1


def test_weights_stay_on_the_machine(tmp_path: Path, place: Memory) -> None:
    Machine(tmp_path / "a", Tier(place)).make(Key("weights", "demo", (("file", "x"),)))
    assert not place.files


def test_one_that_only_reads_sends_nothing(tmp_path: Path, place: Memory) -> None:
    Machine(tmp_path / "a", Tier(place, writes=False)).make()
    assert not place.files


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT + b"x", b"y" + CONTENT[1:]])
def test_damaged_contents_are_not_used_and_named(
    tmp_path: Path, place: Memory, damage: bytes
) -> None:
    digest = Machine(tmp_path / "a", Tier(place)).make()
    place.files[f"cas/{digest.removeprefix('sha256:')}"] = damage
    second = Machine(tmp_path / "b", Tier(place))
    assert second.store.get(KEY) is None
    assert second.local.blob_path(digest) is None
    assert "compile demo/decode is not used" in second.notes[0]
    assert digest in second.notes[0]


def test_a_result_without_its_contents_is_not_used(tmp_path: Path, place: Memory) -> None:
    digest = Machine(tmp_path / "a", Tier(place)).make()
    del place.files[f"cas/{digest.removeprefix('sha256:')}"]
    second = Machine(tmp_path / "b", Tier(place))
    assert second.store.get(KEY) is None
    assert "found none" in second.notes[0]


def test_a_place_that_fails_is_told_once_and_asked_no_more(tmp_path: Path, place: Memory) -> None:
    place.fails = "memory://: no route to host"
    machine = Machine(tmp_path / "a", Tier(place))
    keys = [Key("compile", str(n), (("n", str(n)),)) for n in range(50)]
    assert list(machine.store.map(machine.store.get, keys)) == [None] * 50
    digest = machine.make()
    assert machine.store.get(KEY) == {"executable": digest}
    assert machine.notes == ["memory://: no route to host; this build goes on without it"]
    assert place.reads <= 16  # those that were under way


def test_a_place_that_fails_half_way_leaves_nothing_half(tmp_path: Path, place: Memory) -> None:
    Machine(tmp_path / "a", Tier(place)).make()
    second = Machine(tmp_path / "b", Tier(place))
    place.download = lambda path, write: write(memoryview(CONTENT[:500])) or place._check() or 1 / 0  # type: ignore[method-assign,func-returns-value]
    with pytest.raises(ZeroDivisionError):
        second.store.get(KEY)
    assert not list((second.local.root / "v1" / "blobs" / "sha256").iterdir())


def test_a_key_that_nobody_has_is_asked_for_once(tmp_path: Path, place: Memory) -> None:
    machine = Machine(tmp_path / "a", Tier(place))
    assert [machine.store.get(KEY) for _ in range(5)] == [None] * 5
    assert place.reads == 1


def test_many_are_asked_for_at_the_same_time(tmp_path: Path) -> None:
    """A build of a thousand programs must not wait a thousand times for a network."""
    meeting = threading.Barrier(8, timeout=60)

    class Slow(Memory):
        def read(self, path: str, most: int) -> bytes | None:
            meeting.wait()
            return None

    machine = Machine(tmp_path / "a", Tier(Slow()))
    keys = [Key("compile", str(n), (("n", str(n)),)) for n in range(8)]
    assert list(machine.store.map(machine.store.get, keys)) == [None] * 8


def test_namespaces_do_not_meet(tmp_path: Path, place: Memory) -> None:
    """What a branch wrote must not get into a release, here or there."""
    branch = Machine(tmp_path / "a", Tier(place, "branch"), namespace="branch")
    branch.make()
    assert Machine(tmp_path / "b", Tier(place, "release")).store.get(KEY) is None
    assert Machine(tmp_path / "b", Tier(place, "branch")).store.get(KEY) is not None
    assert DirectoryStore.open(tmp_path / "a", "release").get(KEY) is None
    assert DirectoryStore.open(tmp_path / "a", "branch").get(KEY) is not None


def test_a_branch_may_read_what_the_release_wrote(tmp_path: Path, place: Memory) -> None:
    Machine(tmp_path / "a", Tier(place, "release"), namespace="release").make()
    tiers = Tier(place, "branch"), Tier(place, "release", writes=False)
    branch = Machine(tmp_path / "b", *tiers, namespace="branch")
    assert branch.store.get(KEY) is not None
    assert [traffic.found for traffic in branch.store.traffic] == [0, 1]


def test_only_what_a_believed_key_signed_is_read(tmp_path: Path, place: Memory) -> None:
    signer, stranger = private_key(), private_key()
    believing = Tier(place, believed=(signer.public,), writes=False)
    for number, wrong in enumerate((None, stranger)):
        Machine(tmp_path / f"wrong{number}", Tier(place, signer=wrong)).make()
        reader = Machine(tmp_path / f"reader{number}", believing)
        assert reader.store.get(KEY) is None
        assert "expected" in reader.notes[0]
    Machine(tmp_path / "right", Tier(place, signer=signer)).make()
    assert Machine(tmp_path / "reader", believing).store.get(KEY) is not None


def test_an_earlier_result_under_another_name_is_refused(tmp_path: Path, place: Memory) -> None:
    """Whoever may write cannot pass a signed result off as that of another program."""
    signer = private_key()
    Machine(tmp_path / "a", Tier(place, signer=signer)).make()
    other = Key("compile", "demo/prefill", (("stablehlo", "y"),))
    tier = Tier(place, believed=(signer.public,), writes=False)
    place.files[tier.path_of(other)] = place.files[tier.path_of(KEY)]
    reader = Machine(tmp_path / "b", tier)
    assert reader.store.get(other) is None
    assert "expected the result of" in reader.notes[0]
