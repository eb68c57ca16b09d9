"""Each numbered check between a file and its use: a bundle that only this check keeps out.

What is forged here has right digests everywhere, as whoever builds bundles could make it.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaigns.junk import edited, mutated
from tests.extent import examples
from tests.format import second_reader
from tests.layouts import blob, index_file, index_of, write_files

from prejit.runtime import __main__
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.device.device import Device
from prejit.runtime.encoding.encoder import EncoderPrograms
from prejit.runtime.errors import RejectError
from prejit.runtime.format import limits
from prejit.runtime.format.arrays import Array, Mesh
from prejit.runtime.format.blobs import Layer
from prejit.runtime.format.bundle_schema import Config, Descriptor, Index, Portable, Segment
from prejit.runtime.format.checks import oci
from prejit.runtime.format.checks.call_programs import check_arrays
from prejit.runtime.format.checks.layers import (
    MAX_WEIGHTS_HEADER_BYTES,
    TensorSlice,
    check_chat,
    check_signature,
    check_weights,
    unpack,
)
from prejit.runtime.format.checks.oci import NEWER_FORMAT_HINT, check_descriptor
from prejit.runtime.format.checks.program_interfaces import Signatures, sized
from prejit.runtime.format.checks.program_table import check_array, check_config, check_weight_sets
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    BUNDLE_FORMAT,
    BUNDLE_NAME,
    CHAT_MEDIA_TYPE,
    EXECUTABLES_MEDIA_TYPE,
    FORMAT_VERSION,
    KERNEL_LEVELS,
    PORTABLE_MEDIA_TYPE,
    REF_NAME,
    REQUIREMENT,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.opening import match, read_contents
from prejit.runtime.format.root import encode_index, read_root
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.loader import load
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.programs.ready_programs import Programs

NEXT = str(FORMAT_VERSION + 1)
PATH = "somewhere/blob"


def reject(path, complaint):
    with pytest.raises(RejectError, match=complaint) as caught:
        load(path).prepare()
    return caught.value


def with_index(recipe, path, change):
    index, blobs = recipe.assemble()
    plain = json.loads(index)
    change(plain)
    return write_files(path, to_json(plain), blobs)


def with_manifest(recipe, path, change):
    """A bundle of one target whose manifest says something else; gives the manifest's name too."""
    index, blobs = recipe.only("cpu-host").assemble()
    plain = json.loads(index)
    descriptor = plain["manifests"][0]
    manifest = json.loads(blobs.pop(descriptor["digest"]))
    change(manifest)
    content = to_json(manifest)
    descriptor["digest"], descriptor["size"] = digest_of(content), len(content)
    blobs[descriptor["digest"]] = content
    targets = from_json(Index, index, PATH).manifests
    changed = dataclasses.replace(targets[0], digest=descriptor["digest"], size=descriptor["size"])
    encoded = encode_index("example", (changed,))
    return write_files(path, encoded, blobs), descriptor["digest"].removeprefix("sha256:")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"imageLayoutVersion":"1.0.1"}', b"1" * 4096])
def test_1_another_layout_version_is_rejected(content, bundle_dir):
    (bundle_dir / "oci-layout").write_bytes(content)
    assert reject(bundle_dir, "expected").path == str(bundle_dir / "oci-layout")


@pytest.mark.parametrize(
    ("written", "newer"),
    [
        *((NEXT, True), ("", False), ("01", False)),
        *(("²", False), ("٢", False), ("9" * 5000, False)),
    ],
)
def test_2_another_format_says_which_side_is_older(written, newer, recipe):
    """It is named even where the index has keys of that format."""
    plain = json.loads(recipe.assemble()[0])
    plain["annotations"][BUNDLE_FORMAT] = written
    for beside in ({}, {"subject": {"new": 1.5}}):
        with pytest.raises(RejectError, match="expected bundle format 1, found") as caught:
            oci.check_index(to_json({**plain, **beside}), PATH)
        assert (caught.value.hint == NEWER_FORMAT_HINT) == newer


def annotated(name, value, *, of_target=False):
    """Change an annotation of the index or of its first target; None: it is missing."""

    def change(index):
        annotations = (index["manifests"][0] if of_target else index)["annotations"]
        annotations.pop(name)
        annotations |= {} if value is None else {name: value}

    return change


of_target = functools.partial(annotated, of_target=True)


def updated(**changes):
    return lambda plain: plain.update(changes)


def endless(index):
    [first, *_] = index["manifests"]
    index["manifests"] = [
        {**first, "annotations": {**first["annotations"], REF_NAME: f"t{name}"}}
        for name in range(limits.MAX_TARGETS + 1)
    ]


