"""Golden bundles of format N, in v<N>: later readers still read them; after a release none is made again."""

import dataclasses
import functools
import json
import random
import shutil
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zstandard
from tests.extent import examples, one_in
from tests.layouts import blob, index_file, index_of, write_index

from prejit.runtime import __main__, load
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.device.device import Device
from prejit.runtime.errors import FallbackWarning, RejectError, UsageError
from prejit.runtime.format import bundle_schema
from prejit.runtime.format.arrays import Mesh
from prejit.runtime.format.audit import audit
from prejit.runtime.format.bundle_schema import Config
from prejit.runtime.format.checks import oci
from prejit.runtime.format.checks.program_table import (
    check_chunks_layers,
    check_config,
    check_packs,
)
from prejit.runtime.format.checks.seldom_parts import Chat, check_recorded_layer
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.mesh_splits import parse_sharding
from prejit.runtime.format.names import FORMAT_VERSION, PORTABLE_MEDIA_TYPE, WEIGHTS_MEDIA_TYPE
from prejit.runtime.format.opening import match, read_manifests
from prejit.runtime.format.root import read_root
from prejit.runtime.generation.options import check_generation
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement

from . import second_reader

HERE = Path(__file__).parent / f"v{FORMAT_VERSION}"
GOLDEN = sorted(path.parent for path in HERE.glob("*/oci-layout"))
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)


def expected_of(name):
    return json.loads((HERE / "expected.json").read_bytes())[name]


@pytest.fixture(params=GOLDEN, ids=lambda path: path.name)
def golden(request):
    return request.param


@functools.cache
def loaded_once(name):
    """A golden bundle, loaded once: what it compiles serves all tests."""
    return fallen_back(HERE / name)


def fallen_back(path):
    """Loaded as by a machine that is none of its targets: what runs is the portable form."""
    machine = dataclasses.replace(Fingerprint.current(), jaxlib="0.0.1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = load(path, fingerprint=machine)
    # Beside it there may be one of how long portable programs can be read: that depends on the day.
    assert any(w.category is FallbackWarning and "jaxlib: needs" in str(w.message) for w in caught)
    return loaded


def both_readings(name):
    """The only target of a bundle: as the second reader has it, what it needs, and its manifest."""
    [target] = second_reader.read(HERE / name)
    needs = from_json(Requirement, to_json(target.needs), "needs")
    with Layout(HERE / name) as layout:
        opened = match(read_root(layout), Fingerprint.current())
        return target, needs, read_manifests(layout, opened)[target.name]


def test_a_golden_bundle_was_never_made_again_and_passes_every_check(golden, said):
    digest = expected_of("digests")[golden.name]
    assert digest_of(index_file(golden).read_bytes()) == digest
    assert json.loads(said("verify", golden, "--json"))["digest"] == digest
    assert __main__.main(["inspect", str(golden)]) == 0
    assert __main__.main(["explain", str(golden)]) in (0, 3)
    assert "cpu-x86-64-v2" in said("inspect", golden, "--json")


def test_a_changed_byte_of_a_golden_bundle_is_rejected(golden, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(golden, copy)
    # `load` reads one target, and no recorded files.
    whole = golden.name != "recorded" and len(index_of(golden)["manifests"]) == 1
    read = load if whole else functools.partial(audit, check_generation=check_generation)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    for file in random.Random(golden.name).sample(files, min(len(files), examples(5, 100))):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(RejectError, match=file.name):
            read(copy)
        file.write_bytes(content)


def test_another_reader_finds_what_the_documentation_says(golden):
    for target in second_reader.read(golden):
        for program in target.programs.values():
            assert program.portable.startswith(b"ML\xefR"), "a portable artifact is MLIR bytecode"
        dtypes = {tensor["dtype"] for tensor in target.tensors.values()}
        assert dtypes <= {"F32", "U8", "I8"}


def test_the_documentation_names_every_key():
    document = (HERE.parents[2] / "docs" / "bundle-format.md").read_text(encoding="utf-8")
    assert document.startswith(f"# The bundle format, version {FORMAT_VERSION}\n")
    schema = HERE.parents[2] / "docs" / "reference" / "bundle-schema.md"
    document += schema.read_text(encoding="utf-8")
    kinds = [each for each in vars(bundle_schema).values() if isinstance(each, type)]
    kinds = [Chat, *filter(dataclasses.is_dataclass, kinds)]
    keys = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert {key for key in keys if f"`{key}`" not in document} == set()


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("decoder", {"decode", "verify", "copy"}),
        ("mesh", {"decode", "prefill", "copy"}),
        ("stored", {"decode", "prefill", "verify", "copy"}),
        ("encoder", {"encode"}),
        ("reader", {"decode", "prefill", "verify", "copy", "encode"}),
    ],
)
def test_two_readers_miss_the_same_programs(name, kinds):
    """Each program of a model is taken away once: one reader must not serve what another refuses."""
    [target] = second_reader.read(HERE / name)
    config = from_json(Config, to_json(target.config), name)
    missed = set()
    for lost in target.programs:
        rest = {other: said for other, said in target.programs.items() if other != lost}
        fewer = dataclasses.replace(
            config, programs=tuple(p for p in config.programs if p.name != lost)
        )
        content, needs = to_json(fewer), config.requirement
        bucket = target.programs[lost].said["bucket"]
        # There is another prefill, of other length. Copies to a smaller batch save time alone.
        is_spare = name == "decoder" and lost.startswith("prefill")
        if is_spare or bucket.get("source_batch", 0) > bucket["batch"]:
            check_config(content, config.target, needs, name)
            second_reader.check_programs(target.config, rest)
            continue
        with pytest.raises(RejectError):
            check_config(content, config.target, needs, name)
        with pytest.raises(AssertionError):
            second_reader.check_programs(target.config, rest)
        missed.add(lost.partition("/")[0])
    assert missed == kinds


