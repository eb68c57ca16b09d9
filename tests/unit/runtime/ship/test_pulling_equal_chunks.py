"""Of a layer that changed in some places, a server fetches these places, and never ends with other bytes."""

import random

import pytest
from tests.fake_registry import fake_registry
from tests.layouts import blob
from tests.unit.runtime.format.test_chunks import CHUNK, recipe_of_chunks, weights_with_filler

from prejit.runtime.base.files import digest_of
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship.machine_store import MachineStore
from prejit.runtime.ship.pulling import Wanted, pull
from prejit.runtime.ship.reference import parse_reference

from .conftest import audited, moved

CHANGED = (3, 4, 5, 20, 40)
"""The chunks that differ between two versions."""


class Versions:
    """Two versions of a bundle in a registry, `v1` and `v2`."""

    def __init__(self, registry, recipe, directory):
        self.registry = registry
        before = weights_with_filler(recipe.content(WEIGHTS_MEDIA_TYPE))
        after = bytearray(before)
        for number in CHANGED:
            after[number * CHUNK + 7] ^= 1
        self.weights = {"v1": before, "v2": bytes(after)}
        for tag, content in self.weights.items():
            moved(recipe_of_chunks(recipe, content).write(directory / tag), self.at(tag))

    def at(self, tag):
        return parse_reference(f"oci://{self.registry.host}/b:{tag}")

    def pull(self, tag, store):
        """Pull a version and check it. Return how often its weights were asked for, and what moved."""
        self.registry.seen.clear()
        found = pull(self.at(tag), store, Wanted(Fingerprint.current()))
        assert audited(found.path).target_count == 1
        digest = digest_of(self.weights[tag])
        assert blob(store.path, digest).read_bytes() == self.weights[tag]
        return self.registry.count("GET", digest), found.moved.moved_bytes


@pytest.fixture
def versions(recipe, tmp_path):
    with fake_registry() as registry:
        yield Versions(registry, recipe, tmp_path)


def test_only_the_chunks_that_differ_are_fetched(versions, store):
    versions.pull("v1", store)
    requests, moved_bytes = versions.pull("v2", store)
    assert requests == 3
    assert len(CHANGED) * CHUNK < moved_bytes < (len(CHANGED) + 1) * CHUNK
    assert blob(store.path, digest_of(versions.weights["v1"])).exists()


def test_a_transfer_goes_on_in_the_middle_of_a_chunk(versions, store):
    content = versions.weights["v2"]
    for place in (1, 2 * CHUNK + 5, 3 * CHUNK, 4 * CHUNK + 9, 30 * CHUNK + 1, len(content) - 1):
        other = MachineStore(store.path.with_name(f"store-{place}"))
        versions.pull("v1", other)
        partial = other.path / ".partial" / digest_of(content).removeprefix("sha256:")
        partial.write_bytes(content[:place])
        versions.pull("v2", other)


def test_a_chunk_that_is_damaged_here_is_fetched(versions, store):
    versions.pull("v1", store)
    content = bytearray(versions.weights["v1"])
    file = blob(store.path, digest_of(content))
    for number in random.Random(0).sample(range(40), 9):
        content[number * CHUNK] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    versions.pull("v2", store)
