"""Making room in a shared store: the last used stays, and what is gone is a miss."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.compiler.sharing.fixtures import S3_SETTINGS, Memory, s3_store

from prejit.compiler.sharing import objects
from prejit.compiler.sharing.layered import LayeredStore
from prejit.compiler.sharing.leases import Leases
from prejit.compiler.sharing.objects import Objects
from prejit.compiler.sharing.oci_registry import Repository
from prejit.compiler.sharing.remote import LEASES, RemoteFile, evict
from prejit.compiler.sharing.shared_result import Tier
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.store.key import Key
from prejit.runtime.cli.commands import run
from prejit.runtime.errors import StoreError, UsageError

DAY_SECONDS = 86_400


def test_the_last_used_stay() -> None:
    place = Memory(files={f"cas/{n}": b"x" * 10 for n in range(5)})
    done = evict(place, 25)
    assert set(place.files) == {"cas/3", "cas/4"}
    assert (done.removed, done.freed_bytes, done.kept, done.kept_bytes) == (3, 30, 2, 20)
    assert evict(place, 25).removed == 0


def test_a_dry_run_removes_nothing() -> None:
    place = Memory(files={"cas/0": b"x" * 10})
    assert evict(place, 0, dry_run=True).removed == 1
    assert place.files


def test_a_store_that_fails_is_named() -> None:
    with pytest.raises(StoreError, match="no route"):
        evict(Memory(fails="memory://: no route to host"), 0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x", "oci://127.0.0.1:9/team/store"])
def test_a_server_that_makes_room_itself_is_named(url: str) -> None:
    remote = Repository(url) if url.startswith("oci") else Objects(url)
    with pytest.raises(UsageError, match="whose files can be listed") as raised:
        evict(remote, 0)
    assert "limit its size" in str(raised.value.hint)


def fill(directory: Path, machine: Path, name: str) -> Key:
    """Put a result with contents of 1000 bytes into a directory that machines share."""
    key = Key("compile", name, (("name", name),))
    store = LayeredStore(DirectoryStore.open(machine), [Tier(Objects(directory.as_uri()))], print)
    digest = store.put_blob(name.encode() * (1000 // len(name)))
    store.put(key, {"executable": digest}, blobs=[digest])
    store.finish()
    return key


@pytest.fixture(params=["directory", "s3"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The URL of a store of which prejit may delete files."""
    monkeypatch.setattr(
        objects, "ANSWER_SECONDS", 60.0
    )  # a busy machine is not a store that is down
    if request.param == "directory":
        yield (tmp_path / "shared").as_uri()
        return
    with s3_store() as endpoint:
        for name, value in {**S3_SETTINGS, "AWS_ENDPOINT": endpoint}.items():
            monkeypatch.setenv(name, value)
        yield "s3://bucket/store"


LEASED = Key("compile", "leased", (("name", "leased"),))


def test_a_lease_in_use_is_not_removed(place: str) -> None:
    """Another machine would take it, and make the same result."""
    first, second = (Leases(Tier(Objects(place)), name, 3600.0) for name in ("first", "second"))
    lease = first.take(LEASED)
    assert lease is not None
    Objects(place).write(f"cas/{'a' * 64}", b"content")
    found = evict(Objects(place), 0)
    assert (found.removed, found.kept) == (1, 1)
    assert second.take(LEASED) is None
    first.release(lease)
    assert evict(Objects(place), 0).kept == 0
    assert second.take(LEASED) is not None
    second.close()


def test_the_lease_of_a_machine_that_died_stays_for_its_successor(place: str) -> None:
    """Without it a third machine would begin with the first lease, beside the owner of the second."""
    dead, second, third = (Leases(Tier(Objects(place)), name, 3600.0) for name in "abc")
    assert dead.take(LEASED) is not None
    second._seconds = 0.0
    second.take(LEASED)  # now it has seen that nobody writes it
    second._seconds = 3600.0
    second._watched = {path: (content, -1e9) for path, (content, _) in second._watched.items()}
    assert second.take(LEASED) is not None
    assert evict(Objects(place), 0).kept == 2
    third._watched = dict(second._watched)
    assert third.take(LEASED) is None
    for each in (dead, second, third):
        each.close()