@pytest.mark.parametrize("bundle", ["fleet", "kernels"])
def test_two_readers_choose_the_same_target_for_every_machine(bundle):
    """By each rule of comparison once, by each of preference, and by glibc: 2.100 is newer than 2.34."""
    wanted, read = expected_of(bundle), second_reader.read(HERE / bundle)
    with Layout(HERE / bundle) as layout:
        root = read_root(layout)
    for name, told in wanted["machines"].items():
        machine = from_json(Fingerprint, to_json(told), name)
        fitting = [t.name for t in match(root, machine) if t.verdict.matches]
        chosen = wanted["served_by"][name]
        assert (fitting or [None])[0] == chosen == second_reader.served_by(read, told), name
    if bundle == "fleet":
        assert set(wanted["served_by"].values()) == {target.name for target in read} | {None}
        # Or a change of an axis would go by the golden bundles. Kernels ask for a glibc.
        asked = {axis for target in read for axis, value in target.needs.items() if value}
        assert asked | {"glibc"} == {field.name for field in dataclasses.fields(Requirement)}


def test_programs_with_kernels_compile_from_their_portable_form():
    loaded, wanted = fallen_back(HERE / "kernels"), expected_of("kernels")
    assert loaded.config.kernels is not None
    assert [program.kernels for program in loaded.config.programs] == [True, None]
    for name in ("scale", "negate"):
        result = loaded.call(name, x=np.array(wanted["x"], np.float32))
        np.testing.assert_array_equal(result, wanted[name])


def test_programs_with_weights_in_chunks_compile_from_their_portable_form():
    """Three tensors lie in three chunks, two of them across a border. Each result needs one tensor."""
    loaded, wanted = fallen_back(HERE / "chunks"), expected_of("chunks")
    x = np.array(wanted["x"], np.float32)
    np.testing.assert_array_equal(loaded.call("score", x=x), wanted["score"])
    values = ((np.arange(3 * 800 * 16) % 61 - 30) / 8).reshape(3, 800, 16)
    np.testing.assert_array_equal(wanted["score"], values.sum(1) @ x)
    [target] = second_reader.read(HERE / "chunks")
    [(media_type, chunks)] = target.config["chunks"].items()
    assert media_type == WEIGHTS_MEDIA_TYPE
    assert (chunks["size"], len(chunks["digests"])) == (65_536, 3)


