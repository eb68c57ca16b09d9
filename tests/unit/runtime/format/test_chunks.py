"""Large layers are verified in chunks: damage at any place is found, early or late, and nothing uses it."""

import dataclasses
import errno
import fcntl
import json
import os
import random
import struct
from typing import Any
from unittest import mock

import numpy as np
import pytest
from blake3 import blake3
from tests.extent import examples
from tests.layouts import blob, index_of

from prejit.compiler.pipeline.pack.weights_layer import VerityHash
from prejit.runtime.base.files import digest_of, measure
from prejit.runtime.cli.output import print_start
from prejit.runtime.device.device import Device
from prejit.runtime.errors import RejectError
from prejit.runtime.format import blob_hashing, blobs
from prejit.runtime.format.audit import audit
from prejit.runtime.format.bundle_schema import Chunks
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE
from prejit.runtime.loader import load

CHUNK = 64 << 10
X = np.ones((2, 16), np.float32)


def chunked(content, size=CHUNK):
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    verity = VerityHash()
    verity.update(content)
    digests = tuple(blake3(piece).hexdigest() for piece in pieces)
    return Chunks("blake3", size, digests, verity.digest())


def weights_with_filler(good):
    """Weights with another tensor of 3 MiB behind them."""
    size = int.from_bytes(good[:8], "little")
    header, data = json.loads(good[8 : 8 + size]), good[8 + size :]
    start = -(-len(data) // 64) * 64
    for name, begin, end in ((".gapz", len(data), start), ("filler", start, start + (3 << 20))):
        if begin < end:
            header[name] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    filler = random.Random(0).randbytes(3 << 20)
    return len(text).to_bytes(8, "little") + text + data.ljust(start, b"\0") + filler


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    """A load waits for no chunk, as if each had a size that chunks of real bundles have."""
    monkeypatch.setattr("prejit.runtime.format.blob_hashing.SMALL_BYTES", 0)


@pytest.fixture(scope="module")
def content(recipe):
    return weights_with_filler(recipe.content(WEIGHTS_MEDIA_TYPE))


def recipe_of_chunks(recipe, content):
    chunks = {WEIGHTS_MEDIA_TYPE: chunked(content)}
    return recipe.with_content(WEIGHTS_MEDIA_TYPE, content).configured(
        lambda config: dataclasses.replace(config, chunks=chunks)
    )


@pytest.fixture(scope="module")
def chunks_recipe(recipe, content):
    return recipe_of_chunks(recipe, content)


@pytest.fixture
def path(chunks_recipe, tmp_path):
    return chunks_recipe.write(tmp_path / "chunks")


def weights_of(path):
    return max((path / "blobs" / "sha256").iterdir(), key=lambda file: file.stat().st_size)


def flip(file, place):
    with open(file, "r+b") as opened:
        byte = os.pread(opened.fileno(), 1, place)[0]
        os.pwrite(opened.fileno(), bytes([byte ^ 1]), place)


def test_chunks_change_no_result_and_are_read_once(path, content, recipe, tmp_path, monkeypatch):
    expected = load(recipe.write(tmp_path / "plain")).call("score", x=X)
    np.testing.assert_array_equal(load(path).call("score", x=X), expected)
    preadv, counts = os.preadv, list[int]()

    def counting(descriptor, *args):
        count = preadv(descriptor, *args)
        if os.fstat(descriptor).st_size == len(content):
            counts.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counting)
    audited(path)
    assert sum(counts) == len(content)


def test_damage_in_every_chunk_is_found_with_file_and_place(path, content):
    file = weights_of(path)
    generator = random.Random(0)
    starts = range(0, len(content), CHUNK)
    for start in {*starts[:2], *generator.sample(starts, examples(3, 49)), starts[-1]}:
        place = min(start + generator.randrange(CHUNK), len(content) - 1)
        flip(file, place)
        with pytest.raises(RejectError) as caught:
            load(path).call("score", x=X)
        assert caught.value.path == str(file)
        end = min(start + CHUNK, len(content)) - 1
        assert f"bytes {start} to {end}: expected blake3 " in str(caught.value)
        flip(file, place)
    load(path).call("score", x=X)