def at_first(**changes):
    return lambda index: index["manifests"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (annotated(BUNDLE_NAME, None), f"expected {BUNDLE_NAME}"),
        (annotated(BUNDLE_FORMAT, None), "dev.prejit.format.*found"),
        (endless, f"at most {limits.MAX_TARGETS}, found {limits.MAX_TARGETS + 1}"),
        (updated(manifests=[]), "at least one target"),
        (updated(schemaVersion=1), "OCI image index"),
        (updated(extra="key"), "unknown key 'extra'"),
        (at_first(urls=["http://elsewhere"]), "unknown key 'urls'"),
        (lambda i: i["manifests"].append(i["manifests"][0]), "each target once"),
        # 3. A target without name or requirement.
        (of_target(REF_NAME, None), "on each target"),
        (of_target(REQUIREMENT, None), "on each target"),
        (of_target(REQUIREMENT, "{}"), "missing"),
        (of_target(REQUIREMENT, "\udc80"), "expected JSON"),
        (of_target(REQUIREMENT, '{"jaxlib":"é"}'), "missing|canonical"),
        # 4. A descriptor that names no such blob.
        (at_first(mediaType="text/plain"), "expected media type"),
        (at_first(digest="sha256:../../../../etc/passwd"), "expected a sha256 digest"),
        (at_first(size=limits.MAX_MANIFEST_BYTES + 1), "expected at most 65536 bytes"),
        (at_first(size=1), "expected 1 bytes, found"),
    ],
)
def test_2_to_4_a_wrong_index(change, complaint, recipe, tmp_path):
    path = with_index(recipe, tmp_path / "b", change)
    error = reject(path, complaint)
    assert complaint.endswith("bytes, found") or error.path == str(index_file(path))


def test_3_index_and_configs_say_the_same(recipe, tmp_path):
    """Else a policy for one name would let another bundle run."""
    path = with_index(recipe, tmp_path / "b", annotated(BUNDLE_NAME, "trusted"))
    reject(path, "expected bundle 'trusted', as the index, found 'example'")

    # The first fits this machine; by its name the loader would run the second.
    def renamed(config):
        features = ("no-such-feature", *config.requirement.cpu_features)
        needs = dataclasses.replace(config.requirement, cpu_features=features)
        return dataclasses.replace(config, target="cpu-host", requirement=needs)

    foreign = recipe.only("cpu-x86-64-v3").configured(renamed)
    targets = (*recipe.only("cpu-host").targets, *foreign.targets)
    reject(dataclasses.replace(recipe, targets=targets).write(tmp_path / "b"), "each target once")
    # Or a registry that shows the index would choose a machine on which the code dies.
    index, blobs = recipe.only("cpu-host").assemble()
    [target] = from_json(Index, index, PATH).manifests
    annotations = dict(target.annotations or {})
    needs = json.loads(annotations[REQUIREMENT])
    for changed in (
        {REQUIREMENT: to_json({**needs, "cpu_features": []}).decode()},
        {REF_NAME: "cpu-x86-64-v2"},
    ):
        lying = dataclasses.replace(target, annotations={**annotations, **changed})
        encoded = encode_index("example", (lying,))
        reject(write_files(tmp_path / "b", encoded, blobs), "with the requirement of the index")


def test_a_cap_holds_at_its_edge_and_messages_are_short():
    digest = digest_of(b"")
    for size in (0, 10):
        check_descriptor(Descriptor("a", digest, size), "a", 10, PATH)
    for size in (11, -1, 1 << 64):
        with pytest.raises(RejectError, match=f"expected at most 10 bytes, found {size}"):
            check_descriptor(Descriptor("a", digest, size), "a", 10, PATH)
    error = RejectError("index.json", f"expected a type, found {'x' * 100_000}")
    assert len(str(error)) < 2_100
    assert str(error).endswith("xxx...")


def test_5_a_digest_is_checked_before_the_bytes_are_parsed(recipe, tmp_path):
    """Or the error would be one of their JSON."""
    path = recipe.only("cpu-host").write(tmp_path / "b")
    manifest = blob(path, index_of(path)["manifests"][0]["digest"])
    config = blob(path, json.loads(manifest.read_bytes())["config"]["digest"])
    for file in (manifest, config):
        content = file.read_bytes()
        file.write_bytes(b"[" + content[1:])
        assert reject(path, f"expected sha256:{file.name}, found sha256:").path == str(file)
        file.write_bytes(content)


def layer_of(manifest, media_type):
    return next(layer for layer in manifest["layers"] if layer["mediaType"] == media_type)


LARGE_CHAT = {"mediaType": CHAT_MEDIA_TYPE, "size": limits.MAX_CHAT_BYTES + 1}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (updated(schemaVersion=1), "OCI image manifest"),
        (updated(subject={}), "unknown key 'subject'"),
        (lambda m: m["config"].update(mediaType="text/plain"), "expected media type"),
        (lambda m: m["config"].update(size=limits.MAX_CONFIG_BYTES + 1), "expected at most"),
        (lambda m: m["layers"][0].update(mediaType="application/x-sh"), "unexpected layer"),
        (lambda m: m["layers"].remove(layer_of(m, PORTABLE_MEDIA_TYPE)), "layer .*stablehlo"),
        (lambda m: m["layers"][1].update(digest="sha256:x"), "expected a sha256 digest"),
        (lambda m: m["layers"][0].update(LARGE_CHAT), "at most 4194304 bytes, found 4194305"),
    ],
)
def test_6_a_wrong_manifest(change, complaint, recipe, tmp_path):
    path, name = with_manifest(recipe, tmp_path / "b", change)
    assert reject(path, complaint).path == str(path / "blobs" / "sha256" / name)


