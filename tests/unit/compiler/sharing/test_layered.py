"""A store with shared ones behind it: what they hold is checked, and a build goes on without them."""

import threading

import pytest
from tests.signers import signer
from tests.threads import in_threads
from tests.unit.compiler.sharing.fixtures import Memory

from prejit.compiler.sharing.layered import LayeredStore
from prejit.compiler.sharing.leases import Leases
from prejit.compiler.sharing.shared_result import Tier
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import LOCAL, DirectoryStore
from prejit.runtime.errors import StoreError

KEY = Key("compile", "demo/decode", (("stablehlo", "x"),))
CONTENT = b"executable" * 1000


class Machine:
    """A machine with a cache of its own, and the shared stores of `tiers`."""

    def __init__(self, directory, *tiers, namespace="", **options):
        self.notes = []
        self.local = DirectoryStore.open(directory, namespace)
        self.store = LayeredStore(self.local, tiers, self.notes.append, **options)

    def put(self, key=KEY):
        digest = self.store.put_blob(CONTENT)
        self.store.put(key, {"executable": digest}, blobs=[digest])
        return digest

    def make(self, key=KEY):
        digest = self.put(key)
        self.store.finish()
        return digest


@pytest.fixture
def place():
    return Memory()


def test_a_result_under_a_sealed_key_stays_on_this_machine(tmp_path, place):
    machine = Machine(tmp_path / "a", Tier(place))
    key = Key("trace", "demo/f", (("variable PIN", machine.store.seal("1234")),))
    assert machine.store.get(key) is None
    with machine.store.making(key):
        machine.make(key)
    assert machine.store.where(key) == LOCAL
    assert place.files == {}
    assert place.reads == 0
    machine.make(Key("weights", "demo", (("file", "x"),)))
    Machine(tmp_path / "b", Tier(place, writes=False)).make()
    assert not place.files


def test_where_a_result_is_can_be_asked_without_fetching_it(tmp_path, place):
    """One without its contents is nowhere: a store that makes room drops them, and they are sent again."""
    first, second = (Machine(tmp_path / name, Tier(place)) for name in "ab")
    assert first.store.where(KEY) is None
    path = f"cas/{first.make().removeprefix('sha256:')}"
    assert first.store.where(KEY) == LOCAL
    assert second.store.where(KEY) == "memory://"
    assert second.local.get(KEY) is None
    dropped = place.files.pop(path)
    assert second.store.where(KEY) is None
    assert second.store.get(KEY) is None
    assert not second.notes
    second.make()
    assert place.files[path] == dropped
    third = Machine(tmp_path / "c", Tier(place))
    assert third.store.get(KEY, verify=True) is not None
    assert third.local.get(KEY, verify=True) is not None, "it is kept on this machine"
    assert (third.store.traffic[0].found, third.store.traffic[0].read_bytes) == (1, len(CONTENT))


def test_contents_that_disappear_here_stop_nothing(tmp_path, place):
    machine = Machine(tmp_path / "a", Tier(place))
    digests = [machine.store.put_blob(CONTENT), machine.store.put_blob(b"other")]
    has = place.has

    def gone(path):
        for digest in digests:  # the first while it is sent, the second before
            if (found := machine.local.blob_path(digest)) is not None:
                found.unlink()
        return has(path)

    place.has = gone
    machine.store.put(KEY, {"executable": digests[0]}, blobs=digests)
    machine.store.finish()
    assert [path.partition("/")[0] for path in place.files] == ["cas"]  # and no result
    assert not machine.notes


def test_a_result_is_written_after_its_contents(tmp_path, place):
    """A machine that finds the result must find what it names."""
    Machine(tmp_path / "a", Tier(place)).make()
    assert [path.partition("/")[0] for path in place.files] == ["cas", "ac", "ac"]  # and its key
    other = Machine(tmp_path / "b", Tier(place))
    other.make(Key("compile", "other", (("stablehlo", "y"),)))
    assert (other.store.traffic[0].written_bytes, other.store.traffic[0].sent) == (0, 1)
    again = Machine(tmp_path / "a", Tier(place))
    assert again.store.get(KEY) is not None
    again.store.finish()
    assert again.store.traffic[0].sent == 0


def test_damaged_contents_are_named_and_not_kept(tmp_path, place):
    digest = Machine(tmp_path / "a", Tier(place)).make()
    damages = (CONTENT[:-1], "found sha256"), (CONTENT + b"x", "found more")
    for damage, said in (*damages, (b"y" + CONTENT[1:], "found sha256")):
        place.files[f"cas/{digest.removeprefix('sha256:')}"] = damage
        second = Machine(tmp_path / said / str(len(damage)), Tier(place))
        assert second.store.get(KEY) is None
        assert second.local.blob_path(digest) is None
        assert "compile demo/decode is not used" in second.notes[0]
        assert digest in second.notes[0]
        assert said in second.notes[0]


