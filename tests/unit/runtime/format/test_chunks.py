"""Large layers are verified in chunks: damage at any place is found, early or late, and nothing uses it."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from blake3 import blake3
from tests.extent import examples
from tests.layouts import index_file, index_of

from prejit.compiler.pipeline.pack.chunks import VerityHash
from prejit.runtime.base.files import digest_of, measure
from prejit.runtime.cli.output import print_start
from prejit.runtime.errors import RejectError
from prejit.runtime.format import blob_hashing, blobs
from prejit.runtime.format.audit import audit
from prejit.runtime.format.bundle_schema import Chunks
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE
from prejit.runtime.loader import load

CHUNK = 64 << 10
X = np.ones((2, 16), np.float32)


def chunked(content: bytes, size: int = CHUNK) -> Chunks:
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    verity = VerityHash()
    verity.update(content)
    digests = tuple(blake3(piece).hexdigest() for piece in pieces)
    return Chunks("blake3", size, digests, verity.digest())


def weights_with_filler(good: bytes) -> bytes:
    """The weights, followed by a tensor of 3 MB that no program uses."""
    size = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + size])
    data = good[8 + size :]
    gap = -len(data) % 64
    start = len(data) + gap
    if gap:
        header[".gapz"] = {"dtype": "U8", "shape": [gap], "data_offsets": [len(data), start]}
    filler = random.Random(0).randbytes(3 << 20)
    header["filler"] = {
        "dtype": "U8",
        "shape": [len(filler)],
        "data_offsets": [start, start + len(filler)],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text + data + bytes(gap) + filler


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load waits for no chunk, as if each had a size that chunks of real bundles have."""
    monkeypatch.setattr("prejit.runtime.format.blob_hashing.SMALL_BYTES", 0)


@pytest.fixture(scope="module")
def content(recipe: Any) -> bytes:
    return weights_with_filler(recipe.content(WEIGHTS_MEDIA_TYPE))


@pytest.fixture(scope="module")
def chunks_recipe(recipe: Any, content: bytes) -> Any:
    return recipe_of_chunks(recipe, content)


def recipe_of_chunks(recipe: Any, content: bytes) -> Any:
    """The recipe of most tests with 3 MB of weights, in chunks of 64 KB."""
    chunks = {WEIGHTS_MEDIA_TYPE: chunked(content)}
    return recipe.with_content(WEIGHTS_MEDIA_TYPE, content).configured(
        lambda config: dataclasses.replace(config, chunks=chunks)
    )


@pytest.fixture
def path(chunks_recipe: Any, tmp_path: Path) -> Path:
    return chunks_recipe.write(tmp_path / "chunks")


def weights_of(path: Path) -> Path:
    return max((path / "blobs" / "sha256").iterdir(), key=lambda file: file.stat().st_size)


def flip(file: Path, place: int, bit: int = 1) -> None:
    with open(file, "r+b") as opened:
        byte = os.pread(opened.fileno(), 1, place)[0]
        os.pwrite(opened.fileno(), bytes([byte ^ bit]), place)