GOLDEN = Path(__file__).parents[3] / "format" / "v1"
Change = Callable[[Any], Any]


@functools.cache
def golden_config(name, wanted=None):
    with Layout(GOLDEN / name) as layout:
        root = read_root(layout)
        target, *_ = (t for t in match(root, Fingerprint.current()) if wanted in (None, t.name))
        return read_contents(layout, target).config


second_target = functools.cache(lambda name: second_reader.read(GOLDEN / name)[0])


def check(changed, like=None):
    """Check a config, or its JSON, as that of the target and the requirement of another one."""
    like = changed if isinstance(changed, Config) else like
    return check_config(to_json(changed), like.target, like.requirement, PATH)


def rejected(config, change, complaint):
    with pytest.raises(RejectError, match=complaint) as caught:
        check(change(config), config)
    assert caught.value.path == PATH


def replaced(**changes):
    return lambda config: dataclasses.replace(config, **changes)


def on_devices(mesh, platform, count):
    def change(config):
        needs = dataclasses.replace(config.requirement, platform=platform, device_count=count)
        return dataclasses.replace(config, requirement=needs, mesh=mesh)

    return change


def readable(until):
    return replaced(portable=Portable("0.12.0.1", "1.17.0", until))


def changed(config, name, /, **changes):
    assert name in {program.name for program in config.programs}
    programs = (
        dataclasses.replace(program, **changes) if program.name == name else program
        for program in config.programs
    )
    return dataclasses.replace(config, programs=tuple(programs))


def program(name, /, **changes):
    return lambda config: changed(config, name, **changes)


def without(*names):

    def change(config):
        kept = tuple(p for p in config.programs if not {p.name, p.kind} & {*names})
        assert len(kept) < len(config.programs)
        return dataclasses.replace(config, programs=kept)

    return change


def program_of(config, name):
    return next(program for program in config.programs if program.name == name)


def lacking(name, argument):

    def change(config):
        arguments = program_of(config, name).arguments
        kept = tuple(text for text in arguments if not text.startswith(f'["{argument}"]'))
        assert len(kept) == len(arguments) - 1
        return changed(config, name, arguments=kept)

    return change


def with_programs(config, *programs):
    return dataclasses.replace(config, programs=(*config.programs, *programs))


def doubled(name):
    return lambda c: with_programs(c, dataclasses.replace(program_of(c, name), name="another"))


def resized(config, name, /, **sizes):
    program = program_of(config, name)
    program = dataclasses.replace(
        program,
        name=f"{program.kind}/{'-'.join(map(str, sizes.values()))}",
        bucket={**program.bucket, **sizes},
    )
    arguments, results = Signatures(config).of(program)
    return dataclasses.replace(program, arguments=arguments, results=results)


def also(name, /, **sizes):
    return lambda config: with_programs(config, resized(config, name, **sizes))


def model(kind, **changes):
    """JSON of a decoder or encoder that says something else; None: it does not say it."""

    def change(config):
        plain = json.loads(to_json(config))
        plain[kind] = {k: v for k, v in {**plain[kind], **changes}.items() if v is not None}
        return plain

    return change