def test_a_place_that_fails_is_told_once_and_asked_no_more(tmp_path, place):
    place.fails = "memory://: no route to host"
    machine = Machine(tmp_path / "a", Tier(place))
    keys = [Key("compile", str(n), (("n", str(n)),)) for n in range(50)]
    assert list(machine.store.map(machine.store.get, keys)) == [None] * 50
    digest = machine.make()
    assert machine.store.get(KEY) == {"executable": digest}
    assert machine.notes == ["memory://: no route to host; this build goes on without it"]
    assert place.reads <= 16  # those that were under way
    second = sharing(tmp_path / "b", place)  # which cannot agree, and makes nothing
    with pytest.raises(StoreError, match="no route to host"), second.store.making(KEY):
        pass
    assert second.notes == ["memory://: no route to host"]
    second.store.abandon()


def test_namespaces_meet_only_where_a_tier_reads_another(tmp_path, place):
    """What a branch wrote must not get into a release, here or there."""
    Machine(tmp_path / "a", Tier(place, "release"), namespace="release").make()
    assert Machine(tmp_path / "b", Tier(place, "branch")).store.get(KEY) is None
    assert DirectoryStore.open(tmp_path / "a", "branch").get(KEY) is None
    assert DirectoryStore.open(tmp_path / "a", "release").get(KEY) is not None
    tiers = Tier(place, "branch"), Tier(place, "release", writes=False)
    branch = Machine(tmp_path / "b", *tiers, namespace="branch")
    assert branch.store.get(KEY) is not None
    assert [traffic.found for traffic in branch.store.traffic] == [0, 1]
    assert branch.store.fetched == {KEY.digest: "memory:// (release)"}


def test_only_what_a_believed_key_signed_is_read_and_explains(tmp_path, place):
    believing = Tier(place, believed=(signer("a").public,), writes=False)
    for number, wrong in enumerate((None, signer("b"))):
        Machine(tmp_path / f"wrong{number}", Tier(place, signer=wrong)).make()
        reader = Machine(tmp_path / f"reader{number}", believing)
        assert reader.store.last_keys(KEY.kind, KEY.name) == ()
        assert reader.store.get(KEY) is None
        assert "expected" in reader.notes[0]
    Machine(tmp_path / "right", Tier(place, signer=signer("a"))).make()
    assert Machine(tmp_path / "reader", believing).store.get(KEY) is not None
    key = Key("last", "compile demo", (("kind", "compile"), ("name", "demo")))
    for ingredients in (None, [["a"]], [["a", "b"], ["a", "c"]], [1]):
        Tier(place).write(key, {"ingredients": ingredients}, {})
        assert Machine(tmp_path / "a", Tier(place)).store.last_keys("compile", "demo") == ()


def test_a_build_alone_sends_what_the_store_lacks(tmp_path, place):
    """A build whose results are all on its machine still fills a new store; a plan or a reader does not."""
    digest = Machine(tmp_path / "a", Tier(Memory())).make()
    for writes, offers in ((True, False), (False, True), (True, True)):
        assert not place.files
        store = Machine(tmp_path / "a", Tier(place, writes=writes), offers=offers).store
        assert store.get(KEY) is not None
        assert store.get(KEY) is not None
        store.finish()
    assert store.traffic[0].sent == 1
    assert Machine(tmp_path / "b", Tier(place)).store.get(KEY) == {"executable": digest}


def sharing(directory, place):
    """A machine that agrees with others who makes a result."""
    tier = Tier(place)
    return Machine(directory, tier, leases=Leases(tier, str(directory)))


def test_machines_that_share_a_build_make_a_result_once(tmp_path, place):
    first, second = (sharing(tmp_path / name, place) for name in "ab")
    made = list[Machine]()

    # Before either starts: one may have sent it before the other looks.
    for each in (first, second):
        assert each.store.get(KEY) is None

    def build(machine):
        with machine.store.making(KEY) as held:
            assert held
            if machine.store.get(KEY) is None:
                made.append(machine)
                machine.put()

    in_threads(2, lambda number: build((first, second)[number]))
    assert len(made) == 1
    for each in (first, second):
        assert each.local.get(KEY, verify=True) is not None
        each.store.finish()


def test_a_lease_lasts_until_the_others_find_the_result(tmp_path):
    """A lease that ends when the result is made, and not yet sent, lets another machine make it again."""
    may_send = threading.Event()

    class Slow(Memory):
        def write(self, path, content):
            may_send.wait(60)
            super().write(path, content)

    place = Slow()
    first, second = (sharing(tmp_path / name, place) for name in "ab")

    def is_free():
        with second.store.making(KEY, give_up=lambda: True) as held:
            return held

    with first.store.making(KEY):
        assert not is_free()
    assert is_free()  # the first one made nothing
    with first.store.making(KEY):
        digest = first.put()
    assert not is_free()
    may_send.set()
    with second.store.making(KEY) as held:
        assert held
        assert second.store.get(KEY) == {"executable": digest}
    first.store.finish()
    second.store.finish()
