"""A bundle is loaded while its weights arrive: what it computes waits for them, and is never wrong."""

import contextlib
import errno
import hashlib
import itertools
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fake_registry import fake_registry
from tests.waiting import wait_for

from prejit.compiler import Program
from prejit.runtime import load
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE
from prejit.runtime.format.opening import match, read_manifest
from prejit.runtime.format.root import read_root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship import blob_directory
from prejit.runtime.ship.blob_directory import ArrivingBlob, BlobDirectory

from .conftest import moved

X = np.arange(4, dtype=np.float32)
ROWS = 1 << 20


@pytest.fixture(scope="module")
def bundle_dir(build_programs):
    def total(weights, x):
        return (weights["rows"] @ x).sum()

    rows = {"early": np.full((ROWS, 4), 1, np.float32), "late": np.full((ROWS, 4), 2, np.float32)}
    return build_programs([Program(n, total, [X], params={"rows": r}) for n, r in rows.items()])


class Sent:
    """What the registry does when it is asked for the weights; `held` holds back their second half."""

    def __init__(self, digest):
        self.digest, self.held = digest, threading.Event()
        self.fault = self.held

    def __call__(self, method, path):
        return self.fault if self.digest in path and method == "GET" else None


@pytest.fixture
def sent(bundle_dir):
    with Layout(bundle_dir) as layout:
        manifest = read_manifest(layout, match(read_root(layout), Fingerprint.current())[0])
    return Sent(manifest.layer(WEIGHTS_MEDIA_TYPE).digest)


@pytest.fixture
def registry(sent, bundle_dir):
    with fake_registry() as found:
        moved(bundle_dir, f"oci://{found.host}/sums:v1")
        found.seen.clear()
        found.fault = sent
        yield found
        sent.held.set()


def check(bundle):
    for name, scale in (("late", 2), ("early", 1)):
        np.testing.assert_allclose(bundle.call(name, X), scale * ROWS * X.sum(), rtol=1e-5)


def answers(registry):
    with load(f"oci://{registry.host}/sums:v1") as bundle:
        check(bundle)


def arrivals():
    return [each for each in threading.enumerate() if each.name == "prejit-arrival"]


def test_it_is_loaded_before_its_weights_are_here_and_answers_after_that(registry, store, sent):
    with load(f"oci://{registry.host}/sums:v1") as bundle, ThreadPoolExecutor(1) as pool:
        got = pool.submit(check, bundle)
        with pytest.raises(TimeoutError):
            got.result(0.2)
        assert not store.targets_of(bundle.digest)
        sent.held.set()
        got.result(30)
        registry.fault = lambda method, path: 503
    with load(f"oci://{registry.host}/sums@{bundle.digest}") as stored:
        check(stored)
        assert stored.start_report().hashed_bytes == 0
    assert registry.count("GET", sent.digest) == 1
    assert not list((store.path / ".partial").iterdir())


@pytest.mark.parametrize(("fault", "error"), [("wrong", RejectError), (503, StoreError)])
def test_weights_that_do_not_arrive_are_an_error_of_who_waits(registry, store, sent, fault, error):
    sent.fault = fault
    with pytest.raises(error):
        answers(registry)
    assert not store.bundles()
    sent.fault = None
    answers(registry)