SCORE, LONG = "score/b2", {"batch": 2, "context": 32, "prompt": 33}
DECODE, PREFILL, VERIFY = "decode/b2-c32", "prefill/b2-t8-c32", "verify/b2-k2-c32"
READ, POOL, EMBED = "encode/b1-n4-c8", "encode/b1-t8/pool", "encode/b1-t8/embed"
WRONG = {
    "call": [
        (replaced(format=2), "format 1, as the index, found 2"),
        (lambda c: with_programs(c, c.programs[0]), "each program once"),
        (program(SCORE, weights="other"), f"{SCORE}: unknown weight set 'other'"),
        (program(SCORE, memory=(1, 2)), "expected an object"),
        (program(SCORE, bucket={"b": True}), "expected int, found True"),
        (program(SCORE, platforms=()), f"{SCORE}: expected platforms of cpu, cuda, tpu"),
        (program(SCORE, platforms=("cpu", "gpu")), "each once; found .'cpu', 'gpu'"),
        (replaced(mesh={"data": 0, "tensor": 2}), "sizes of 1 or more"),
        (replaced(mesh=Mesh(1, 4097)), "at most 4096 devices, found 4097"),
        (replaced(weight_shardings={"a": "tensor"}), "a mesh for weight_shardings, found none"),
        (on_devices(Mesh(1, 2), "cpu", 1), "device_count 2, the size of the mesh; found 1"),
        # It would match a machine with one device, and not run there.
        (on_devices(Mesh(1, 2), "tpu", None), "device_count 2, the size of the mesh; found None"),
        # The loader compares it with today.
        *(
            (readable(until), "readable_until: expected YYYY-MM-DD, found")
            for until in ("", "2027-02-29", "2027-W08-7", "2027-02-28T00:00")
        ),
    ],
    "decoder": [
        (program(DECODE, kind="sing"), f"{DECODE}: kind: expected .*'sing'"),
        (program(DECODE, kind="call"), "decode of batch 2 and context 32: expected one"),
        (replaced(decoder=None), "expected 'decoder' in the config"),
        (program(DECODE, kind="layer"), "expected 'encoder' in the config"),
        (program(DECODE, bucket={}), f"{DECODE}: bucket: .* found nothing"),
        (program(DECODE, bucket={"batch": 0, "context": 32}), "batch: expected 1 to 65536, found"),
        (
            program(DECODE, bucket={"batch": 2, "context": 1 << 31}),
            f"{DECODE}: context: expected 1 to 2147483647, found 2147483648",
        ),
        (program(DECODE, cost_microseconds=-1), "cost_microseconds: expected 0 or"),
        (program(DECODE, weights=None), f"{DECODE}: expected 'weights'"),
        (doubled(DECODE), "another: expected one decode program of its bucket"),
        (
            lacking(DECODE, "steps"),
            rf"""{DECODE}: arguments\[3\]: expected '\["steps"\] int32\[\]'""",
        ),
        (lacking(VERIFY, "history"), rf"{VERIFY}: arguments.*history"),
        (
            lambda c: changed(c, DECODE, arguments=(*program_of(c, DECODE).arguments, "[] bool[]")),
            "expected nothing, found",
        ),
        (program(DECODE, results=()), rf"{DECODE}: results\[0\].* found nothing"),
        (
            lambda c: retold(c, DECODE, "results", '["tokens"] int32[16,', '["tokens"] int32[0,'),
            rf"{DECODE}: results\[2\]: expected .* found",
        ),
        (replaced(mesh=Mesh(1, 2)), r"c16: arguments\[15\]: expected '.* donated @data,tensor,,'"),
        (without("decode"), "expected a decode program for the decoder, found none"),
        (replaced(programs=()), "expected a decode program"),
        (
            lambda c: retold(
                changed(c, PREFILL, bucket=LONG), PREFILL, "arguments", "int32[2,8]", "int32[2,33]"
            ),
            f"{PREFILL}: prompt: expected at most its context",
        ),
        (also(VERIFY, draft=3), "one draft of all verify programs"),
        (model("decoder", vocab_size=0), "decoder: vocab_size: expected 1 to .*, found 0"),
        (model("decoder", cache_dtype="int8"), "cache_dtype: expected .*, found 'int8'"),
    ],
    "reader": [
        (without("encode"), "expected encode programs for the source of the decoder, found none"),
        (also(READ, batch=2), "encode of batch 2, context 8 and source 4: .*none but for batch 1"),
        (also(READ, source=0), "encode/0: source: expected 1 to 2147483647, found 0"),
        (program(READ, weights=None), f"{READ}: expected 'weights'"),
        (lacking(READ, "source"), r"n4-c8: arguments\[0\]"),
        (replaced(mesh=Mesh(1, 2)), "cache: expected arrays of four axes on a mesh"),
        # Else each call without a prompt would be refused for a prompt that nobody gave.
        (model("decoder", start_token_ids=[18]), "token ids of 0 to 17, found 18"),
        (model("decoder", start_token_ids=[]), "start_token_ids: .* of 0 to 17, found none"),
    ],
    "encoder": [
        (model("encoder", vocab_size=0), "encoder: vocab_size: expected 1 to"),
        (model("encoder", layers=[]), "encoder: layers: expected at least one weight set"),
        (model("encoder", layers=["model:layer0", "model:no"]), "unknown weight set 'model:no'"),
        (model("encoder", layers=["model:layer0", "model:pool"]), "of as many tensors each"),
        (model("encoder", layers=["model:pool"]), "layer: expected a weight set of encoder.layers"),
        (model("encoder", width=7), r"pool: results\[0\]: expected .*float32\[1,7\]"),
        (replaced(encoder=None), "embed: expected 'encoder' in the config, found none"),
        (replaced(programs=()), "expected programs for the encoder"),
        (program(POOL, name="p"), "'p': expected the name 'encode/b1"),
        (lacking("encode/b1-t8/layer", "length"), r"arguments\[0\]"),
        (program(EMBED, results=('["hidden"] float32[1,8,9]',)), "expected .*float32.*, found"),
    ],
}


def retold(config, name, which, old, new):
    texts = (text.replace(old, new) for text in getattr(program_of(config, name), which))
    return changed(config, name, **{which: tuple(texts)})


