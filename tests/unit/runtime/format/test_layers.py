"""Checks 9 to 11, of layers: a bundle that only one check keeps out.

What is forged here has right digests everywhere, as whoever builds bundles could make it.
"""

import dataclasses
import json
import math
import re
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from tests.campaigns.junk import mutated
from tests.extent import examples
from tests.layouts import blob, contents_of, write_files

from prejit.compiler.pipeline.pack.bundle_files import PackedTarget, assemble, layer
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.errors import RejectError
from prejit.runtime.format import limits
from prejit.runtime.format.arrays import Array, Mesh
from prejit.runtime.format.blobs import Layer
from prejit.runtime.format.bundle_schema import Config, Segment
from prejit.runtime.format.checks.layers import (
    MAX_WEIGHTS_HEADER_BYTES,
    TensorSlice,
    check_signature,
    check_weights,
    unpack,
)
from prejit.runtime.format.checks.program_table import check_weight_sets
from prejit.runtime.format.checks.seldom_parts import check_chat
from prejit.runtime.format.names import EXECUTABLES_MEDIA_TYPE, WEIGHTS_MEDIA_TYPE
from prejit.runtime.loader import load
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.programs.mapped_weights import open_weights

from .forging import (
    GOLDEN,
    PATH,
    SCORE,
    changed,
    golden_config,
    in_little_memory,
    program,
    program_of,
    refused,
    reject,
    replaced,
)


def forged_golden(path, name, change):
    """A golden bundle of another config, with right digests everywhere."""
    contents, *_ = contents_of(GOLDEN / name).values()
    layers = tuple(
        layer(at.mediaType, blob(GOLDEN / name, at.digest).read_bytes(), "title")
        for at in contents.manifest.layers
    )
    config = change(contents.config)
    return write_files(path, *assemble(config.bundle, [PackedTarget(config, layers)]))


def huge_vocabulary(config):
    """2**31 - 1 tokens: the logit bias and the history of a row are 8 GB each."""
    size = config.decoder.vocab_size
    plain = to_json(config).decode().replace(f'"vocab_size":{size}', '"vocab_size":2147483647')
    plain = re.sub(rf"(32\[\d+,){size}\]", r"\g<1>2147483647]", plain)
    return from_json(Config, plain.encode(), PATH)


@pytest.mark.filterwarnings("ignore:.*portable programs")  # how long they can be read
def test_9_a_table_asks_for_no_memory_that_programs_do_not_take(tmp_path, no_warnings_of_fallback):
    """A table that agrees with itself is compared with the program before anything is allocated."""
    loaded = load(forged_golden(tmp_path / "b", "decoder", huge_vocabulary))
    with in_little_memory(64 << 20), pytest.raises(RejectError, match=r"float32.*2147483647"):
        loaded.generate([1, 2, 3], max_new_tokens=2)

    def many_rows(config):
        plain = to_json(config).decode().replace('"rows":4', '"rows":16777216')
        return from_json(Config, re.sub(r"32\[4,", "32[16777216,", plain).encode(), PATH)

    loaded = load(forged_golden(tmp_path / "c", "call", many_rows))
    with in_little_memory(64 << 20), pytest.raises(RejectError, match=r"float32.*16777216"):
        loaded.call("repeat", x=np.ones((2, 2), np.float32), times=2)


RAW = bytes(range(256)) * 64


def segment_of(frame, raw=RAW, **changes):
    right = Segment(0, len(frame), digest_of(frame), len(raw), digest_of(raw))
    return dataclasses.replace(right, **changes)


def frame_of(raw=RAW, **options):
    return zstandard.ZstdCompressor(**{"write_checksum": True, **options}).compress(raw)


def test_9_a_bomb_is_rejected_before_it_takes_memory():
    """64 MB of zeros in 6 kB, said to be 1 kB."""
    for raw in (RAW, b"", b"x"):
        assert unpack(frame_of(raw), segment_of(frame_of(raw), raw), PATH) == raw
    bomb = frame_of(bytes(64 << 20))
    assert len(bomb) < 10_000
    with in_little_memory(1 << 20), pytest.raises(RejectError, match="content size"):
        unpack(bomb, segment_of(bomb, bytes(1024)), PATH)
    with pytest.raises(RejectError, match="expected sha256:"):
        unpack(bomb, segment_of(bomb, b"", raw_size=64 << 20), PATH)


