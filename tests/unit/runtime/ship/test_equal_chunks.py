"""Of a layer that changed in some places, a server fetches these places, and never ends with other bytes."""

import random

import pytest
from tests.fake_registry import fake_registry
from tests.layouts import blob
from tests.unit.runtime.format.test_chunks import CHUNK, recipe_of_chunks, weights_with_filler

from prejit.runtime.format.audit import audit
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE
from prejit.runtime.format.opening import match, read_contents
from prejit.runtime.format.root import read_root
from prejit.runtime.generation.options import check_generation
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship.machine_store import MachineStore
from prejit.runtime.ship.pulling import Wanted, pull
from prejit.runtime.ship.reference import parse_reference

from .conftest import moved

CHANGED = (3, 4, 5, 20, 40)
"""The chunks that differ between two versions."""


class Versions:
    def __init__(self, registry, recipe, directory):
        self.registry = registry
        before = weights_with_filler(recipe.content(WEIGHTS_MEDIA_TYPE))
        after = bytearray(before)
        for number in CHANGED:
            after[number * CHUNK + 7] ^= 1
        self.size = len(before)
        self.weights = list[str]()
        for tag, content in (("v1", before), ("v2", bytes(after))):
            path = recipe_of_chunks(recipe, content).write(directory / tag)
            with Layout(path) as layout:
                target = match(read_root(layout), Fingerprint.current())[0]
                manifest = read_contents(layout, target).manifest
            self.weights.append(manifest.layer(WEIGHTS_MEDIA_TYPE).digest)
            moved(path, self.at(tag))

    def at(self, tag):
        return parse_reference(f"oci://{self.registry.host}/b:{tag}")

    def pull(self, tag, store):
        self.registry.seen.clear()
        return pull(self.at(tag), store, Wanted(Fingerprint.current()))

    def requests(self):
        return self.registry.count("GET", self.weights[1])


@pytest.fixture
def versions(recipe, tmp_path):
    with fake_registry() as registry:
        yield Versions(registry, recipe, tmp_path)


def test_only_the_chunks_that_differ_are_fetched(versions, store):
    versions.pull("v1", store)
    found = versions.pull("v2", store)
    assert audit(found.path, check_generation).target_count == 1
    assert versions.requests() == 3
    assert len(CHANGED) * CHUNK < found.moved.moved_bytes < (len(CHANGED) + 1) * CHUNK
    assert blob(store.path, versions.weights[0]).stat().st_size == versions.size


def test_a_transfer_goes_on_in_the_middle_of_a_chunk(versions, store):
    expected = blob(versions.pull("v2", store).path.parents[1], versions.weights[1]).read_bytes()
    for place in (1, 2 * CHUNK + 5, 3 * CHUNK, 4 * CHUNK + 9, 30 * CHUNK + 1, versions.size - 1):
        other = MachineStore(store.path.with_name(f"store-{place}"))
        versions.pull("v1", other)
        partial = other.path / ".partial" / versions.weights[1].removeprefix("sha256:")
        partial.write_bytes(expected[:place])
        versions.pull("v2", other)
        assert blob(other.path, versions.weights[1]).read_bytes() == expected


def test_a_chunk_that_is_damaged_here_is_fetched(versions, store):
    versions.pull("v1", store)
    file = blob(store.path, versions.weights[0])
    content = bytearray(file.read_bytes())
    for number in random.Random(0).sample(range(40), 9):
        content[number * CHUNK] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    found = versions.pull("v2", store)
    assert audit(found.path, check_generation).target_count == 1
