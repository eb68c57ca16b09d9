"""Leases: one machine at a time makes a result, and that of a machine that died goes to another one."""

import time

import pytest
from tests.signers import signer
from tests.unit.compiler.sharing.fixtures import Memory
from tests.waiting import wait_for

from prejit.compiler.sharing.leases import Leases
from prejit.compiler.sharing.shared_result import Tier
from prejit.compiler.store.build_cache_key import Key

KEY = Key("compile", "demo/decode", (("stablehlo", "x"),))
LONG, SHORT = 3600.0, 0.2


@pytest.fixture(params=[True, False], ids=["deletes", "deletes nothing"])
def place(request):
    return Memory(deletes=request.param)


@pytest.fixture
def machine(place):
    """`machine(seconds)`: the leases of a new machine, which are closed after the test."""
    made = list[Leases]()

    def new(seconds=LONG, tier=None):
        made.append(Leases(tier or Tier(place), f"machine {len(made)}", seconds))
        return made[-1]

    yield new
    for each in made:
        each.close()


def test_two_machines_never_hold_the_same_lease(place, machine):
    first, second = machine(), machine()
    lease = first.take(KEY)
    assert lease is not None
    assert second.take(KEY) is None
    assert second.take(Key("compile", "other", (("stablehlo", "y"),))) is not None
    first.release(lease)
    assert second.take(KEY) is not None
    assert first.take(KEY) is None
    second.close()  # gives all back
    assert first.take(KEY) is not None
    for name in ("branch", "release"):
        assert machine(LONG, Tier(place, name)).take(KEY) is not None


@pytest.mark.thorough
def test_a_machine_that_lives_keeps_its_lease(machine):
    first = machine(SHORT)
    assert first.take(KEY) is not None
    second = machine(10 * SHORT)
    end = time.monotonic() + 12 * SHORT
    while time.monotonic() < end:
        assert second.take(KEY) is None
        time.sleep(SHORT / 4)


def test_the_lease_of_a_machine_that_died_is_taken_over_and_it_takes_nothing_back(place, machine):
    """A machine that was suspended must not delete the lease of the one that has taken over."""
    asleep = machine(LONG)
    lease = asleep.take(KEY)  # it never writes it again within this test
    second = machine(SHORT)
    assert second.take(KEY) is None  # it may still live
    wait_for(lambda: second.take(KEY))
    assert machine(LONG).take(KEY) is None  # now it is the second one's
    lease.written -= 2 * LONG
    before = set(place.files)
    asleep.release(lease)
    assert set(place.files) == before
    assert machine(LONG).take(KEY) is None


def test_a_stranger_stops_nobody(place, machine):
    """Who may write into the store, but not sign, must not be able to stop a build."""
    own = signer("own")
    assert machine(LONG, Tier(place)).take(KEY) is not None  # signed by nobody
    stranger = Tier(place, signer=signer("stranger"))
    assert machine(LONG, stranger).take(KEY) is None  # believes anyone
    believing = Tier(place, believed=(own.public,), signer=own)
    assert machine(LONG, believing).take(KEY) is not None
    assert machine(LONG, believing).take(KEY) is None