def lying(raw, said):
    """A frame that says that its content has another length, as a bomb would."""
    frame = bytearray(frame_of(raw))
    # RFC 8878 3.1.1.1: magic, frame header descriptor, content size. A single segment has no window.
    descriptor = frame[4]
    assert descriptor >> 5 & 1, "expected a single segment"
    width = (1, 2, 4, 8)[descriptor >> 6]
    held = said - 256 if width == 2 else said
    frame[5 : 5 + width] = held.to_bytes(width, "little")
    assert zstandard.get_frame_parameters(bytes(frame)).content_size == said
    return bytes(frame)


@pytest.mark.parametrize(
    ("frame", "changes", "complaint"),
    [
        (frame_of(), {"digest": digest_of(b"")}, "expected sha256:e3b0"),
        (frame_of(), {"raw_digest": digest_of(b"")}, "expected sha256:e3b0"),
        (frame_of(), {"raw_size": len(RAW) - 1}, "content size"),
        (frame_of(), {"raw_size": limits.MAX_PROGRAM_BYTES + 1}, "expected at most"),
        (frame_of(write_checksum=False), {}, "a checksum"),
        (frame_of(write_content_size=False), {}, "content size"),
        (frame_of() + frame_of(), {}, "zstd frame"),
        (b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + frame_of(), {}, "zstd frame"),
        (frame_of()[:-1], {}, "zstd frame"),
        (lying(RAW, len(RAW) - 100), {"raw_size": len(RAW) - 100}, "zstd frame"),
        (lying(RAW, len(RAW) + 100), {"raw_size": len(RAW) + 100}, "zstd frame"),
    ],
)
def test_9_a_frame_that_is_not_what_its_segment_says_is_rejected(frame, changes, complaint):
    refused(lambda: unpack(frame, segment_of(frame, **changes), PATH), complaint)