@pytest.mark.parametrize(
    ("name", "change", "complaint"), [(name, *row) for name, rows in WRONG.items() for row in rows]
)
def test_7_a_table_that_trips_its_reader(name, change, complaint):
    rejected(golden_config(name), change, complaint)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, replaced()) for name in ("decoder", "stored", "mesh", "encoder", "reader")),
        ("decoder", without("verify")),
        ("decoder", without(*(f"prefill/b{b}-t4-c{c}" for b in (1, 2) for c in (16, 32)))),
        ("reader", without(READ, "encode/b1-n4-c16")),
        ("encoder", program(POOL, weights=None)),  # as those do that have no dense layer
        ("call", on_devices(Mesh(1, 2), "cpu", None)),
        ("call", on_devices(None, "cuda", 1)),
        *(("call", readable(until)) for until in (None, "2028-02-29")),
    ],
)
def test_7_what_a_model_may_do_without_it_may_do_without(name, change):
    fewer = change(golden_config(name))
    assert check(fewer) == fewer


@pytest.mark.parametrize(
    ("text", "mesh", "complaint"),
    [
        ("[] float32[4,6] @data,tensor", Mesh(2, 3), None),
        ('["x"] int8[2147483647,0]', None, None),
        ("[] float32[4,6] @data,tensor", None, "'data' divides 4, found no mesh"),
        ("[] float32[4,6] @data,tensor", Mesh(3, 3), "'data' divides 4, found 3"),
        ("[] float32[4,6] @data,tensor", Mesh(2, 4), "'tensor' divides 6, found 4"),
        ("[] float32[4,6] @tensor", Mesh(2, 3), r"expected '\[path\] dtype\[shape\]'"),
        # No dtype of jax, or nothing could index it.
        *((f"[] {name}[2]", None, "expected") for name in ("finfo", "object_", "int", "f4")),
        *((f"[] int8[{n}]", None, "expected") for n in ("2147483648", "1" + "0" * 5000)),
    ],
)
def test_7_an_array_that_its_mesh_does_not_split_evenly_or_that_is_none_is_rejected(
    text, mesh, complaint
):
    if complaint is None:
        assert str(check_array(text, mesh, PATH)) == text
    else:
        with pytest.raises(RejectError, match=complaint) as caught:
            check_array(text, mesh, PATH)
        assert caught.value.path == PATH


@pytest.mark.parametrize(
    "change",
    [
        program(SCORE, results=("[ ] float32[2,4]",)),
        replaced(weight_sets={"score": ("score:nothing",)}),
        replaced(mesh=Mesh(1, 2), weight_shardings={"score:bias": "tensor,"}),
    ],
)
def test_7_and_10_prejit_verify_reads_what_load_puts_off(change, recipe, tmp_path, capsys):
    """Of every target, also of those that this machine does not run."""
    _, other = (target.config.target for target in recipe.targets)
    forged = recipe.configured(lambda c: change(c) if c.target == other else c)
    assert __main__.main(["verify", str(forged.write(tmp_path / "b"))]) == RejectError.exit_code
    assert "error[" in capsys.readouterr().err


KEYS, VALUES = (f'["cache",0,{place}] float32[1,2,1,4] ~batch,,context,' for place in (0, 1))
SOURCE = '["source"] int32[1,1] ~batch,source'


FORGED = [
    (KEYS, "each path once, found .* again"),
    ('["weights",0,1] float32[1,2,1,4] ~batch,,context,', r"'\[\"cache\", ...\] .*weights"),
    ('["cache",0,1] float32[1,1,1,4] ~batch,batch,context,', "~batch, ...', found"),
    ('["cache",0,1] float32[1,2,16,4] ~batch,,context,', "~batch, ...', found"),
    ('["cache",0,1] float32[1,2,1,0] ~batch,,context,', "~batch, ...', found"),
    ('["cache",0,1] float32[1,2,1,4] donated ~batch,,context,', "~batch, ...', found"),
    ('["cache",0,1] float32[1,2,1,4] @data,tensor,, ~batch,,context,', "~batch, ...', found"),
    (f'["cache"{",0" * 256}] float32[1,2,1,4] ~batch,,context,', "~batch, ...', found"),
    ('["cache",0,1] float99[1,2,1,4] ~batch,,context,', r"cache: expected '\[path\] dtype"),
    (f'["cache",0,1] float32[1{",1" * 64}] ~batch{"," * 64}', r"cache: expected '\[path\]"),
    (
        '["cache",0,1] float32[1,2147483647,1,2147483647] ~batch,,context,',
        r"c16: arguments\[16\]: expected '\[\"cache\",0,1\] float32\[1,2147483647,16,2147483647",
    ),
    ('["cache",0,1] float32[1,2,1,4] ~batch,,,', r"c16: arguments\[16\]: expected .*2,1,4"),
]
"""Second arrays of a cache. The engine would allocate, split and donate what the list says."""


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        *(("decoder", {"cache": [KEYS, values]}, complaint) for values, complaint in FORGED),
        ("decoder", {"cache": []}, "decoder: cache: expected 1 to 16384 arrays, found 0"),
        ("decoder", {"cache": [KEYS]}, r"c16: arguments\[16\]: expected nothing, found"),
        (
            "decoder",
            {"cache": [KEYS, VALUES, KEYS.replace(",0]", ",2]")]},
            "expected .*0,2.* found nothing",
        ),
        ("decoder", {"cache": KEYS}, "decoder.cache: expected a list"),
        ("decoder", {"source": SOURCE}, "expected encode programs for the source"),
        ("reader", {"source": None}, f"{READ}: expected 'source' in the decoder, found none"),
        ("reader", {"source": SOURCE.replace('"]', '",0]')}, "one axis that follows 'source'"),
        ("reader", {"source": '["source"] int32[1,1] ~batch,'}, "one axis that follows 'source'"),
        ("reader", {"source": '["source"] int32[1,7,1] ~batch,,source'}, r"arguments\[0\].*1,7,4"),
    ],
)
def test_7_a_decoder_lists_its_arrays(name, changes, complaint):
    """Two readers refuse it, whose programs are right."""
    pytest.importorskip("safetensors")
    rejected(golden_config(name), model("decoder", **changes), complaint)
    plain = model("decoder", **changes)(golden_config(name))
    with pytest.raises((AssertionError, TypeError, ValueError, RecursionError)):
        second_reader.check_programs(plain, second_target(name).programs)