def test_late_damage_is_found(path, content, monkeypatch):
    """The last chunk is not verified before everything else is done, and still no result comes."""
    real = blob_hashing.HashingVerification
    monkeypatch.setattr(
        blob_hashing, "HashingVerification", lambda jobs, **o: real(jobs, **{**o, "threads": 0})
    )
    flip(weights_of(path), len(content) - 1)
    loaded = load(path)
    with pytest.raises(RejectError, match=f"bytes {len(content) // CHUNK * CHUNK} to"):
        loaded.call("score", x=X)
    with pytest.raises(RejectError):
        loaded.call("tick")


def test_no_weights_reach_a_device_unverified(path, monkeypatch):
    put, shapes = Device.put, list[Any]()

    def noted(device, array, *args):
        shapes.append(array.shape)
        return put(device, array, *args)

    monkeypatch.setattr(Device, "put", noted)
    load(path).call("score", x=X)
    assert (16, 4) in shapes, "the kernel of `score`"
    shapes.clear()
    flip(weights_of(path), 600)  # in the first chunk, where the weights of `score` are
    with pytest.raises(RejectError):
        load(path).call("score", x=X)
    assert (16, 4) not in shapes


CUT = """
import os, sys
import numpy as np
from prejit.runtime import RejectError, load
from prejit.runtime.format import blobs
begin = blobs.Blobs.begin
for path, file, left in zip(*[iter(sys.argv[1:])] * 3):
    def cut(opened, *args):
        os.truncate(file, int(left))
        begin(opened, *args)
    blobs.Blobs.begin = cut
    try:
        load(path).call('score', x=np.ones((2, 16), np.float32))
    except RejectError as error:
        print('rejected', error.path)
"""


def test_a_file_cut_after_it_was_opened_is_no_sigbus(chunks_recipe, tmp_path, run_python):
    arguments = list[Any]()
    for left in (0, 1, CHUNK, CHUNK + 1, 3 << 20):
        path = chunks_recipe.write(tmp_path / str(left))
        arguments += [path, weights_of(path), left]
    expected = "".join(f"rejected {file}\n" for file in arguments[1::3])
    assert run_python(CUT, *arguments).stdout == expected


def with_chunks(recipe, change):
    def changed(config):
        [(media_type, chunks)] = config.chunks.items()
        return dataclasses.replace(config, chunks={media_type: change(chunks)})

    return recipe.configured(changed)


def audited(path):
    return audit(path, lambda *_: None)


@pytest.mark.parametrize("read", [load, audited])
def test_7_chunks_that_do_not_cover_their_layer_are_rejected(read, chunks_recipe, tmp_path):
    short = with_chunks(chunks_recipe, lambda c: dataclasses.replace(c, digests=c.digests[:-1]))
    with pytest.raises(RejectError, match="expected 49 for "):
        read(short.write(tmp_path / "short"))
    chunks = {"application/x": chunked(b"x")}
    other = chunks_recipe.configured(lambda c: dataclasses.replace(c, chunks=chunks))
    with pytest.raises(RejectError, match="expected media types of layers, found 'application/x'"):
        read(other.write(tmp_path / "layer"))


def test_8_chunks_that_do_not_fit_the_whole_are_found(chunks_recipe, tmp_path):
    """Of every target: they share a layer, and each has chunks of its own for it, which may differ."""
    forged = with_chunks(
        chunks_recipe, lambda c: dataclasses.replace(c, digests=("0" * 64, *c.digests[1:]))
    )
    with pytest.raises(RejectError, match=r"expected blake3 0{64}"):
        load(forged.write(tmp_path / "forged")).call("score", x=X)
    (first, second), (bad_first, bad_second) = chunks_recipe.targets, forged.targets
    for at, targets in (("second", (first, bad_second)), ("first", (bad_first, second))):
        path = dataclasses.replace(forged, targets=targets).write(tmp_path / at)
        with pytest.raises(RejectError, match=r"bytes 0 to 65535: expected blake3 0{64}, found "):
            audited(path)


def test_a_receipt_of_chunks_is_none_for_the_file(chunks_recipe, content, tmp_path, monkeypatch):
    """A forged table may name chunks of another content: nobody may take that file for the right one."""
    from prejit.runtime.machine.kept_files import Receipts

    monkeypatch.setattr("prejit.runtime.machine.kept_files.SETTLED_SECONDS", -1.0)
    other = content[:-1] + bytes([content[-1] ^ 1])
    forged = with_chunks(chunks_recipe, lambda _: chunked(other)).write(tmp_path / "forged")
    file = weights_of(forged)
    file.write_bytes(other)
    load(forged).call("score", x=X)
    assert Receipts(forged).digest_of(file) == digest_of(other) != f"sha256:{file.name}"