A_FILE = "expected a file of jax's compilation cache"
HEXADECIMAL = "expected digests of 64 hexadecimal digits"


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("chunks", {"algorithm": "sha256"}, "expected blake3, found 'sha256'"),
        ("chunks", {"size": 67_108_865}, "a size of 65536 to 67108864 bytes, found 67108865"),
        ("chunks", {"digests": []}, f"{HEXADECIMAL}, at least one"),
        ("chunks", {"digests": ["a" * 64]}, "3 for 153856 bytes in chunks of 65536, found 1"),
        ("chunks", {"verity": "sha256:" + "A" * 64}, "verity of sha256: and 64 hexadecimal digits"),
        ("recorded", {"file": "../../.profile"}, A_FILE),
        ("recorded", {"file": f"jit_a-{'0' * 63}-cache"}, A_FILE),
        ("recorded", {"ingredients": {"computation": "A" * 64}}, HEXADECIMAL),
        ("recorded", {"entry": {"raw_size": (1 << 30) + 1}}, "raw_size: expected 1 to"),
        ("recorded", {"entry": {"offset": 1 << 20}}, "frames in .* bytes, found 1048576 to"),
    ],
)
def test_two_readers_refuse_the_same_chunks_and_recorded_files(name, change, complaint):
    target, needs, manifest = both_readings(name)
    if name == "chunks":
        said = target.config["chunks"][WEIGHTS_MEDIA_TYPE]
        config = {**target.config, "chunks": {WEIGHTS_MEDIA_TYPE: {**said, **change}}}
    else:
        said = target.config["recorded"][0]
        entry = {**said["entry"], **change.get("entry", {})}
        config = {**target.config, "recorded": [{**said, **change, "entry": entry}]}

    def check():
        checked = check_config(to_json(config), target.name, needs, "config")
        check_chunks_layers(checked, manifest, "config")
        check_recorded_layer(checked, manifest, "config")
        check_packs(checked, manifest, "config")

    with pytest.raises(RejectError, match=complaint):
        check()
    kinds = [layer.mediaType.removeprefix(second_reader.TYPE) for layer in manifest.layers]
    contents = [blob(HERE / name, layer.digest).read_bytes() for layer in manifest.layers]
    check_other = second_reader.check_chunks if name == "chunks" else second_reader.check_recorded
    with pytest.raises((AssertionError, zstandard.ZstdError)):
        check_other(config, dict(zip(kinds, contents, strict=True)))


def test_recorded_files_are_refused_beside_anything_else_and_by_load():
    target, needs, manifest = both_readings("recorded")

    def check(**change):
        config = {**target.config, **change}
        said = to_json({name: value for name, value in config.items() if value is not None})
        read = check_config(said, target.name, needs, "config")
        check_recorded_layer(read, manifest, "config")

    with pytest.raises(RejectError, match="expected no programs beside recorded files"):
        check(weight_sets={"model": []})
    twice = [target.config["recorded"][0]] * 2
    for wrong in (twice, target.config["recorded"][::-1], []):
        with pytest.raises(RejectError, match="expected recorded files, each once, sorted by name"):
            check(recorded=wrong)
    with pytest.raises(RejectError, match="expected no layer of recorded files, as the config"):
        check(recorded=None)
    more = dataclasses.replace(manifest.layers[0], mediaType=WEIGHTS_MEDIA_TYPE)
    kept = dataclasses.replace(more, mediaType=PORTABLE_MEDIA_TYPE)
    both = dataclasses.replace(manifest, layers=(*manifest.layers, kept))
    assert oci.check_manifest(to_json(both), "manifest") == both
    both = dataclasses.replace(manifest, layers=(*manifest.layers, more))
    with pytest.raises(RejectError, match="expected no other layer beside recorded files"):
        oci.check_manifest(to_json(both), "manifest")
    with pytest.raises(UsageError, match="found one of `prejit record`") as caught:
        load(HERE / "recorded")
    assert "prejit run" in (caught.value.hint or "")