def test_7_an_endless_cache_is_not_read_and_ends_and_levels_are_those_of_models(monkeypatch):
    """A model's files may name such tokens, and no program gives one. -1 is no token either."""
    config = golden_config("decoder")
    found = check(model("decoder", eos_token_ids=[-1, 10**9])(config), config)
    assert found.decoder.eos_token_ids == (-1, 10**9)
    from prejit.compiler.targets.target_classes import catalogue

    for level, features in KERNEL_LEVELS.items():
        assert tuple(sorted(features)) in ((), catalogue()[f"cpu-{level}"].cpu_features)
    assert f"cpu-{max(KERNEL_LEVELS)}" == max(n for n in catalogue() if "x86" in n)
    # A config holds 250,000 of them, which would take 13 seconds.
    endless = [f'["cache",{n}] float32[1] ~batch' for n in range(limits.MAX_CACHE_ARRAYS + 1)]
    config = golden_config("decoder")
    monkeypatch.setattr(Array, "parse", lambda text: pytest.fail("expected no array to be read"))
    rejected(config, model("decoder", cache=endless), "cache: expected 1 to 16384 arrays, found 16")


def test_7_a_grid_of_sources_takes_no_more_memory_than_its_programs():
    """Contexts times sources would be 640,000 buckets, of 100 MB."""
    config = golden_config("reader")
    sizes = range(1, 801)
    programs = [
        *(resized(config, "decode/b1-c8", context=size) for size in sizes),
        *(resized(config, "prefill/b1-t4-c8", prompt=1, context=size) for size in sizes),
        *(resized(config, READ, context=1, source=size) for size in sizes),
    ]
    forged = dataclasses.replace(config, programs=tuple(programs))
    with in_little_memory(40 << 20):
        rejected(forged, replaced(), "context 2 and source 1: expected one")