def test_wrong_beginnings_are_not_kept(registry, store, sent):
    loaded, ends = threading.Event(), list[bool]()

    def wrong(handler, content, start):
        handler.send_response(200)
        handler.send_header("content-length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[: 10 << 20])  # `load` reads what the weights are
        loaded.wait(60)
        handler.wfile.write(bytes(8 << 20))
        ends.append(sent.held.wait(30))
        handler.close_connection = True

    sent.fault = wrong
    with load(f"oci://{registry.host}/sums:v1") as bundle:
        loaded.set()
        with pytest.raises(RejectError):
            bundle.call("early", X)
    sent.held.set()
    sent.fault = None
    wait_for(lambda: ends)
    assert ends[0], "the error waited for what never comes"
    wait_for(lambda: not arrivals())
    answers(registry)


def test_a_bundle_that_is_closed_fetches_no_more_and_the_next_load_goes_on(registry, store, sent):
    bundle = load(f"oci://{registry.host}/sums:v1")
    closing = threading.Thread(target=bundle.close)
    closing.start()
    closing.join(20)  # the registry sends the rest after 30 s
    assert not closing.is_alive()
    with load(f"oci://{registry.host}/sums:v1"):
        threading.Timer(0.2, sent.held.set).start()
    assert not arrivals()
    assert not store.bundles()
    [partial] = (store.path / ".partial").iterdir()
    assert partial.stat().st_blocks < partial.stat().st_size / 512
    answers(registry)


SHORT = """
import sys
import numpy
from prejit.runtime import load
bundle = load(sys.argv[1])
print("loaded", flush=True)
if sys.argv[2] == "answers":
    bundle.call("late", numpy.arange(4, dtype=numpy.float32))
"""


@pytest.mark.parametrize("does", ["answers", "ends"])
def test_a_process_that_ends_leaves_the_bundle_and_no_traceback(registry, store, sent, does):
    command = [sys.executable, "-W", "ignore", "-c", SHORT, f"oci://{registry.host}/sums:v1", does]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "loaded\n"
        time.sleep(0.5 * (does == "ends"))
        sent.held.set()
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert "Traceback" not in said
    assert len(store.bundles()) == 1 or does == "ends"


STEP = 4 * 4096
SIZE = 10 * STEP + 7
CONTENT = hashlib.shake_128(b"weights").digest(SIZE)
AT = Descriptor("x", f"sha256:{hashlib.sha256(CONTENT).hexdigest()}", SIZE)


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    monkeypatch.setattr(blob_directory, "PIECE_BYTES", STEP)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.booleans()), max_size=4))
def test_what_arrived_is_not_fetched_again_whether_it_was_read_or_not(tmp_path_factory, cuts):
    directory = BlobDirectory(tmp_path_factory.mktemp("store"))
    reached, cut_in_last_block = 0, False
    for cut, is_read in [*cuts, (SIZE, True)]:
        asked = []

        def pieces(start, cut=cut, asked=asked):
            asked.append(start)
            for place in range(start, max(start, cut), 5000):
                yield CONTENT[place : min(cut, place + 5000)]
            if cut < SIZE:
                raise StoreError("cut")

        arrival = ArrivingBlob() if is_read else None
        with contextlib.suppress(StoreError):
            directory.write(AT, pieces, arrival)
        # `checked` holds back one piece, and of a file with a hole the last step counts as missing. Where the
        # last block of the file system is filled in part there is no hole to see: all is fetched again.
        assert asked[0] >= reached - STEP or cut_in_last_block
        cut_in_last_block = SIZE // 4096 * 4096 < cut < SIZE
        reached = max(asked[0], cut - 5000)
    assert directory.blob(AT.digest).read_bytes() == CONTENT
    arrival.wait(SIZE)


def test_what_is_hashed_later_gets_no_name_if_it_is_wrong(tmp_path):
    directory = BlobDirectory(tmp_path)
    for content in (bytes(SIZE), CONTENT[:-1]):
        with pytest.raises(RejectError):
            directory.write(AT, lambda start, sent=content: iter([sent[start:]]), ArrivingBlob())
        assert not directory.has(AT)
        assert not list(directory.partial.iterdir())
    for content, arrival in itertools.product((b"", b"x"), (None, ArrivingBlob())):
        with pytest.raises(RejectError):  # no bytes, with the digest of others
            directory.write(
                Descriptor("x", AT.digest, 0), lambda start, sent=content: iter([sent]), arrival
            )
        assert not list(directory.partial.iterdir())


def test_a_full_disk_is_told_to_readers_and_a_file_without_holes_is_fetched(tmp_path, monkeypatch):
    directory = BlobDirectory(tmp_path / "holes")
    directory.partial.mkdir(parents=True)
    (directory.partial / AT.digest.removeprefix("sha256:")).write_bytes(bytes(SIZE))
    directory.write(AT, lambda start: iter([CONTENT[start:]]))
    assert directory.blob(AT.digest).read_bytes() == CONTENT

    def full(file, piece):
        os.close(pool.submit(arrival.open).result(20))  # before any byte
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(blob_directory, "_write_piece", full)
    directory, arrival = BlobDirectory(tmp_path), ArrivingBlob()
    with ThreadPoolExecutor(1) as pool, pytest.raises(StoreError, match="No space left"):
        directory.write(AT, lambda start: iter([CONTENT[start:]]), arrival)
    with pytest.raises(StoreError, match="No space left"):
        arrival.wait(SIZE)
