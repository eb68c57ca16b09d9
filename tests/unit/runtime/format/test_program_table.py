"""Check 7, of the program table: a config that only this check keeps out."""

import dataclasses
import functools
import itertools
import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaigns.junk import edited
from tests.extent import examples
from tests.format import second_reader

from prejit.compiler.targets.target_classes import catalogue
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.device.device import Device
from prejit.runtime.encoding.encoder import EncoderPrograms
from prejit.runtime.errors import RejectError
from prejit.runtime.format import limits
from prejit.runtime.format.arrays import Array, Mesh
from prejit.runtime.format.blobs import Layer
from prejit.runtime.format.bundle_schema import Config, Portable
from prejit.runtime.format.checks.call_programs import check_arrays
from prejit.runtime.format.checks.program_interfaces import Signatures, sized
from prejit.runtime.format.checks.program_table import check_array, check_config
from prejit.runtime.format.names import KERNEL_LEVELS
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.source_check import encode_for
from prejit.runtime.programs.ready_programs import Programs

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
    replaced,
)

second_target = functools.cache(lambda name: second_reader.read(GOLDEN / name)[0])


def check(changed, like=None):
    """Check a config, or its JSON, as that of the target and the requirement of another one."""
    like = changed if isinstance(changed, Config) else like
    return check_config(to_json(changed), like.target, like.requirement, PATH)


def rejected(config, change, complaint):
    changed = change(config)
    refused(lambda: check(changed, config), complaint)


def on_devices(mesh, platform, count):
    def change(config):
        needs = dataclasses.replace(config.requirement, platform=platform, device_count=count)
        return dataclasses.replace(config, requirement=needs, mesh=mesh)

    return change


def readable(until):
    return replaced(portable=Portable("0.12.0.1", "1.17.0", until))


def without(*names):
    return lambda config: dataclasses.replace(
        config, programs=tuple(p for p in config.programs if not {p.name, p.kind} & {*names})
    )


def lacking(name, argument):
    def change(config):
        arguments = program_of(config, name).arguments
        kept = tuple(text for text in arguments if not text.startswith(f'["{argument}"]'))
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


def retold(config, name, which, old, new):
    texts = (text.replace(old, new) for text in getattr(program_of(config, name), which))
    return changed(config, name, **{which: tuple(texts)})


def too_long(config):
    config = changed(config, PREFILL, bucket={"batch": 2, "context": 32, "prompt": 33})
    return retold(config, PREFILL, "arguments", "int32[2,8]", "int32[2,33]")


def model(kind, **changes):
    """JSON of a decoder or encoder that says something else; None: it does not say it."""

    def change(config):
        plain = json.loads(to_json(config))
        plain[kind] = {k: v for k, v in {**plain[kind], **changes}.items() if v is not None}
        return plain

    return change


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
        (replaced(mesh={"data": 1, "tensor": 2, "axes": ["tp=2"]}), "each axis once"),
        (replaced(mesh={"data": 1, "tensor": 1, "axes": ["tp=2", "tp=2"]}), "each axis once"),
        (replaced(mesh={"data": 1, "tensor": 1, "axes": []}), "each axis once"),
        (replaced(mesh={"data": 1, "tensor": 1, "axes": ["tp=02"]}), "each axis once"),
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
        (program(DECODE, bucket={"batch": 2, "context": 1 << 31}), "to 2147483647, found 2147"),
        (program(DECODE, cost_microseconds=-1), "cost_microseconds: expected 0 or"),
        (program(DECODE, weights=None), f"{DECODE}: expected 'weights'"),
        (doubled(DECODE), "another: expected one decode program of its bucket"),
        (lacking(DECODE, "steps"), rf'{DECODE}: arguments\[3\]: expected .\["steps"\] int32\[\]'),
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
        (too_long, f"{PREFILL}: prompt: expected at most its context"),
        (also(VERIFY, draft=3), "one draft of all verify programs"),
        (model("decoder", vocab_size=0), "decoder: vocab_size: expected 1 to .*, found 0"),
        (model("decoder", cache_dtype="int4"), "cache_dtype: expected .*, found 'int4'"),
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
        ("[] float32[4,6] @dp+tp,", Mesh.of(dp=2, tp=2), None),
        ("[] float32[4,6] @,dp+tp", Mesh.of(dp=2, tp=2), r"'dp\+tp' divides 6, found 4"),
        ("[] float32[4,6] @fsdp,", Mesh.of(dp=2, tp=2), "divides 4, found no mesh with it"),
        *(
            (f"[] float32[4,6] @{split}", Mesh.of(dp=2, tp=2), "expected")
            for split in ("dp+dp,", "dp,dp", "+dp,", "dp+,", "dp++tp,", "1p,", "dp")
        ),
        ("[] float32[4,6] @tensor", Mesh(2, 3), r"expected '\[path\] dtype\[shape\]'"),
        # No dtype of jax, or nothing could index it.
        *((f"[] {name}[2]", None, "expected") for name in ("finfo", "object_", "int", "f4")),
        *((f"[] int8[{n}]", None, "expected") for n in ("2147483648", "1" + "0" * 5000)),
    ],
)
def test_7_an_array_that_its_mesh_does_not_split_or_that_is_none_is_rejected(text, mesh, complaint):
    if complaint is None:
        assert str(check_array(text, mesh, PATH)) == text
    else:
        refused(lambda: check_array(text, mesh, PATH), complaint)