def test_an_old_lease_goes() -> None:
    old, new = f"{LEASES}{'a' * 56}", f"{LEASES}{'b' * 56}"

    class Dated(Memory):
        def listed(self) -> Iterator[RemoteFile]:
            yield RemoteFile(old, 1, 0.0)
            yield RemoteFile(new, 1, 2.0 * DAY_SECONDS)

    remote = Dated(files={old: b"x", new: b"x"})
    evict(remote, 0)
    assert set(remote.files) == {new}


def test_a_running_build_makes_what_it_was_just_told_is_there(place: str, tmp_path: Path) -> None:
    def machine(name: str) -> tuple[LayeredStore, list[str]]:
        notes = list[str]()
        local = DirectoryStore.open(tmp_path / name)
        return LayeredStore(local, [Tier(Objects(place))], notes.append), notes

    def make(store: LayeredStore) -> None:
        digest = store.put_blob(b"content")
        store.put(LEASED, {"executable": digest}, blobs=[digest])
        store.finish()

    make(machine("first")[0])
    second, notes = machine("second")
    assert second.where(LEASED) == Objects(place).name
    assert evict(Objects(place), 0).removed == 3
    assert second.get(LEASED) is None
    make(second)
    assert not [note for note in notes if "written" not in note]
    assert machine("third")[0].get(LEASED) is not None


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared"


def reader(shared: Path, tmp_path: Path, notes: list[str]) -> LayeredStore:
    number = len([*tmp_path.iterdir()])
    local = DirectoryStore.open(tmp_path / f"reader {number}")
    return LayeredStore(local, [Tier(Objects(shared.as_uri()))], notes.append)


def age(directory: Path, days: float) -> None:
    for path in directory.rglob("*"):
        then = path.stat().st_mtime - days * DAY_SECONDS
        os.utime(path, (then, then))


def test_what_a_machine_read_yesterday_stays_longer(shared: Path, tmp_path: Path) -> None:
    """The time of writing would drop what every build uses."""
    old, unused = fill(shared, tmp_path / "a", "a"), fill(shared, tmp_path / "a", "b")
    age(shared, 10)
    assert reader(shared, tmp_path, []).get(old) is not None
    size = sum(path.stat().st_size for path in shared.rglob("*") if path.is_file())
    evict(Objects(shared.as_uri()), size // 2)
    notes = list[str]()
    assert reader(shared, tmp_path, notes).get(old) is not None
    assert reader(shared, tmp_path, notes).get(unused) is None
    assert not notes


@pytest.mark.parametrize("kind", ["ac", "cas"])
def test_any_file_may_go(shared: Path, tmp_path: Path, kind: str) -> None:
    """A result without contents and contents without a result are a miss, and can be sent again."""
    key = fill(shared, tmp_path / "a", "a")
    for path in (shared / kind).iterdir():
        path.unlink()
    notes = list[str]()
    assert reader(shared, tmp_path, notes).get(key) is None
    assert not notes
    fill(shared, tmp_path / "b", "a")
    assert reader(shared, tmp_path, notes).get(key) is not None


def test_the_command_makes_room(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(shared, tmp_path / "a", "a")
    (shared / "other").mkdir()
    (shared / "other" / "file").write_text("of somebody else")

    def removed(*options: str) -> int:
        capsys.readouterr()
        assert run(["gc", "--store", str(shared), "--json", *options]) == 0
        [found] = json.loads(capsys.readouterr().out)["stores"]
        count: int = found["removed"]
        return count

    assert 0 < removed("--max-size", "1.5kB", "--dry-run") < 3
    assert [*(shared / "cas").iterdir()]
    assert removed("--max-size", "0") == 3
    assert not [*(shared / "cas").iterdir()]
    assert (shared / "other" / "file").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--max-size", "1GB"],
        ["--store", "x"],
        ["--store", "x", "--max-size", "1gb"],
        ["--store", "x", "--max-size", "much"],
    ],
)
def test_half_a_request_removes_nothing(options: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        run(["gc", "--cache", str(tmp_path), *options])


def test_files_are_listed_with_their_sizes(shared: Path, tmp_path: Path) -> None:
    assert [*Objects(shared.as_uri()).listed()] == []
    fill(shared, tmp_path / "a", "a")
    found = [*Objects(shared.as_uri()).listed()]
    assert all(isinstance(each, RemoteFile) for each in found)
    assert {each.path: each.size for each in found} == {
        str(path.relative_to(shared)): path.stat().st_size for path in shared.glob("*/*")
    }
