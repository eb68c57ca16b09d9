"""What every kind of store must do so that machines agree in it, and what is built on any of them."""

import io
import json
import os
import threading
import time
from contextlib import ExitStack, closing

import pytest
from tests.extent import one_in
from tests.fake_registry import fake_registry
from tests.store_servers import azurite, docker_registry, moto, nginx, running, s3rver
from tests.threads import in_threads
from tests.unit.compiler.sharing.fixtures import S3_SETTINGS, Memory, http_store, s3_store

from prejit.compiler.sharing import objects
from prejit.compiler.sharing import oci_registry as registry_module
from prejit.compiler.sharing import remote as remote_module
from prejit.compiler.sharing.layered import LayeredStore
from prejit.compiler.sharing.leases import Leases
from prejit.compiler.sharing.objects import Objects
from prejit.compiler.sharing.remote import Patient, RemoteError, claim, evict
from prejit.compiler.sharing.shared_result import SharedResult, Tier, encode
from prejit.compiler.sharing.sharing_settings import read_stores
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.base.files import digest_of
from prejit.runtime.cli.commands import run
from prejit.runtime.errors import UsageError

KEY = Key("compile", "demo/decode", (("stablehlo", "x"),))
AC, CAS = f"ac/{'a' * 64}", f"cas/{'b' * 64}"
SERVERS = {"nginx": nginx, "docker-registry": docker_registry}
"""The kinds that need a program which a machine may lack."""
for server in (moto, azurite, s3rver):
    if server.__name__.upper() in os.environ:  # its directory, of 190 or 290 MB
        SERVERS[server.__name__] = server
S3 = [f"s3, conditions {each}" for each in ("kept", "ignored", "refused")]
KINDS = ("memory", "directory", "http", "registry", *S3, *SERVERS)
CONTENTS = (b"executable" * 1000, os.urandom(100_000))
LARGE = bytes(range(256)) * (40 << 10)  # 10 MiB: more than a part of a multipart upload


@pytest.fixture
def files():
    """What the small registry holds: blobs and manifests."""
    return {}, {}


@pytest.fixture(params=one_in(2, KINDS))
def connect(request, tmp_path, monkeypatch, files):
    """`connect()`: one store of a kind, as another machine sees it each time."""
    for module in (objects, registry_module):  # a busy machine is not a store that is down
        monkeypatch.setattr(module, "ANSWER_SECONDS", 60.0)
    kind = request.param
    with ExitStack() as stack:
        if kind == "memory":
            place = Memory()
            yield lambda: place
            return
        url, env = str(tmp_path / "shared"), {}
        if kind in SERVERS:
            server = stack.enter_context(running(SERVERS[kind](tmp_path), kind))
            url, env = server.url, server.env
        elif kind in S3:
            endpoint = stack.enter_context(s3_store(kind.rpartition(" ")[2]))
            url, env = "s3://bucket/store", {**S3_SETTINGS, "AWS_ENDPOINT": endpoint}
        elif kind == "http":
            url = f"{stack.enter_context(http_store({}, []))}/store"
        elif kind == "registry":
            registry = stack.enter_context(fake_registry(blobs=files[0], manifests=files[1]))
            url = f"oci://{registry.host}/team/store"
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        yield lambda: read_stores(url).tiers[0].remote


def result(owner):
    return encode(SharedResult(KEY, {"owner": owner}, {}), None)


def machine(directory, remote):
    notes = list[str]()
    return LayeredStore(DirectoryStore.open(directory), [Tier(remote)], notes.append), notes


def test_results_and_contents_come_back_as_they_were_sent(connect, tmp_path):
    place, got, file = connect(), bytearray(), tmp_path / "large"
    path = f"cas/{digest_of(LARGE).removeprefix('sha256:')}"
    assert place.read(AC, 10_000) is None
    assert not place.has(path)
    assert not place.download(path, got.extend)
    file.write_bytes(LARGE)
    with file.open("rb") as content:
        place.write(path, content)
    place.write(AC, result("a"))
    other = connect()
    assert other.has(path)
    assert other.download(path, got.extend)
    assert got == LARGE
    assert other.read(AC, 10_000) == result("a")


def test_of_machines_that_create_at_once_one_succeeds_and_all_see_it(connect):
    machines, created = [connect() for _ in range(4)], dict[int, bool]()
    in_threads(4, lambda n: created.update({n: machines[n].create(AC, result(n))}))
    [winner] = [number for number, has_won in created.items() if has_won]
    place, other = connect(), connect()
    assert place.read(AC, 10_000) == result(winner)
    assert not place.create(AC, result("late"))
    assert place.create(AC, result(winner)), "the answer to our earlier attempt may have been lost"
    if not place.remove(CAS):
        for ask in (lambda: list(place.listed()), lambda: evict(place, 0)):
            with pytest.raises(UsageError, match="whose files can be listed"):
                ask()
        other.write(AC, result(""))
        assert place.read(AC, 10_000) == result("")
        return
    assert [(each.path, each.size) for each in connect().listed()] == [(AC, len(result(winner)))]
    assert place.remove(AC)
    assert not other.has(AC)
    assert place.remove(AC), "what is not there is removed"
    assert other.create(AC, result("second"))


