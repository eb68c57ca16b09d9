"""What every kind of store must do, so that machines can agree in it: one creates a file, and all see it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.store_servers import azurite, docker_registry, moto, nginx
from tests.unit.compiler.sharing.fixtures import (
    S3_SETTINGS,
    Memory,
    http_store,
    registry,
    s3_store,
)

from prejit.compiler.sharing import objects
from prejit.compiler.sharing import oci_registry as registry_module
from prejit.compiler.sharing import remote as remote_module
from prejit.compiler.sharing.layered import LayeredStore
from prejit.compiler.sharing.leases import Leases
from prejit.compiler.sharing.remote import Remote, claim
from prejit.compiler.sharing.shared_result import SharedResult, Tier, encode
from prejit.compiler.sharing.sharing_settings import read_stores
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.store.key import Key
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import UsageError

KEY = Key("compile", "demo/decode", (("stablehlo", "x"),))
AC = f"ac/{'a' * 64}"
SERVERS = {"nginx": nginx, "docker-registry": docker_registry}
"""The kinds that need a program which a machine may lack."""
if "MOTO" in os.environ:  # its directory, of 290 MB
    SERVERS["moto"] = moto
if "AZURITE" in os.environ:  # its directory, of 190 MB
    SERVERS["azurite"] = azurite
CONDITIONS = ("kept", "ignored", "refused")
KINDS = (
    "memory",
    "directory",
    "http",
    "registry",
    *(f"s3, conditions {each}" for each in CONDITIONS),
    *SERVERS,
)

Connect = Callable[[], Remote]
CONTENTS = (b"executable" * 1000, os.urandom(100_000))


@pytest.fixture
def files() -> dict[str, bytes]:
    """What the small registry holds."""
    return {}


@pytest.fixture(params=KINDS)
def connect(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, bytes],
) -> Iterator[Connect]:
    """`connect()`: one store of a kind, as another machine sees it each time."""
    for module in (objects, registry_module):  # a busy machine is not a store that is down
        monkeypatch.setattr(module, "ANSWER_SECONDS", 60.0)
    kind: str = request.param
    with ExitStack() as stack:
        if kind == "memory":
            place = Memory()
            yield lambda: place
            return
        if kind in SERVERS:
            server = SERVERS[kind](tmp_path)
            if server is None:
                pytest.skip(f"{kind} is not installed")
            server.start()
            stack.callback(server.kill)
            for name, value in server.env.items():
                monkeypatch.setenv(name, value)
            url = server.url
        elif kind.startswith("s3"):
            endpoint = stack.enter_context(s3_store(kind.rpartition(" ")[2]))  # type: ignore[arg-type]
            for name, value in {**S3_SETTINGS, "AWS_ENDPOINT": endpoint}.items():
                monkeypatch.setenv(name, value)
            url = "s3://bucket/store"
        elif kind == "http":
            url = f"{stack.enter_context(http_store({}, []))}/store"
        elif kind == "registry":
            url = f"oci://{stack.enter_context(registry(files=files))}/team/store"
        else:
            url = str(tmp_path / "shared")
        yield lambda: read_stores(url, {}).tiers[0].remote


def lease(owner: str) -> bytes:
    return encode(SharedResult(KEY, {"owner": owner}, {}), None)


def at_once(count: int, run: Callable[[int], object]) -> None:
    together = threading.Barrier(count)

    def begin(number: int) -> None:
        together.wait(60)
        run(number)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def test_of_machines_that_create_a_file_at_once_one_succeeds(connect: Connect) -> None:
    created = dict[bytes, bool]()
    machines = [(connect(), lease(f"machine {number}")) for number in range(4)]

    def create(number: int) -> None:
        machine, content = machines[number]
        created[content] = machine.create(AC, content)

    at_once(len(machines), create)
    assert sum(created.values()) == 1, created
    found = connect().read(AC, 10_000)
    assert found is not None
    assert created[found]


def test_a_file_that_is_there_is_not_created(connect: Connect) -> None:
    first, second = connect(), connect()
    assert first.create(AC, lease("first"))
    assert not second.create(AC, lease("second"))
    assert second.read(AC, 10_000) == lease("first")
    # The answer to an earlier attempt of ours may have been lost.
    assert first.create(AC, lease("first"))


def test_a_removed_file_can_be_created_again(connect: Connect) -> None:
    place, other = connect(), connect()
    assert place.create(AC, lease("first"))
    if place.remove(AC):
        assert not other.has(AC)
        assert place.remove(AC), "what is not there is removed"
        assert other.create(AC, lease("second"))
    else:
        other.write(AC, lease(""))
        assert place.read(AC, 10_000) == lease("")


def test_files_are_listed_or_nobody_makes_room(connect: Connect) -> None:
    place = connect()
    place.write(AC, lease("first"))
    if place.remove(f"cas/{'b' * 64}"):
        found = [*connect().listed()]
        assert [(each.path, each.size) for each in found] == [(AC, len(lease("first")))]
    else:
        with pytest.raises(UsageError, match="whose files can be listed"):
            list(place.listed())


@pytest.mark.parametrize("kind", ["ac", "cas"])
def test_who_makes_a_damaged_result_again_replaces_it(
    connect: Connect, files: dict[str, bytes], tmp_path: Path, kind: str, request: Any
) -> None:
    if "docker-registry" in request.node.name:
        pytest.skip("it takes no contents that it has: its operator deletes them")
    notes: list[list[str]] = [[], [], []]
    stores = [
        LayeredStore(DirectoryStore.open(tmp_path / f"{number}"), [Tier(connect())], told.append)
        for number, told in enumerate(notes)
    ]
    digests = [digest_of(each) for each in CONTENTS]

    def make(store: LayeredStore) -> None:
        store.put(KEY, {}, blobs=map(store.put_blob, CONTENTS))
        store.finish()

    make(stores[0])
    digits = [each.removeprefix("sha256:") for each in digests]
    for path in [Tier(connect()).path_of(KEY)] if kind == "ac" else [f"cas/{d}" for d in digits]:
        held = [each for each in files if path.partition("/")[2] in each]
        for each in held:
            files[each] = files[each][:-7]
        if not held:
            connect().write(path, b"damaged")
    assert stores[1].get(KEY) is None
    make(stores[1])
    assert "is not used" in notes[1][0]
    assert stores[2].get(KEY, verify=True) == {}, notes
    assert [stores[2].read_blob(each) for each in digests] == [*CONTENTS]
    assert notes[2] == []


def test_one_machine_has_the_lease_until_it_gives_it_back(connect: Connect) -> None:
    """Two machines that hold one lease compile the same program."""
    machines = [Leases(Tier(connect()), f"machine {number}", 3600.0) for number in range(4)]
    held = dict[int, object]()
    try:
        at_once(len(machines), lambda number: held.update({number: machines[number].take(KEY)}))
        [owner] = [number for number, each in held.items() if each is not None]
        other = machines[owner - 1]
        assert other.take(KEY) is None
        machines[owner].close()
        assert other.take(KEY) is not None
    finally:
        for each in machines:
            each.close()


def test_a_slow_store_still_gives_a_file_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write takes longer than the time that machines wait for each other's."""
    monkeypatch.setattr(remote_module, "SETTLE_SECONDS", 0.01)
    found_none = threading.Barrier(2)

    class Slow(Memory):
        def read(self, path: str, most: int) -> bytes | None:
            if (content := super().read(path, most)) is None:
                found_none.wait(60)
            return content

        def write(self, path: str, content: object) -> None:
            slow = content == b"machine 1"
            threading.Event().wait(0.6 if slow else 0.3)
            super().write(path, content)  # type: ignore[arg-type]

    place, created = Slow(), dict[int, bool]()
    at_once(2, lambda number: created.update({number: claim(place, AC, b"machine %d" % number)}))
    assert sorted(created.values()) == [False, True]
    assert created[1], "the last one that wrote has it"