def test_a_bundle_with_chunks_gives_the_results_of_one_without_and_is_read_once(
    path: Path, content: bytes, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both for the digest of a layer and for those of its chunks."""
    expected = load(recipe.write(tmp_path / "plain")).call("score", x=X)
    np.testing.assert_array_equal(load(path).call("score", x=X), expected)
    preadv, counts = os.preadv, list[int]()

    def counting(descriptor: int, *args: Any) -> int:
        count = preadv(descriptor, *args)
        if os.fstat(descriptor).st_size == len(content):
            counts.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counting)
    audit(path, lambda *_: None)
    assert sum(counts) == len(content)


def test_damage_in_every_chunk_is_found_with_file_and_place(path: Path, content: bytes) -> None:
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


def test_late_damage_ends_the_request(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk is not verified before everything else is done, and still no result comes."""
    begin = blobs.Blobs.begin

    def begin_without_threads(opened: Any, *args: Any) -> None:
        monkeypatch.setattr(
            blob_hashing,
            "HashingVerification",
            lambda jobs, **o: waits(jobs, **{**o, "threads": 0}),
        )
        begin(opened, *args)

    waits = blob_hashing.HashingVerification
    monkeypatch.setattr(blobs.Blobs, "begin", begin_without_threads)
    flip(weights_of(path), len(content) - 1)
    loaded = load(path)
    with pytest.raises(RejectError, match=f"bytes {len(content) // CHUNK * CHUNK} to"):
        loaded.call("score", x=X)
    with pytest.raises(RejectError):
        loaded.call("tick")


def test_no_weights_reach_a_device_unverified(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prejit.runtime.device.device import Device

    put, given = Device.put, list[bytes]()

    def noted(device: Any, array: Any, *args: Any) -> Any:
        given.append(array.tobytes())
        return put(device, array, *args)

    loaded = load(path)
    kernel = next(v for v in loaded._programs._weights.values.values() if v.shape == (16, 4))
    good = kernel.tobytes()
    flip(weights_of(path), 600)  # in the first chunk, where the weights of `score` are
    monkeypatch.setattr(Device, "put", noted)
    with pytest.raises(RejectError):
        load(path).call("score", x=X)
    assert not [each for each in given if len(each) == len(good)]


def test_a_file_that_is_cut_after_it_was_opened_is_an_error_and_no_sigbus(
    chunks_recipe: Any, tmp_path: Path, run_python: Any
) -> None:
    code = (
        "import os, sys\n"
        "import numpy as np\n"
        "from prejit.runtime import RejectError, load\n"
        "from prejit.runtime.format import blobs\n"
        "begin = blobs.Blobs.begin\n"
        "for path, file, left in zip(*[iter(sys.argv[1:])] * 3):\n"
        "    def cut(opened, *args):\n"
        "        os.truncate(file, int(left))\n"
        "        begin(opened, *args)\n"
        "    blobs.Blobs.begin = cut\n"
        "    try:\n"
        "        load(path).call('score', x=np.ones((2, 16), np.float32))\n"
        "    except RejectError as error:\n"
        "        print('rejected', error.path)"
    )
    arguments = list[Any]()
    for left in (0, 1, CHUNK, CHUNK + 1, 3 << 20):
        path = chunks_recipe.write(tmp_path / str(left))
        arguments += [path, weights_of(path), left]
    expected = "".join(f"rejected {file}\n" for file in arguments[1::3])
    assert run_python(code, *arguments).stdout == expected


def with_chunks(recipe: Any, change: Callable[[Chunks], Chunks]) -> Any:
    def changed(config: Any) -> Any:
        [(media_type, chunks)] = config.chunks.items()
        return dataclasses.replace(config, chunks={media_type: change(chunks)})

    return recipe.configured(changed)


@pytest.mark.parametrize("read", [load, lambda path: audit(path, lambda *_: None)])
def test_7_chunks_that_do_not_cover_their_layer_are_rejected(
    read: Callable[[Path], object], chunks_recipe: Any, tmp_path: Path
) -> None:
    """Of each other kind: tests/format/test_golden.py."""
    forged = with_chunks(
        chunks_recipe, lambda c: dataclasses.replace(c, digests=c.digests[:-1])
    ).write(tmp_path / "forged")
    with pytest.raises(RejectError, match="expected 49 for "):
        read(forged)
    chunks = {"application/x": chunked(b"x")}
    forged = chunks_recipe.configured(lambda c: dataclasses.replace(c, chunks=chunks))
    with pytest.raises(RejectError, match="expected media types of layers, found 'application/x'"):
        read(forged.write(tmp_path / "layer"))


def test_8_chunks_that_do_not_fit_the_whole_are_found(chunks_recipe: Any, tmp_path: Path) -> None:
    """Of every target: they share a layer, and each has chunks of its own for it, which may differ."""
    one, other = chunks_recipe.targets
    forged = with_chunks(chunks_recipe, forged_first)
    with pytest.raises(RejectError, match=r"expected blake3 0{64}"):
        load(forged.write(tmp_path / "forged")).call("score", x=X)
    both = dataclasses.replace(forged, targets=(one, forged.targets[1]))
    for at, found in (
        ("both", both),
        ("other", dataclasses.replace(forged, targets=(forged.targets[0], other))),
    ):
        with pytest.raises(RejectError, match=r"bytes 0 to 65535: expected blake3 0{64}, found "):
            audit(found.write(tmp_path / at), lambda *_: None)


def forged_first(chunks: Chunks) -> Chunks:
    return dataclasses.replace(chunks, digests=("0" * 64, *chunks.digests[1:]))


def test_a_receipt_of_chunks_is_none_for_the_whole_file(
    chunks_recipe: Any, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forged table may name chunks of another content: nobody may take that file for the right one."""
    from prejit.runtime.machine.kept_files import Receipts

    monkeypatch.setattr("prejit.runtime.machine.kept_files.SETTLED_SECONDS", -1.0)
    other = content[:-1] + bytes([content[-1] ^ 1])
    forged = with_chunks(chunks_recipe, lambda _: chunked(other)).write(tmp_path / "forged")
    file = weights_of(forged)
    file.write_bytes(other)
    load(forged).call("score", x=X)
    assert Receipts(forged).digest_of(file) == digest_of(other) != f"sha256:{file.name}"


# --- fs-verity: where the kernel verifies a file, its digest is compared, and the file is not hashed -----


OTHER = f"sha256:{'0' * 64}"


@pytest.fixture(scope="module")
def verity(content: bytes) -> str:
    """The digest of the weights that a kernel with fs-verity has."""
    return chunked(content).verity


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Sets what the kernel answers: most machines have no fs-verity."""

    def answer(digest: str | None) -> None:
        monkeypatch.setattr(blobs, "measure", lambda _: digest)

    return answer


def test_a_file_that_the_kernel_verifies_is_not_hashed(
    path: Path,
    content: bytes,
    verity: str,
    measured: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
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


def served_files(path: Path, target: str) -> list[Path]:
    """The layers and the config of a target."""
    files = path / "blobs" / "sha256"
    for at in index_of(path)["manifests"]:
        manifest = json.loads((files / at["digest"].removeprefix("sha256:")).read_bytes())
        named = [manifest["config"], *manifest["layers"]]
        found = [files / each["digest"].removeprefix("sha256:") for each in named]
        if json.loads(found[0].read_bytes())["target"] == target:
            return found
    raise AssertionError(f"no target {target}")


@pytest.mark.parametrize("read", [load, lambda path: audit(path, lambda *_: None)])
def test_8_a_file_with_another_digest_is_rejected(
    read: Callable[[Path], object], path: Path, verity: str, measured: Any
) -> None:
    """Its bytes may be right: `prejit verify` refuses it too, so that what it accepts can be served."""
    measured(OTHER)
    with pytest.raises(RejectError) as caught:
        read(path)
    assert caught.value.path == str(weights_of(path))
    assert f"expected the fs-verity digest {verity}, found {OTHER}" in str(caught.value)


def test_verify_hashes_all_the_same(path: Path, content: bytes, verity: str, measured: Any) -> None:
    measured(verity)
    assert audit(path, lambda *_: None).hashed_bytes > len(content)
    flip(weights_of(path), len(content) - 1)
    with pytest.raises(RejectError, match="expected blake3"):
        audit(path, lambda *_: None)


def test_a_receipt_hides_no_digest(
    path: Path, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prejit.runtime.machine.kept_files.SETTLED_SECONDS", -1.0)
    load(path).call("score", x=X)
    assert load(path).start_report().receipt_bytes
    measured(OTHER)
    with pytest.raises(RejectError, match="fs-verity"):
        load(path)


def test_any_error_of_the_kernel_means_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (errno.ENOTTY, errno.ENODATA, errno.EPERM):
        error = OSError(code, "")
        monkeypatch.setattr(fcntl, "ioctl", mock.Mock(side_effect=error))
        assert measure(0) is None


@pytest.mark.parametrize(
    ("algorithm", "size", "expected"), [(1, 32, f"sha256:{'ab' * 32}"), (2, 64, None)]
)
def test_only_digests_by_sha256_are_compared(
    algorithm: int, size: int, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel writes them: struct fsverity_digest of linux/fsverity.h."""

    def answer(_: int, request: int, buffer: bytearray) -> int:
        assert request == (3 << 30 | 4 << 16 | ord("f") << 8 | 134)
        assert struct.unpack_from("=HH", buffer) == (0, 64)
        buffer[: 4 + size] = struct.pack("=HH", algorithm, size) + b"\xab" * size
        return 0

    monkeypatch.setattr(fcntl, "ioctl", answer)
    assert measure(0) == expected


def run(*command: object) -> None:
    """Run a command that needs root, or skip the test with its reason."""
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"the command {command[0]} is not installed")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(map(str, command[:2]))}: {done.stderr.strip()}")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """Where an ext4 file system with fs-verity is mounted, which lies in a file."""
    image, at = tmp_path / "image", tmp_path / "mounted"
    at.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    run("mkfs.ext4", "-q", "-b", "4096", "-O", "verity", image)  # as large as a page
    run("mount", "-o", "loop", image, at)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", at], capture_output=True, check=False)


def test_the_kernel_measures_the_digest_that_the_build_computed(
    chunks_recipe: Any, content: bytes, verity: str, mounted: Path
) -> None:
    """It needs root and a kernel with fs-verity."""
    path = chunks_recipe.write(mounted / "bundle")
    with weights_of(path).open("rb") as file:
        assert measure(file.fileno()) is None
    run("fsverity", "enable", weights_of(path))
    with weights_of(path).open("rb") as file:
        assert measure(file.fileno()) == verity
    bundle = load(path)
    bundle.call("score", x=X)
    assert bundle.start_report().verity_bytes == len(content)
    audit(path, lambda *_: None)


def own_blobs(recipe: Any, path: Path, targets: set[str]) -> list[Path]:
    """Config and executables of targets. Their manifests, which every load reads, are left out."""
    _, others = recipe.only(*({t.config.target for t in recipe.targets} - targets)).assemble()
    manifests = {at["digest"] for at in index_of(path)["manifests"]}
    found = [
        file
        for file in (path / "blobs" / "sha256").iterdir()
        if f"sha256:{file.name}" not in {*others, *manifests} and file != index_file(path)
    ]
    assert len(found) == 2
    return found


@pytest.mark.parametrize("features", [None, ("of-no-cpu",)])
def test_a_load_reads_no_file_of_a_target_that_it_does_not_serve(
    features: tuple[str, ...] | None, recipe: Any, tmp_path: Path
) -> None:
    """Whether it could be served or not. Damage there is found by `prejit verify`."""
    served, other = recipe.targets
    if features is not None:
        needs = dataclasses.replace(other.config.requirement, cpu_features=features)
        config = dataclasses.replace(other.config, requirement=needs)
        recipe = dataclasses.replace(
            recipe, targets=(served, dataclasses.replace(other, config=config))
        )
    path = recipe.write(tmp_path / "both")
    target = load(path).target
    for file in own_blobs(recipe, path, {t.config.target for t in recipe.targets} - {target}):
        flip(file, file.stat().st_size - 2)
        assert load(path).call("tick") == 7
        with pytest.raises(RejectError) as caught:
            audit(path, lambda *_: None)
        assert caught.value.path == str(file)
        content = file.read_bytes()
        if features is not None:
            file.unlink()
            assert load(path).call("tick") == 7
            with pytest.raises(RejectError, match="No such file"):
                audit(path, lambda *_: None)
            file.write_bytes(content)
        flip(file, file.stat().st_size - 2)
    audit(path, lambda *_: None)