def test_programs_of_a_user_compile_from_their_portable_form():
    loaded, wanted = loaded_once("call"), expected_of("call")["score"]
    np.testing.assert_allclose(loaded.call("score", x=X), wanted, rtol=1e-5, atol=1e-6)
    half = np.array([1, 2, 3], ml_dtypes.bfloat16)
    result = loaded.call("nest", tree={"half": half, "pair": (np.ones((2, 2), np.int32), True)})
    assert result["scalar"] == 2.5
    assert result["sums"][0].astype(np.float32).tolist() == [2, 4, 6]
    assert result["sums"][1].tolist() == [[2, 2], [2, 2]]
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(loaded.call("repeat", x=x[:, :2], times=3), 3 * x[:, :2])
    np.testing.assert_array_equal(loaded.call("repeat", x=x[:3, :2], times=2), 2 * x[:3, :2])
    with pytest.warns(FallbackWarning, match="no bucket has the sizes of repeat"):
        np.testing.assert_array_equal(loaded.call("repeat", x=x, times=3), 3 * x)


def test_a_forged_copy_cannot_decide_what_an_honest_bundle_runs(tmp_path):
    """It names the platforms of its programs in another order, and all its digests are right."""
    copy = Path(shutil.copytree(HERE / "call", tmp_path / "forged"))

    def replaced(descriptor, content):
        raw = to_json(content)
        descriptor.update(digest=digest_of(raw), size=len(raw))
        blob(copy, descriptor["digest"]).write_bytes(raw)

    index = index_of(copy)
    for of_target in index["manifests"]:
        manifest = json.loads(blob(copy, of_target["digest"]).read_bytes())
        config = json.loads(blob(copy, manifest["config"]["digest"]).read_bytes())
        for program in config["programs"]:
            program["platforms"] = program["platforms"][::-1]
        replaced(manifest["config"], config)
        replaced(of_target, manifest)
    write_index(copy, to_json(index))
    fallen_back(copy).call("score", x=X)
    honest = fallen_back(HERE / "call")
    honest.call("score", x=X)
    assert {each.source for each in honest.report()} == {"compiled", "unused"}


def test_devices_of_a_mesh_hold_what_the_documentation_says():
    """Rows of the mesh, `data`, come first: the third device of 2 x 2 begins the second row."""
    sizes = {"data": 2, "tensor": 2}
    values = np.arange(24).reshape(4, 6)
    corners = second_reader.shards(values, ["data", "tensor"], sizes)
    assert [int(shard[0, 0]) for shard in corners] == [0, 3, 12, 15]
    [target] = second_reader.read(HERE / "mesh")
    spelled = set(target.config["weight_shardings"].values())
    assert spelled == {"tensor", "tensor,", ",tensor"}
    device = Device("cpu", Mesh(**sizes))
    for text in (*spelled, "data,tensor", "tensor,data"):
        split = text.split(",")
        whole = values if len(split) == 2 else values[0]
        placed = device.put(whole, parse_sharding(text, whole.ndim))
        # By the device that each lies on, not by the one that the sharding gives it.
        held = {min(shard.data.devices()).id: shard.data for shard in placed.addressable_shards}
        for place, wanted in enumerate(second_reader.shards(whole, split, sizes)):
            np.testing.assert_array_equal(held[place], wanted)


def test_portable_programs_take_the_index_of_their_platform():
    """Each adds 1 on a CPU, wherever `cpu` stands in its platforms; 2 or 3 would be another's part."""
    loaded = fallen_back(HERE / "fleet")
    platforms = [program.platforms for program in loaded.config.programs]
    assert platforms == [("cpu", "cuda", "tpu"), ("tpu", "cpu"), ("cpu",), None]
    for program in loaded.config.programs:
        result = loaded.runner_with_zeros(program)()
        np.testing.assert_array_equal(result, [1, 2, 3, 4], err_msg=program.name)