def test_who_makes_a_damaged_result_again_replaces_it(connect, files, tmp_path, request):
    if "docker-registry" in request.node.name:
        pytest.skip("it takes no contents that it has: its operator deletes them")

    def make(store):
        store.put(KEY, {}, blobs=map(store.put_blob, CONTENTS))
        store.finish()

    digests = [digest_of(each) for each in CONTENTS]
    make(machine(tmp_path / "first", connect())[0])
    for kind in ("ac", "cas"):
        paths = [f"cas/{each.removeprefix('sha256:')}" for each in digests]
        for path in paths if kind == "cas" else [Tier(connect()).path_of(KEY)]:
            held = [(some, at) for some in files for at in some if path.partition("/")[2] in at[1]]
            for some, at in held:
                some[at] = some[at][:-7]
            if not held:
                connect().write(path, b"damaged")
        second, notes = machine(tmp_path / f"second {kind}", connect())
        assert second.get(KEY) is None
        make(second)
        assert "compile demo/decode is not used" in notes[0]
        assert kind == "ac" or any(each in notes[0] for each in digests)
        third, notes = machine(tmp_path / f"third {kind}", connect())
        assert third.get(KEY, verify=True) == {}, notes
        assert [third.read_blob(each) for each in digests] == [*CONTENTS]
        assert notes == []


def test_a_slow_store_still_gives_a_file_to_one(monkeypatch):
    """Every write takes longer than the time that machines wait for each other's."""
    monkeypatch.setattr(remote_module, "SETTLE_SECONDS", 0.01)
    found_none = threading.Barrier(2)

    class Slow(Memory):
        def read(self, path, most):
            if (content := super().read(path, most)) is None:
                found_none.wait(60)
            return content

        def write(self, path, content):
            time.sleep(0.6 if content == b"machine 1" else 0.3)
            super().write(path, content)

    place, created = Slow(), dict[int, bool]()
    in_threads(2, lambda number: created.update({number: claim(place, AC, b"machine %d" % number)}))
    assert created == {0: False, 1: True}, "the last one that wrote has it"


def test_a_request_that_fails_is_tried_again(monkeypatch):
    monkeypatch.setattr(remote_module, "PAUSES_SECONDS", (0.0, 0.0))

    class Hiccup(Memory):
        left = 1

        def _check(self):
            if self.left:
                self.left -= 1
                raise RemoteError("hiccup")

    place, got = Hiccup(), bytearray()
    store = Patient(place)
    store.write("cas/x", io.BytesIO(b"content"))
    assert place.files == {"cas/x": b"content"}
    for ask, given, expected in (
        (store.read, ("cas/x", 100), b"content"),
        (store.has, ("cas/x",), True),
        (store.download, ("cas/x", got.extend), True),
        (store.create, ("ac/x", b"mine"), True),
        (store.remove, ("cas/x",), True),
    ):
        place.left = 2
        assert ask(*given) == expected
    assert got == b"content"
    assert (store.name, place.files) == ("memory://", {"ac/x": b"mine"})
    assert [each.path for each in store.listed()] == ["ac/x"]
    with pytest.raises(RemoteError, match="down"):
        Patient(Memory(fails="down")).read("ac/x", 1)


def test_a_cut_download_goes_on(monkeypatch):
    """A server that is restarted must not end the build of a machine that was just reading from it."""
    monkeypatch.setattr(remote_module, "PAUSES_SECONDS", (0.0, 0.0))
    content = bytes(range(250)) * 12

    class Cut(Memory):
        def download(self, path, write):
            most = cuts.pop(0) if cuts else len(content) + 1
            for start in range(0, min(most, len(content)), 333):
                write(memoryview(content[start : min(start + 333, most)]))
            if most <= len(content):
                raise RemoteError("cut")
            return True

    for cut_at in ([2500, 700], [0, 3000]):
        cuts, got = cut_at, bytearray()
        assert Patient(Cut()).download("cas/x", got.extend)
        assert got == content


@pytest.mark.parametrize("connect", ["directory", S3[0]], indirect=True)
def test_making_room_takes_no_lease_in_use_and_none_that_one_in_use_follows(connect):
    """Without it a third machine would begin with the first lease, beside the owner of the second."""
    place = connect()
    place.write(CAS, b"content")
    with closing(Leases(Tier(connect()), "first", 3600.0)) as first:
        assert first.take(KEY) is not None
        found = evict(place, 0)
        assert (found.removed, found.kept) == (1, 1)
    assert evict(place, 0).kept == 0
    dead, second, third = (Leases(Tier(connect()), name, 3600.0) for name in "abc")
    with closing(dead), closing(second), closing(third):
        assert dead.take(KEY) is not None
        second._seconds = 0.0
        second.take(KEY)  # now it has seen that nobody writes it
        second._seconds = 3600.0
        second._watched = {path: (seen, -1e9) for path, (seen, _) in second._watched.items()}
        assert second.take(KEY) is not None
        assert evict(place, 0).kept == 2
        third._watched = dict(second._watched)
        assert third.take(KEY) is None


def test_the_command_makes_room(tmp_path, capsys, said):
    shared = tmp_path / "shared"
    store, _ = machine(tmp_path / "a", Objects(shared.as_uri()))
    store.put(KEY, {}, blobs=[store.put_blob(b"x" * 1000)])
    store.finish()
    (shared / "other").mkdir()
    (shared / "other" / "file").write_text("of somebody else")

    def removed(*options):
        capsys.readouterr()
        [found] = json.loads(said("gc", "--store", shared, "--json", *options))["stores"]
        return found["removed"]

    for half in (["--max-size", "1GB"], ["--store", "x"], ["--store", "x", "--max-size", "much"]):
        with pytest.raises(UsageError):
            run(["gc", "--cache", str(tmp_path), *half])
    assert 0 < removed("--max-size", "1.5kB", "--dry-run") < 3
    assert [*(shared / "cas").iterdir()]
    assert removed("--max-size", "0") == 3
    assert not [*(shared / "cas").iterdir()]
    assert (shared / "other" / "file").exists()