@contextlib.contextmanager
def in_little_memory(limit):
    tracemalloc = pytest.importorskip("tracemalloc")
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@settings(max_examples=examples(100, 400), deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("name", ["decoder", "reader", "encoder"])
def test_7_whatever_a_table_says_the_engine_finds_all(name, seed):
    """Either it is rejected, or every program that the engine indexes is there, with its arguments."""
    golden, random = golden_config(name), Random(seed)
    plain = json.loads(to_json(golden))
    parts = ["programs", "encoder" if name == "encoder" else "decoder"]
    for part in random.sample(parts, random.choice([1, 2])):
        plain[part] = edited(plain[part], random)
    content = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    try:
        config = check_config(content, golden.target, golden.requirement, PATH)
    except RejectError:
        return
    device = Device("cpu")
    programs = Programs(config, device, None, Layer(b"", PATH), None)
    if config.encoder is not None:
        encoder = EncoderPrograms(config.encoder, programs, device)
        assert all(programs.arguments(n) for bucket in encoder.buckets for n in bucket.programs)
        return
    decoder = DecoderPrograms(config.decoder, programs, device)
    smallest = decoder.batches[0]
    for batch, context in itertools.product(decoder.batches, decoder.contexts):
        assert decoder.bucket_for(batch, context) == (batch, context)
        found = [decoder.decode_for(batch, context), *decoder.prefills(batch, context)]
        if decoder.draft_tokens:
            verifying = decoder.verify_for(batch, context)
            assert verifying.bucket["draft"] == decoder.draft_tokens
            found.append(verifying)
        found.append(decoder.copy_for(smallest, context, batch, context))
        assert decoder.max_steps(decoder.decode_for(batch, context)) >= 1
        if decoder.source is not None:
            sources = {p.bucket["source"] for p in config.programs if p.kind == "encode"}
            reading = [decoder.encode_for(context, size) for size in sources]
            assert {program.bucket["source"] for program in reading} == sources
            assert all(program.bucket["batch"] == smallest for program in reading)
            found += reading
        for program in found:
            arguments = [array.path[0] for array in programs.arguments(program.name)]
            assert ("source" in arguments) == (program.kind in ("copy", "encode"))
            programs.results(program.name)
        cached = [sized(array, {"batch": batch, "context": context}) for array in decoder.cache]
        taken = programs.arguments(decoder.decode_for(batch, context).name)
        assert [dataclasses.replace(a, donated=False, sharding=()) for a in taken][
            -len(cached) :
        ] == cached
    starts = config.decoder.start_token_ids or ()
    assert all(0 <= token < config.decoder.vocab_size for token in starts)


@pytest.mark.parametrize(
    "paths", [*(["[0,1]", "[0]"], ['["a","b","c"]', '["x"]', '["a"]'], [f"[{'0,' * 999}0]"])]
)
def test_7_paths_that_are_no_tree_are_rejected(paths, recipe):
    """They would end in an AttributeError when the results are put together, or in too deep a recursion."""
    with pytest.raises(RejectError, match=r"of a tree|keys in a path"):
        check_arrays([f"{path} int8[]" for path in paths], "call", None, PATH)
    for path in paths[: len(paths[0]) < 99]:
        check_arrays([f"{path} int8[]"], "call", None, PATH)


def test_7_kernels_need_every_feature_of_their_level():
    """Or their library would be mapped where its first instruction ends in SIGILL."""
    config, level = golden_config("kernels", "cpu-x86-64-v2"), "x86-64-v3"
    features = KERNEL_LEVELS[level]

    def with_features(kept):
        needs = dataclasses.replace(config.requirement, cpu_features=tuple(sorted(kept)))
        kernels = dataclasses.replace(config.kernels, level=level)
        return dataclasses.replace(config, requirement=needs, kernels=kernels)

    check(with_features(features))
    check(with_features({*features, "gfni"}))
    for missing in features:
        with pytest.raises(RejectError, match=rf"(?m)extensions of {level} .*none of {missing}$"):
            check(with_features(set(features) - {missing}))
    for unknown in ("x86-64-v9", "", f"{level} "):
        kernels = dataclasses.replace(config.kernels, level=unknown)
        rejected(config, replaced(kernels=kernels), "level: expected one of x86-64-v2")


def forged_golden(path, name, change):
    """A golden bundle of another config, with right digests everywhere."""
    from prejit.compiler.pipeline.pack.bundle_files import PackedTarget, assemble, layer

    with Layout(GOLDEN / name) as layout:
        root = read_root(layout)
        [target] = match(root, Fingerprint.current())
        contents = read_contents(layout, target)
        layers = tuple(
            layer(kept.mediaType, layout.read_blob(kept), "title")
            for kept in contents.manifest.layers
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
def test_9_a_table_asks_for_no_memory_that_its_programs_do_not_take(
    tmp_path, no_warnings_of_fallback
):
    """A table that agrees with itself is compared with the program before anything is allocated."""
    loaded = load(forged_golden(tmp_path / "b", "decoder", huge_vocabulary))
    with in_little_memory(64 << 20), pytest.raises(RejectError, match=r"float32.*2147483647"):
        loaded.generate([1, 2, 3], max_new_tokens=2)


RAW = bytes(range(256)) * 64


def segment_of(frame, raw=RAW, **changes):
    """The segment that makes a frame look right."""
    segment = Segment(0, len(frame), digest_of(frame), len(raw), digest_of(raw))
    return dataclasses.replace(segment, **changes)


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
    segment = segment_of(frame, **changes)
    with pytest.raises(RejectError, match=complaint) as caught:
        unpack(frame, segment, PATH)
    assert caught.value.path == PATH


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


@pytest.mark.parametrize("changes", [{"offset": -10}, {"size": 1 << 60}, {"raw_size": 1 << 29}])
def test_9_a_wrong_segment_is_refused(changes, recipe, tmp_path):
    def change(config):
        segment = dataclasses.replace(program_of(config, SCORE).executable, **changes)
        return changed(config, SCORE, executable=segment)

    reject(recipe.configured(change).write(tmp_path / "b"), "expected")


def other_weights(config):
    sets = {"score": tuple(reversed(config.weight_sets["score"]))}
    return dataclasses.replace(config, weight_sets=sets)


def swapped(config):
    one, other = program_of(config, "nest"), program_of(config, "tick")
    config = changed(config, "nest", executable=other.executable, portable=other.portable)
    return changed(config, "tick", executable=one.executable, portable=one.portable)


X = '["x"] float32[2,16]'
LIES = {
    "another shape": (program(SCORE, arguments=('["x"] float32[2,17]',)), "2,17"),
    "another dtype": (program(SCORE, arguments=('["x"] int32[2,16]',)), "int32"),
    "one too few": (program(SCORE, arguments=()), "expected 2"),
    "a larger result": (program(SCORE, results=("[] float32[2,4000]",)), "2,4000"),
    "a result more": (
        program(SCORE, results=("[0] float32[2,4]", "[1] float32[2,4]")),
        "expected 2",
    ),
    "no weights": (program(SCORE, weights=None), "expected 1"),
    "weights of another program": (program("tick", weights="score"), "expected 2"),
    "weights in another order": (other_weights, "expected float32"),
    "another program's executable": (swapped, "expected"),
}


@pytest.mark.parametrize(
    ("lie", "jaxlib"),
    [*((lie, None) for lie in LIES), ("another shape", "0.0.1"), ("a larger result", "0.0.1")],
)
def test_9_a_table_that_contradicts_its_executable_is_rejected(
    lie, jaxlib, recipe, tmp_path, no_warnings_of_fallback
):
    """Loaded or compiled here: before anything runs, and never by an error of XLA's."""
    change, complaint = LIES[lie]
    path = recipe.only("cpu-host").configured(change).write(tmp_path / "bundle")
    machine = Fingerprint.current()
    machine = dataclasses.replace(machine, jaxlib=jaxlib or machine.jaxlib)
    found = load(path, fingerprint=machine)
    assert found.matched == (jaxlib is None)
    with pytest.raises(RejectError, match=rf"({SCORE}|tick|nest): .*{complaint}"):
        found.prepare()


def test_9_a_program_takes_what_the_table_keeps_and_splits():
    """Or the weights would be gone after the first call."""
    arrays = [Array.parse(X), Array.parse(f"{X} donated")]
    shape = ("float32", (2, 16))

    def check_with(donated):
        check_signature([shape] * 2, [], donated, takes=arrays, gives=[], mesh=None, path=PATH)

    check_with(set())
    check_with({1})
    for donated in ({0}, {0, 1}, {2}):
        with pytest.raises(RejectError, match=r"that is kept, as .*, found one that the program d"):
            check_with(donated)
    split = Array.parse('["x"] float32[4,6] @data,tensor')

    def check_share(*shape):  # of a mesh, on each device
        found = [("float32", shape)]
        check_signature(found, found, set(), takes=[split], gives=[split], mesh=Mesh(2, 3), path="")

    check_share(2, 2)
    with pytest.raises(RejectError, match=r"expected float32\[2,2\] as in the program table,"):
        check_share(4, 6)


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
    ],
)
def test_10_a_header_that_lies_is_rejected(header, complaint):
    with pytest.raises(RejectError, match=complaint) as caught:
        check_weights(safetensors(header), PATH)
    assert caught.value.path == PATH


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 64,
        struct.pack("<Q", (1 << 64) - 1) + b"{}" + b" " * 54,
        struct.pack("<Q", MAX_WEIGHTS_HEADER_BYTES + 1) + b"{}",
    ],
)
def test_10_a_header_that_does_not_lie_in_the_file_is_rejected(content):
    with pytest.raises(RejectError, match="safetensors"):
        check_weights(memoryview(content), PATH)