def test_9_frames_are_checked_again_when_a_program_is_wanted(bundle_dir, recipe):
    """A pack that is changed after `load` hashed it must not reach the deserializer."""
    loaded = load(bundle_dir)
    programs = {p.name: p for p in loaded.config.programs}
    pack = recipe.only(loaded.target).content(EXECUTABLES_MEDIA_TYPE)
    file = bundle_dir / "blobs" / "sha256" / digest_of(pack).removeprefix("sha256:")
    segment = programs["tick"].executable
    with open(file, "r+b") as out:  # in place, so that the map sees it
        out.seek(segment.offset + segment.size // 2)
        out.write(bytes([pack[segment.offset + segment.size // 2] ^ 1]))
    with pytest.raises(RejectError, match=file.name):
        loaded.call("tick")
    with pytest.raises(RejectError, match=file.name):
        loaded.prepare()
    np.testing.assert_array_equal(
        loaded.call("score", x=np.zeros((2, 16), np.float32)), [recipe.weights["score:bias"]] * 2
    )


def other_weights(config):
    sets = {"score": tuple(reversed(config.weight_sets["score"]))}
    return dataclasses.replace(config, weight_sets=sets)


def swapped(config):
    one, other = program_of(config, "nest"), program_of(config, "tick")
    config = changed(config, "nest", executable=other.executable, portable=other.portable)
    return changed(config, "tick", executable=one.executable, portable=one.portable)


def placed(**changes):
    def change(config):
        segment = dataclasses.replace(program_of(config, SCORE).executable, **changes)
        return changed(config, SCORE, executable=segment)

    return change


X, Y = '["x"] float32[2,16]', "float32[2,4]"
LIES = {
    "another shape": (program(SCORE, arguments=('["x"] float32[2,17]',)), "2,17"),
    "another dtype": (program(SCORE, arguments=('["x"] int32[2,16]',)), "int32"),
    "one too few": (program(SCORE, arguments=()), "expected 2"),
    "a larger result": (program(SCORE, results=("[] float32[2,4000]",)), "2,4000"),
    "a result more": (program(SCORE, results=(f"[0] {Y}", f"[1] {Y}")), "expected 2"),
    "no weights": (program(SCORE, weights=None), "expected 1"),
    "weights of another program": (program("tick", weights="score"), "expected 2"),
    "weights in another order": (other_weights, "expected float32"),
    "another program's executable": (swapped, "expected"),
    "a segment before its pack": (placed(offset=-10), "expected frames in"),
    "a segment beyond its pack": (placed(size=1 << 60), "expected frames in"),
    "a segment of too many bytes": (placed(raw_size=1 << 29), "expected programs of at most"),
    "a segment of no size": (placed(raw_size=-1), "raw_size: expected"),
}


@pytest.mark.parametrize(
    ("lie", "jaxlib"),
    [*((lie, None) for lie in LIES), ("another shape", "0.0.1"), ("a larger result", "0.0.1")],
)
def test_9_a_lying_table_is_rejected(lie, jaxlib, recipe, tmp_path, no_warnings_of_fallback):
    """Loaded or compiled here: before anything runs, and never by an error of XLA's."""
    change, complaint = LIES[lie]
    path = recipe.only("cpu-host").configured(change).write(tmp_path / "bundle")
    machine = Fingerprint.current()
    machine = dataclasses.replace(machine, jaxlib=jaxlib or machine.jaxlib)
    if "segment" in lie:
        reject(path, complaint)
        return
    found = load(path, fingerprint=machine)
    assert found.matched == (jaxlib is None)
    with pytest.raises(RejectError, match=rf"({SCORE}|tick|nest): .*{complaint}"):
        found.prepare()


def test_9_a_program_takes_what_the_table_keeps_and_splits():
    """Or the weights would be gone after the first call."""
    split = Array.parse('["x"] float32[4,6] @data,tensor')

    def check(shape, arrays, donated, mesh=None):
        found = [("float32", shape)] * len(arrays)
        check_signature(found, found, donated, takes=arrays, gives=arrays, mesh=mesh, path=PATH)

    arrays = [Array.parse(X), Array.parse(f"{X} donated")]
    check((2, 16), arrays, set())
    check((2, 16), arrays, {1})
    for donated in ({0}, {0, 1}, {2}):
        with pytest.raises(RejectError, match=r"that is kept, as .*, found one that the program d"):
            check((2, 16), arrays, donated)
    check((2, 2), [split], set(), Mesh(2, 3))  # the share of each device
    with pytest.raises(RejectError, match=r"expected float32\[2,2\] as in the program table,"):
        check((4, 6), [split], set(), Mesh(2, 3))


def safetensors(header):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % 64)
    return memoryview(struct.pack("<Q", len(encoded)) + encoded + bytes(256))


def entry(start, end, shape=None, dtype="U8"):
    shape = [end - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": entry(0, 64, [2, 8], "F32"),
    "empty": entry(64, 64, [0, 3], "F32"),
    "b": entry(64, 66, [], "BF16"),
    ".gap0": entry(66, 128),
    "c": entry(128, 256, [128], "BOOL"),
}


def test_10_a_right_file_gives_where_its_tensors_lie_and_layers_have_one_shape():
    """They run through one program: it would read beyond a tensor that is smaller."""
    slices = check_weights(safetensors(HEADER), PATH)
    data = slices["a"].start
    assert data % 64 == 0
    assert slices["a"] == TensorSlice("float32", (2, 8), data, data + 64)
    assert slices["b"] == TensorSlice("bfloat16", (), data + 64, data + 66)
    assert slices["empty"] == TensorSlice("float32", (0, 3), data + 64, data + 64)
    assert "__metadata__" not in slices
    for names in (("a", "b"), ("b", "a")):  # empty ones may share a place, in any order
        header = {name: entry(0, 64 if name == "a" else 0) for name in names}
        assert check_weights(safetensors(header), PATH).keys() == {"a", "b"}
    config = golden_config("encoder")
    shapes = {name: (4, 4) for names in config.weight_sets.values() for name in names}
    check_weight_sets(config, shapes, PATH)
    first, second = (config.weight_sets[name][0] for name in config.encoder.layers)
    shapes[second] = (4, 2)
    with pytest.raises(RejectError, match=rf"{second}: expected the shape of {first}, found"):
        check_weight_sets(config, shapes, PATH)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ({"a": entry(0, 128), "b": entry(64, 192)}, "b: its bytes are not"),
        ({"a": entry(0, 128), ".gap0": entry(100, 110)}, ".gap0: its bytes are not"),
        ({"a": entry(0, 257)}, "a: its bytes are not"),
        ({"a": entry(8, 72)}, "a: expected at a multiple of 64"),
        ({"a": entry(0, 64, [64], "F32")}, "data_offsets"),
        ({"a": entry(0, 64, [-64])}, "shape"),
        ({"a": entry(0, 1, [True])}, "shape"),
        ({"a": entry(0, 1, {})}, "shape"),
        ({"a": entry(0, 1, [1] * 65)}, "shape"),
        ({"a": entry(0, 0, [0, 1 << 62], "F32")}, "shape"),
        ({"a": entry(0, 64, [64], "F128")}, "F128"),
        ({"a": {**entry(0, 64), "data_offsets": [0.0, 64.0]}}, "data_offsets"),
        ({"a": {**entry(0, 1, [1]), "data_offsets": [False, True]}}, "data_offsets"),
        (b"[]", "header"),
        (b"[" * 4_000, "header"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', "header"),
        (
            b'{"a":{"dtype":"U8","shape":[64],"data_offsets":[0,64]},'
            b'"a":{"dtype":"U8","shape":[64],"data_offsets":[64,128]}}',
            "key 'a' comes twice",
        ),
        # One that does not lie in the file.
        *((memoryview(content), "safetensors") for content in (b"", b"\0" * 64)),
        (memoryview(struct.pack("<Q", (1 << 64) - 1) + b"{}" + b" " * 54), "safetensors"),
        (memoryview(struct.pack("<Q", MAX_WEIGHTS_HEADER_BYTES + 1) + b"{}"), "safetensors"),
    ],
)
def test_10_a_header_that_lies_is_rejected(header, complaint):
    content = header if isinstance(header, memoryview) else safetensors(header)
    refused(lambda: check_weights(content, PATH), complaint)


@settings(max_examples=examples(40, 150), deadline=None)
@given(header=mutated(HEADER))
def test_10_whatever_a_header_says_its_arrays_lie_in_the_file(header):
    """Either it is rejected, or NumPy makes every array of it: no other error, no other memory."""
    content = safetensors(header)
    try:
        slices = check_weights(content, PATH)
    except RejectError:
        return
    arrays = open_weights(Layer(content, PATH)).values
    for name, array in arrays.items():
        assert array.nbytes == slices[name].end - slices[name].start
        assert array.nbytes == array.dtype.itemsize * math.prod(array.shape)


def test_10_a_weight_set_of_missing_tensors_is_rejected(recipe, tmp_path):
    sets = replaced(weight_sets={"score": ("score:bias", "score:nothing")})
    path = recipe.configured(sets).write(tmp_path / "b")
    weights = digest_of(recipe.content(WEIGHTS_MEDIA_TYPE))
    assert reject(path, "score:nothing").path.endswith(weights.removeprefix("sha256:"))
    path = recipe.layered(
        lambda layers: tuple(x for x in layers if x.media_type != WEIGHTS_MEDIA_TYPE)
    ).write(tmp_path / "c")
    reject(path, "weight set 'score': no tensor 'score:bias'")


def test_10_weights_that_the_mesh_cannot_split_are_rejected(recipe):
    shapes = {"score:bias": (4,), "score:kernel": (16, 4)}
    config = recipe.targets[0].config
    even = {"score:bias": "data", "score:kernel": "tensor,data"}
    right = dataclasses.replace(config, mesh=Mesh(2, 8), weight_shardings=even)
    check_weight_sets(right, shapes, PATH)
    for name, sharding, complaint in (
        ("score:kernel", "tensor", "score:kernel: .*for each of 2 dimensions"),
        ("score:kernel", "rows,", "score:kernel: .*'rows' divides 16"),
        ("score:kernel", "", "score:kernel: expected a mesh axis, found none"),
        ("score:kernel", ",tensor", "score:kernel: expected a mesh whose 'tensor' divides 4"),
        ("score:nothing", "tensor", "weight_shardings: no tensor 'score:nothing'"),
    ):
        forged = dataclasses.replace(config, mesh=Mesh(2, 3), weight_shardings={name: sharding})
        with pytest.raises(RejectError, match=complaint):
            check_weight_sets(forged, shapes, PATH)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"special_tokens":{},"templates":{}}', "expected at least one chat template"),
        (b'{"special_tokens":{},"templates":{"":"a"}}', "expected a name for each template"),
        (b'{"special_tokens":{},"templates":{"default":"\\ud800"}}', "expected Unicode"),
        (b'{"special_tokens":{},"templates":{"default": "a"}}', "expected canonical JSON"),
        (b'{"code":"a","special_tokens":{},"templates":{"default":"a"}}', "unknown key 'code'"),
        (b"", "expected JSON"),
    ],
)
def test_11_chat_templates_that_are_none_are_rejected(content, complaint):
    refused(lambda: check_chat(content, PATH), complaint)
