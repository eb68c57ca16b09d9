"""A bundle is loaded while its weights arrive: what it computes waits for them, and is never wrong."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fake_registry import FakeRegistry, fake_registry

from prejit.runtime import load
from prejit.runtime.errors import ClosedError, RejectError, StoreError
from prejit.runtime.format import blob_hashing
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE
from prejit.runtime.format.opening import match, read_manifest
from prejit.runtime.format.root import read_root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship import blob_directory
from prejit.runtime.ship.blob_directory import Arrival, BlobDirectory
from prejit.runtime.ship.machine_store import MachineStore
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.shipping import ship

PROMPT = [1, 2, 3]


def weights_of(path: Path) -> Descriptor:
    with Layout(path) as layout:
        manifest = read_manifest(layout, match(read_root(layout), Fingerprint.current())[0])
    return manifest.layer(WEIGHTS_MEDIA_TYPE)


class Gate:
    """Holds the requests for the weights until it is opened; `fault` is what they get then."""

    def __init__(self, digest: str) -> None:
        self.digest, self.fault = digest, None
        self.is_open, self.asked = threading.Event(), threading.Event()

    def __call__(self, method: str, path: str) -> object:
        if self.digest not in path or method != "GET":
            return None
        self.asked.set()
        self.is_open.wait(30)
        return self.fault


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, decoder_dir: Path) -> Gate:
    # These weights are small, and a load waits for what is.
    monkeypatch.setattr(blob_hashing, "SMALL_BYTES", 0)
    return Gate(weights_of(decoder_dir).digest)


@pytest.fixture
def registry(gate: Gate, decoder_dir: Path) -> Iterator[FakeRegistry]:
    with fake_registry() as found:
        ship(parse_reference(str(decoder_dir)), parse_reference(f"oci://{found.host}/decoder:v1"))
        found.seen.clear()
        found.fault = gate
        yield found
        gate.is_open.set()


def test_it_loads_before_its_weights_and_answers_after_them(
    registry: FakeRegistry, store: MachineStore, gate: Gate, decoder_dir: Path
) -> None:
    with load(decoder_dir) as here:
        expected = here.generate(PROMPT, max_new_tokens=4)
    with load(f"oci://{registry.host}/decoder:v1") as there:
        assert gate.asked.wait(10)
        assert not store.targets_of(there.digest)
        got: list[object] = []
        asking = threading.Thread(target=lambda: got.append(there.generate(PROMPT, max_new_tokens=4)))
        asking.start()
        asking.join(0.3)
        assert not got
        gate.is_open.set()
        asking.join(30)
        assert got == [expected]
        registry.fault = lambda method, path: 503
    with load(f"oci://{registry.host}/decoder@{there.digest}") as stored:
        assert stored.generate(PROMPT, max_new_tokens=4) == expected
        assert stored.start_report().hashed_bytes == 0
    assert registry.count("GET", gate.digest) == 1
    assert not list((store.path / ".partial").iterdir())


@pytest.mark.parametrize(("fault", "error"), [("wrong", RejectError), (503, StoreError)])
def test_weights_that_do_not_arrive_are_an_error_of_whoever_waits(
    registry: FakeRegistry,
    store: MachineStore,
    gate: Gate,
    decoder_dir: Path,
    fault: object,
    error: type[Exception],
) -> None:
    gate.fault = fault
    reference = f"oci://{registry.host}/decoder:v1"
    with contextlib.ExitStack() as stack:
        gate.is_open.set()
        with pytest.raises(error):
            bundle = stack.enter_context(load(reference))
            bundle.generate(PROMPT, max_new_tokens=4)
    assert not store.bundles()
    gate.fault = None
    with load(reference) as bundle, load(decoder_dir) as here:
        options = {"max_new_tokens": 4}
        assert bundle.generate(PROMPT, **options) == here.generate(PROMPT, **options)


def test_a_bundle_that_is_closed_or_dropped_fetches_no_more(
    registry: FakeRegistry, store: MachineStore, gate: Gate
) -> None:
    threads = set(threading.enumerate())
    opener = threading.Timer(0.3, gate.is_open.set)
    opener.start()
    with load(f"oci://{registry.host}/decoder:v1") as bundle:
        gate.asked.wait(10)
    with pytest.raises(ClosedError):
        bundle.generate(PROMPT, max_new_tokens=4)
    opener.join()
    assert not [t for t in set(threading.enumerate()) - threads if t.name == "prejit-arrival"]
    assert not store.bundles()


STEP = 4 * 4096
SIZE = 10 * STEP + 7
CONTENT = hashlib.shake_128(b"weights").digest(SIZE)
AT = Descriptor("x", f"sha256:{hashlib.sha256(CONTENT).hexdigest()}", SIZE)


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_directory, "PIECE_BYTES", STEP)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.booleans()), max_size=4))
def test_what_arrived_is_not_fetched_again_whether_it_was_read_meanwhile_or_not(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[tuple[int, bool]]
) -> None:
    directory = BlobDirectory(tmp_path_factory.mktemp("store"))
    reached = 0
    for cut, is_read in [*cuts, (SIZE, True)]:
        asked: list[int] = []

        def pieces(start: int, cut: int = cut, asked: list[int] = asked) -> Iterator[bytes]:
            asked.append(start)
            for place in range(start, max(start, cut), 5000):
                yield CONTENT[place : min(cut, place + 5000)]
            if cut < SIZE:
                raise StoreError("cut")

        arrival = Arrival() if is_read else None
        with contextlib.suppress(StoreError):
            directory.write(AT, pieces, arrival)
        # `checked` holds back one piece, and of a file with a hole the last step counts as missing.
        assert asked[0] >= reached - STEP
        reached = max(asked[0], cut - 5000)
    assert directory.blob(AT.digest).read_bytes() == CONTENT
    assert arrival is not None
    arrival.wait(SIZE)


def test_a_file_without_holes_that_is_not_what_was_written_is_fetched_again(tmp_path: Path) -> None:
    directory = BlobDirectory(tmp_path)
    directory.partial.mkdir()
    (directory.partial / AT.digest.removeprefix("sha256:")).write_bytes(bytes(SIZE))
    directory.write(AT, lambda start: iter([CONTENT[start:]]))
    assert directory.blob(AT.digest).read_bytes() == CONTENT