@settings(max_examples=examples(40, 150), deadline=None)
@given(header=mutated(HEADER))
def test_10_whatever_a_header_says_its_arrays_lie_in_the_file(header):
    """Either it is rejected, or NumPy makes every array of it: no other error, no other memory."""
    from prejit.runtime.format.blobs import Layer
    from prejit.runtime.programs.mapped_weights import open_weights

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


@pytest.mark.parametrize(
    ("shardings", "complaint"),
    [
        ({"score:nothing": "tensor"}, "weight_shardings: no tensor 'score:nothing'"),
        ({"score:kernel": "tensor"}, "score:kernel: .*for each of 2 dimensions"),
        ({"score:kernel": "rows,"}, "score:kernel: .*'rows,'"),
        ({"score:kernel": ""}, "score:kernel: expected a mesh axis, found none"),
        ({"score:kernel": ",tensor"}, "score:kernel: expected a mesh whose 'tensor' divides 4"),
    ],
)
def test_10_weights_that_the_mesh_cannot_split_so_are_rejected(
    shardings, complaint, recipe, tmp_path
):
    shapes = {"score:bias": (4,), "score:kernel": (16, 4)}
    config = recipe.targets[0].config
    even = {"score:bias": "data", "score:kernel": "tensor,data"}
    right = dataclasses.replace(config, mesh=Mesh(2, 8), weight_shardings=even)
    check_weight_sets(right, shapes, PATH)
    forged = dataclasses.replace(config, mesh=Mesh(2, 3), weight_shardings=shardings)
    with pytest.raises(RejectError, match=complaint):
        check_weight_sets(forged, shapes, PATH)
    if "score:nothing" in shardings:
        path = recipe.only(config.target).configured(lambda _: forged).write(tmp_path / "b")
        weights = digest_of(recipe.content(WEIGHTS_MEDIA_TYPE))
        assert reject(path, complaint).path.endswith(weights.removeprefix("sha256:"))


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
    with pytest.raises(RejectError, match=complaint) as caught:
        check_chat(content, PATH)
    assert caught.value.path == PATH