@pytest.mark.parametrize(
    "change",
    [
        program(SCORE, results=("[ ] float32[2,4]",)),
        program(SCORE, pad=("rows",)),
        program(SCORE, arguments=('["x"] float32[2,16] ~rows,',), bucket={"rows": 3}),
        program(SCORE, mask="x"),
        replaced(weight_sets={"score": ("score:nothing",)}),
        replaced(mesh=Mesh(1, 2), weight_shardings={"score:bias": "tensor,"}),
    ],
)
def test_7_and_10_prejit_verify_reads_what_load_puts_off(change, recipe, tmp_path, ran):
    """Of every target, also of those that this machine does not run."""
    _, other = (target.config.target for target in recipe.targets)
    forged = recipe.configured(lambda c: change(c) if c.target == other else c)
    assert "error[" in ran("verify", forged.write(tmp_path / "b"), status=RejectError.exit_code).err


KEYS, VALUES, THIRD = (
    f'["cache",0,{place}] float32[1,2,1,4] ~batch,,context,' for place in range(3)
)
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
        ("decoder", {"cache": [KEYS, VALUES, THIRD]}, "expected .*0,2.* found nothing"),
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
    for level, features in KERNEL_LEVELS.items():
        assert tuple(sorted(features)) in ((), catalogue()[f"cpu-{level}"].cpu_features)
    assert f"cpu-{max(KERNEL_LEVELS)}" == max(n for n in catalogue() if "x86" in n)
    # A config holds 250,000 of them, which would take 13 seconds.
    endless = [f'["cache",{n}] float32[1] ~batch' for n in range(limits.MAX_CACHE_ARRAYS + 1)]
    config = golden_config("decoder")
    monkeypatch.setattr(Array, "parse", lambda text: pytest.fail("expected no array to be read"))
    rejected(config, model("decoder", cache=endless), "cache: expected 1 to 16384 arrays, found 16")


def test_7_a_grid_of_sources_takes_no_more_memory_than_its_programs():
    """Contexts times sources would be 160,000 buckets, of 25 MB."""
    config = golden_config("reader")
    sizes = range(1, 401)
    programs = (
        *(resized(config, "decode/b1-c8", context=size) for size in sizes),
        *(resized(config, "prefill/b1-t4-c8", prompt=1, context=size) for size in sizes),
        *(resized(config, READ, context=1, source=size) for size in sizes),
    )
    forged = dataclasses.replace(config, programs=programs)
    with in_little_memory(15 << 20):
        rejected(forged, replaced(), "context 2 and source 1: expected one")


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
    programs = Programs(config, Device("cpu"), None, Layer(b"", PATH), None)
    if config.encoder is not None:
        encoder = EncoderPrograms(config.encoder, programs)
        assert all(programs.arguments(n) for bucket in encoder.buckets for n in bucket.programs)
        return
    decoder = DecoderPrograms(config.decoder, programs)
    smallest = decoder.batches[0]
    for batch, context in itertools.product(decoder.batches, decoder.contexts):
        assert decoder.bucket_for(batch, context) == (batch, context)
        decode = decoder.decode_for(batch, context)
        assert decoder.max_steps(decode) >= 1
        found = [decode, *decoder.prefills(batch, context)]
        found.append(decoder.copy_for((smallest, context), (batch, context)))
        if decoder.draft_tokens:
            found.append(decoder.verify_for(batch, context))
            assert found[-1].bucket["draft"] == decoder.draft_tokens
        for size in {p.bucket["source"] for p in config.programs if p.kind == "encode"}:
            found.append(encode_for(decoder, context, size))
            assert (found[-1].bucket["source"], found[-1].bucket["batch"]) == (size, smallest)
        for each in found:
            arguments = [array.path[0] for array in programs.arguments(each.name)]
            assert ("source" in arguments) == (each.kind in ("copy", "encode"))
            programs.results(each.name)
        cached = [sized(array, {"batch": batch, "context": context}) for array in decoder.cache]
        taken = programs.arguments(decode.name)[-len(cached) :]
        assert [dataclasses.replace(a, donated=False, sharding=()) for a in taken] == cached
    starts = config.decoder.start_token_ids or ()
    assert all(0 <= token < config.decoder.vocab_size for token in starts)


def test_7_paths_that_are_no_tree_are_rejected():
    """They would end in an AttributeError when the results are put together, or in too deep a recursion."""
    for paths in (["[0,1]", "[0]"], ['["a","b","c"]', '["x"]', '["a"]'], [f"[{'0,' * 999}0]"]):
        arrays = [f"{path} int8[]" for path in paths]
        refused(lambda each=arrays: check_arrays(each, "call", None, PATH), "of a tree|keys in a p")
        for array in arrays[: len(arrays) - 1]:
            check_arrays([array], "call", None, PATH)


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