def generates(loaded, wanted, **request):
    """Check the tokens, texts and log-probabilities of a golden bundle."""
    results = loaded.generate_batch(**request, logprobs=2)
    assert [[*result.token_ids] for result in results] == wanted["token_ids"]
    assert [result.text for result in results] == wanted["texts"]
    found = [[one.logprob for one in result.logprobs or ()] for result in results]
    np.testing.assert_allclose(found, wanted["logprobs"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", one_in(2, ["decoder", "mesh"]))
def test_decoders_generate_from_their_portable_form(name):
    loaded, wanted = loaded_once(name), expected_of("decoder")
    generates(loaded, wanted, prompts=wanted["prompts"], max_new_tokens=20)


def test_decoders_sample_and_chat_as_on_the_day_they_were_built():
    """By all ten arrays; a change of the random numbers would be a change of every bundle's tokens."""
    loaded, wanted = loaded_once("decoder"), expected_of("decoder")
    options = {**wanted["options"], "logit_bias": {int(k): v for k, v in wanted["bias"].items()}}
    for prompt, tokens in zip(wanted["prompts"], wanted["sampled"], strict=True):
        assert [*loaded.generate(prompt, max_new_tokens=20, **options).token_ids] == tokens
    assert loaded.apply_chat_template(wanted["messages"]) == wanted["chat"]
    assert loaded.apply_chat_template(wanted["messages"], template="bare") == wanted["bare"]


@pytest.mark.parametrize("name", one_in(2, ["decoder", "stored"]))
def test_drafts_are_verified(name):
    loaded, wanted = loaded_once(name), expected_of(name)
    options = {"max_new_tokens": 32 - len(wanted["lookup_prompt"])}
    result = loaded.generate(wanted["lookup_prompt"], prompt_lookup=True, **options)
    assert [*result.token_ids] == wanted["lookup"]
    assert result.stats.accepted_tokens > 0
    assert loaded.generate(wanted["lookup_prompt"], **options).token_ids == result.token_ids


@pytest.mark.thorough
def test_caches_grow_while_a_row_is_at_work():
    """The first needs a context of 16, the second, which joins later, one of 32."""
    loaded, wanted = loaded_once("decoder"), expected_of("decoder")
    batch, tokens = loaded.batch(2), dict[int, list[int]]()

    def step():
        for token in batch.step():
            if token.token_id is not None:
                tokens.setdefault(token.slot, []).append(token.token_id)

    short, long = wanted["prompts"]
    [first] = batch.insert(loaded.request(short, max_new_tokens=8))
    step()
    [second] = batch.insert(loaded.request(long, max_new_tokens=20))
    while batch.free < batch.slots:
        step()
    assert [tokens[first], tokens[second]] == [wanted["token_ids"][0][:8], wanted["token_ids"][1]]
    made = {report.program for report in loaded.report() if report.source != "unused"}
    assert {"decode/b2-c16", "decode/b2-c32"} <= made


def test_reader_says_what_it_reads_and_writes_about_its_sources():
    loaded, wanted = loaded_once("reader"), expected_of("reader")
    options = {"max_new_tokens": 12, "stop_token_ids": []}
    generates(loaded, wanted, sources=wanted["sources"], **options)
    session, sizes = loaded.session(), []
    for source, tokens in zip(wanted["sources"], wanted["token_ids"], strict=True):
        for one in (loaded, session):
            alone = one.generate(source=source, **options)
            assert [*alone.token_ids] == tokens
            assert alone.stats.reused_tokens == 0
        sizes.append(alone.stats.programs[0].partition("-c")[0])
    assert sizes == ["encode/b1-n4", "encode/b1-n8", "encode/b1-n8"]
    config = loaded.config.decoder
    assert (config.source, config.start_token_ids) == ('["source"] int32[1,1] ~batch,source', (0,))
    kinds = [text.rpartition("~")[2] for text in config.cache or ()]
    assert set(kinds) == {"batch,,context,", "batch,,,", "batch"}
    with pytest.raises(UsageError, match="source: expected what the model is to read, found none"):
        loaded.generate([0])


@pytest.mark.thorough
def test_reader_stops_goes_on_from_a_prompt_samples_and_verifies_drafts():
    loaded, wanted = loaded_once("reader"), expected_of("reader")
    first, second, third = wanted["sources"]
    ended = loaded.generate(source=third, max_new_tokens=12)
    tokens = wanted["token_ids"][2]
    assert ([*ended.token_ids], ended.finish_reason) == (tokens[: tokens.index(1)], "stop")
    options = {"max_new_tokens": 12, "stop_token_ids": []}
    result = loaded.generate(wanted["prompt"], source=third, **options)
    assert [*result.token_ids] == wanted["prompted"]
    sampled = loaded.generate(source=second, max_new_tokens=12, **wanted["options"])
    assert [*sampled.token_ids] == wanted["sampled"]
    [start], tokens = loaded.decoder.decoder.start_token_ids, wanted["token_ids"][0]
    drafted = loaded.generate(  # it repeats itself, so that the first draft is right
        [start, *tokens[:7]], source=first, max_new_tokens=5, prompt_lookup=True
    )
    assert [*drafted.token_ids] == tokens[7:]
    assert drafted.stats.accepted_tokens > 0


def test_int8_weights_and_a_bfloat16_cache_generate_and_are_stored_as_the_documentation_says():
    loaded, wanted = loaded_once("stored"), expected_of("stored")
    assert [*loaded.generate(wanted["prompt"], max_new_tokens=20).token_ids] == wanted["token_ids"]
    decoder, accuracy = loaded.config.decoder, loaded.config.accuracy
    assert (decoder.cache_dtype, accuracy.weights) == ("bfloat16", "int8")
    [target] = second_reader.read(HERE / "stored")
    matrices = {name: t for name, t in target.tensors.items() if t["dtype"] == "I8"}
    assert len(matrices) == 9, "an embedding, seven of a layer, a head"
    for name, tensor in matrices.items():
        scale = target.tensors[f"{name}_scale"]
        assert scale["dtype"] == "F32"
        integers = np.frombuffer(tensor["data"], np.int8).reshape(tensor["shape"]).astype(int)
        # One factor for each output, whose largest weight is then 127.
        full = [axis for axis in (0, 1) if (abs(integers).max(1 - axis) == 127).all()]
        assert scale["shape"] in [[tensor["shape"][axis]] for axis in full], name
        assert (np.frombuffer(scale["data"], np.float32) > 0).all()


def test_encoder_encodes_from_its_portable_form():
    loaded, wanted = loaded_once("encoder"), expected_of("encoder")
    found = loaded.encode(wanted["sentences"])
    np.testing.assert_allclose(found, wanted["embeddings"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    alone = [loaded.encode([sentence])[0] for sentence in wanted["sentences"]]
    np.testing.assert_allclose(alone, found, rtol=1e-4, atol=1e-5)


def test_executables_still_run_on_the_jaxlibs_that_they_are_for():
    machine, jaxlibs = Fingerprint.current(), ("0.10.2", "0.12.0.1")
    if machine.jaxlib not in jaxlibs or machine.architecture != "x86_64":
        pytest.skip(f"they are for jaxlib {' and '.join(jaxlibs)} on x86_64, not {machine.jaxlib}")
    machine = dataclasses.replace(machine, xla_flags=(), environment=())
    loaded = load(HERE / "call", on_mismatch="error", fingerprint=machine)
    wanted = expected_of("call")["score"]
    np.testing.assert_allclose(loaded.call("score", x=X), wanted, rtol=1e-5, atol=1e-6)
    assert {report.source for report in loaded.report()} == {"loaded", "unused"}