# fs-verity: where the kernel verifies a file, its digest is compared, and the file is not hashed.
OTHER = f"sha256:{'0' * 64}"


@pytest.fixture(scope="module")
def verity(content):
    return chunked(content).verity


@pytest.fixture
def measured(monkeypatch):
    return lambda digest: monkeypatch.setattr(blobs, "measure", lambda _: digest)


def test_files_with_verity_are_not_hashed(path, content, verity, measured, monkeypatch, capsys):
    expected = load(path).call("score", x=X)
    measured(verity)
    monkeypatch.setattr(blob_hashing, "check_chunk", None)
    bundle = load(path)
    np.testing.assert_array_equal(bundle.call("score", x=X), expected)
    report = bundle.start_report()
    others = [file for file in served_files(path, bundle.target) if file != weights_of(path)]
    assert report.verity_bytes == len(content)
    assert report.hashed_bytes == sum(file.stat().st_size for file in others)
    assert report.receipt_bytes == 0
    print_start(report)
    assert "; receipts for 0.0 MB; fs-verity for 3.1 MB\n" in capsys.readouterr().err


def served_files(path, target):
    for at in index_of(path)["manifests"]:
        manifest = json.loads(blob(path, at["digest"]).read_bytes())
        found = [blob(path, each["digest"]) for each in (manifest["config"], *manifest["layers"])]
        if json.loads(found[0].read_bytes())["target"] == target:
            return found
    raise AssertionError(f"no target {target}")


def test_8_receipts_hide_no_other_digest(path, measured, monkeypatch, content, verity):
    monkeypatch.setattr("prejit.runtime.machine.kept_files.SETTLED_SECONDS", -1.0)
    load(path).call("score", x=X)
    assert load(path).start_report().receipt_bytes
    measured(OTHER)
    for read in (load, audited):  # what `verify` accepts can be served
        with pytest.raises(RejectError) as caught:
            read(path)
        assert caught.value.path == str(weights_of(path))
        assert f"expected the fs-verity digest {verity}, found {OTHER}" in str(caught.value)
    measured(verity)
    assert audited(path).hashed_bytes > len(content)
    flip(weights_of(path), len(content) - 1)
    with pytest.raises(RejectError, match="expected blake3"):
        audited(path)


def test_only_digests_by_sha256_are_compared_and_any_error_means_none(monkeypatch):
    """As the kernel writes them: struct fsverity_digest of linux/fsverity.h."""
    algorithm, size = 1, 32

    def answer(_, request, buffer):
        assert request == (3 << 30 | 4 << 16 | ord("f") << 8 | 134)
        assert struct.unpack_from("=HH", buffer) == (0, 64)
        buffer[: 4 + size] = struct.pack("=HH", algorithm, size) + b"\xab" * size
        return 0

    monkeypatch.setattr(fcntl, "ioctl", answer)
    assert measure(0) == f"sha256:{'ab' * 32}"
    algorithm, size = 2, 64
    assert measure(0) is None
    for code in (errno.ENOTTY, errno.ENODATA, errno.EPERM):
        monkeypatch.setattr(fcntl, "ioctl", mock.Mock(side_effect=OSError(code, "")))
        assert measure(0) is None


@pytest.mark.parametrize("matches", [True, False])
def test_a_load_reads_no_file_of_another_target(recipe, tmp_path, matches):
    """Damage there is found by `prejit verify`. What could be served is opened, and not read."""
    first, second = recipe.targets
    if not matches:
        needs = dataclasses.replace(second.config.requirement, cpu_features=("of-no-cpu",))
        config = dataclasses.replace(second.config, requirement=needs)
        second = dataclasses.replace(second, config=config)
    path = dataclasses.replace(recipe, targets=(first, second)).write(tmp_path / "both")
    target = load(path).target
    [other] = {each.config.target for each in recipe.targets} - {target}
    for file in {*served_files(path, other)} - {*served_files(path, target)}:
        content = file.read_bytes()
        flip(file, file.stat().st_size - 2)
        for complaint in (file.name, "No such file")[: 1 if matches else 2]:
            assert load(path).call("tick") == 7
            with pytest.raises(RejectError, match=complaint) as caught:
                audited(path)
            assert caught.value.path == str(file)
            file.unlink(missing_ok=True)
        file.write_bytes(content)
    audited(path)
