"""Files beside a model's weights with a mistake fail before anything compiles. Weights are read once."""

import itertools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file
from tests.encoders import write_causal, write_encoder
from tests.manifests import encoder_manifest, write_manifest
from tests.parity.cases import shapes_of
from tests.unit.compiler.models.small_models import LLAMA

from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.models.chat_files import read_chat
from prejit.compiler.models.families.sentence_layout import read_layout
from prejit.compiler.pipeline import published_files
from prejit.compiler.pipeline.measure.accuracy import choose_bits
from prejit.compiler.pipeline.pack import bundle_files
from prejit.compiler.pipeline.pack.model_layers import (
    check_generation,
    other_tokenizers,
    read_layers,
    special_ids,
    unread_settings,
    unread_similarity,
)
from prejit.compiler.pipeline.pack.weights_layer import pack_weights
from prejit.compiler.pipeline.plan import PlanOptions, plan_build
from prejit.compiler.pipeline.published_files import HashedFile, find_published
from prejit.compiler.pipeline.workspace import Workspace
from prejit.compiler.progress import Quiet
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import CheckpointError
from prejit.runtime.machine import kept_files


def test_a_configuration_that_cannot_be_read_fails_the_build(tmp_path):
    path = tmp_path / "generation_config.json"
    # What changes the text in transformers alone is named, and so may be in a note.
    others = (
        b'"no_repeat_ngram_size": 1, "suppress_tokens": [], "num_beams": 1, "bad_words_ids": [[1]], '
        b'"forced_eos_token_id": 1, "epsilon_cutoff": 0.0, "token_healing": false'
    )
    found = check_generation(path, b'{"temperature": 0.5, "unknown": {}, ' + others + b"}")
    assert found == ["no_repeat_ngram_size", "bad_words_ids", "forced_eos_token_id"]
    # `max_length` counts the prompt too, and gives way to `max_new_tokens`.
    ends = b'{"max_length": 448, "task": "transcribe", "num_return_sequences": 1, "max_new_tokens": %s}'
    assert check_generation(path, ends % b"null") == ["max_length", "task"]
    assert check_generation(path, ends % b"9") == ["task"]
    with pytest.raises(CheckpointError, match=r"config\.json: top_p: expected .* 'x'"):
        check_generation(path, b'{"top_p": "x"}')
    with pytest.raises(CheckpointError, match=r"expected at most 1048576 bytes, found 1048577"):
        check_generation(path, b" " * (1 << 20) + b"1")
    deep = "[" * 100_000
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(deep)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: cannot read JSON"):
        special_ids(tmp_path, 50)
    settings = tmp_path / "tokenizer_config.json"
    for cleans, kind in itertools.product((True, False), ("Unigram", "BPE")):  # also for a note
        settings.write_text(json.dumps({"clean_up_tokenization_spaces": cleans}))
        content = json.dumps({"model": {"type": kind}}).encode()
        wanted = ["clean_up_tokenization_spaces"] * (cleans and kind == "Unigram")
        assert unread_settings(settings, content, decodes=True) == wanted
        assert unread_settings(settings, content, decodes=False) == []
    settings.write_text('{"split_special_tokens": true}')
    assert unread_settings(settings, content, decodes=False) == ["split_special_tokens"]
    settings.write_text(deep)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: cannot read JSON"):
        read_chat(tmp_path)


def test_a_tokenizer_in_another_file_is_left_out_without_a_word(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert other_tokenizers(tmp_path) == ""
    for name in ("sentencepiece.bpe.model", "qwen.tiktoken", "vocab.json"):
        (tmp_path / name).touch()
    said = other_tokenizers(tmp_path)
    assert said.startswith(f"{tmp_path}: prejit reads tokenizer.json, found qwen.tiktoken")
    assert "save_pretrained" in said


def test_another_similarity_than_the_cosine_is_ignored_without_a_word(tmp_path):
    write_encoder(tmp_path, pooling=("mean_tokens",))
    file = tmp_path / "config_sentence_transformers.json"
    for name, is_noted in ((None, False), ("cosine", False), ("dot", True), ("euclidean", True)):
        file.write_text(json.dumps({"similarity_fn_name": name}))
        said = unread_similarity(read_layout(tmp_path))
        assert (f'{file}: prejit does not use similarity_fn_name: "{name}"' in said) == is_noted
    file.write_text('{"similarity_fn_name": "dot"}')
    assert unread_similarity(replace(read_layout(tmp_path), normalized=True)) == ""
    (tmp_path / "modules.json").unlink()  # without it nobody reads the file
    assert unread_similarity(read_layout(tmp_path)) == ""


def planned(directory, sections="", dtype='"int8"'):
    """Return the manifest of a model whose tensors lie in two shards."""
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    random, where = np.random.default_rng(0), {}
    drawn = {n: random.standard_normal(s, np.float32) for n, s in shapes_of(LLAMA).items()}
    for number in (0, 1):
        shard = {name: drawn[name] for name in sorted(drawn)[number::2]}
        save_file(shard, model / f"{number}.safetensors")
        where |= dict.fromkeys(shard, f"{number}.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (directory / "w.safetensors").write_bytes(save({"w": np.ones(3, np.float32)}))
    (directory / "own.py").write_text("def f(params, x):\n    return params['w'] * x\n")
    sizes = {"prompt": (8,), "context": (16,), "generate": sections}
    manifest = write_manifest(directory / "m.toml", "model", model=f"dtype = {dtype}", **sizes)
    return read_manifest(manifest)


PROGRAM = """[[program]]
name = "own"
function = "own:f"
params = "w.safetensors"
args = { x = "float32[3]" }
"""


def packed(manifest, cache, round_by_text=lambda space, checkpoint: None):
    store = DirectoryStore.open(cache)
    space = Workspace.of(plan_build(manifest, store), store, Quiet())
    published = find_published(space.plan.manifest, space.plan.model)
    return published, pack_weights(space, published, space.parameters(), round_by_text)


def files_of(cache):
    return {each.name for each in cache.glob("v1/actions/weights/**/*") if each.is_file()}


@pytest.fixture
def writes(monkeypatch):
    """The outputs into which weights were written."""
    found, write = [], bundle_files.write_weights

    def write_weights(tensors, out):
        found.append(out)
        time.sleep(0.2)  # others, which began at once, wait
        write(tensors, out)

    monkeypatch.setattr(bundle_files, "write_weights", write_weights)
    return found


def test_a_checkpoint_is_hashed_while_it_is_packed(tmp_path, monkeypatch, writes):
    monkeypatch.setattr(kept_files, "SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(published_files, "_BLOCK_BYTES", 64)
    manifest = planned(tmp_path, PROGRAM)
    ahead, hash_ahead = [], HashedFile.read_ahead

    def read_ahead(self, start, end):
        hash_ahead(self, start, end)
        ahead.append(self.hashed_bytes - end)

    monkeypatch.setattr(HashedFile, "read_ahead", read_ahead)
    published, first = packed(manifest, tmp_path / "first")
    # Nothing is hashed long before it is read.
    assert len(ahead) >= 20
    assert all(0 <= count < 64 for count in ahead)
    digests = {path.name: digest_of(path.read_bytes()) for path in published.checkpoint.files}
    assert dict(published.files) == digests
    # With receipts nothing is hashed, and the bytes are the same.
    published, again = packed(manifest, tmp_path / "second")
    assert again.digest == first.digest
    assert dict(published.files) == digests
    assert not any(each.hashed_bytes for each in published.hashed.values())
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")
    # Without receipts a store that has the weights saves packing.
    monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(tmp_path / "none"))
    assert packed(manifest, tmp_path / "first")[1] == first
    assert len(writes) == 2


def test_builds_that_begin_at_once_pack_once(tmp_path, writes):
    manifest = planned(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(packed, manifest, tmp_path / "cache") for _ in range(2)]
        assert len({each.result()[1].digest for each in both}) == 1
    assert len(writes) == 1


def test_weights_that_change_while_they_are_read_are_not_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_files, "SETTLED_SECONDS", -1.0)
    manifest = planned(tmp_path)
    shard = tmp_path / "model" / "0.safetensors"
    content, times = shard.read_bytes(), (shard.stat().st_atime_ns, shard.stat().st_mtime_ns)

    def change(space, checkpoint):
        time.sleep(0.02)  # a tick of the kernel's clock
        shard.write_bytes(content[:-1] + b"\1")
        os.utime(shard, ns=times)

    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError, match="safetensors: it changed while the build read it"):
        packed(manifest, cache, change)
    assert not files_of(cache)
    with pytest.raises(CheckpointError, match="expected a file, found none"):
        packed(manifest, cache, lambda space, checkpoint: shard.unlink())
    assert not files_of(cache)
    shard.write_bytes(content)
    published, _ = packed(manifest, cache)
    assert dict(published.files)["0.safetensors"] == digest_of(content)
    assert len(files_of(cache)) == 1


def test_files_that_look_alike_have_weights_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(published_files, "_OUTLINE_BYTES", 8)
    manifest, cache = planned(tmp_path), tmp_path / "cache"
    published, first = packed(manifest, cache)
    outlines = tuple(published.outlines)
    shard = tmp_path / "model" / "0.safetensors"
    content, status = bytearray(shard.read_bytes()), shard.stat()
    content[-5001] ^= 0x80  # the sign of a value in the middle
    shard.write_bytes(content)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))  # as cp -p and rsync -a do
    published, other = packed(manifest, cache)
    assert tuple(published.outlines) == outlines
    assert dict(published.files)[shard.name] == digest_of(content)
    assert first.digest != other.digest == packed(manifest, tmp_path / "fresh")[1].digest


@pytest.mark.thorough
def test_an_encoder_whose_bits_are_measured_is_hashed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_files, "SETTLED_SECONDS", 1e9)  # no receipts
    write_encoder(tmp_path / "model")
    encoder_manifest(tmp_path / "m.toml", "shapes = [[1, 8]]", model='dtype = "int8"')
    manifest, store = read_manifest(tmp_path / "m.toml"), DirectoryStore.open(tmp_path / "cache")
    plan = plan_build(manifest, store)
    published = find_published(manifest, plan.model)
    assert plan.model.chosen is None
    chosen, _ = choose_bits(Workspace.of(plan, store, Quiet()), published)
    sizes = {path: path.stat().st_size for path in published.hashed}
    assert {path: each.hashed_bytes for path, each in published.hashed.items()} == sizes
    plan = plan_build(manifest, store, PlanOptions(bits=chosen))
    space = Workspace.of(plan, store, Quiet())
    layer = pack_weights(space, published, {}, lambda space, checkpoint: None)
    # The next build hashes files without receipts first, as the store has results of such files.
    assert plan_build(manifest, store).model == plan.model
    again = find_published(manifest, plan.model)
    assert pack_weights(space, again, {}, lambda space, checkpoint: None) == layer
    assert dict(again.files) == {path.name: digest_of(path.read_bytes()) for path in sizes}


def test_a_link_to_a_file_that_is_gone_is_refused(tmp_path):
    store = DirectoryStore.open(tmp_path / "cache")
    space = Workspace.of(plan_build(planned(tmp_path), store), store, Quiet())
    assert not list(read_layers(space))
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        link = tmp_path / "model" / name
        link.unlink(missing_ok=True)
        link.symlink_to("../blobs/gone")
        with pytest.raises(
            CheckpointError, match=rf"{name}: expected a file, found a link to \.\."
        ):
            list(read_layers(space))
        link.unlink()


def test_a_configuration_that_changes_after_the_plan_is_refused(tmp_path):
    manifest = planned(tmp_path)
    store = DirectoryStore.open(tmp_path / "cache")
    space = Workspace.of(plan_build(manifest, store), store, Quiet())
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    expected = r"model: config\.json: it changed while the build"
    for read in (space.model, lambda: find_published(manifest, space.plan.model)):
        with pytest.raises(CheckpointError, match=expected):
            read()


def test_a_text_that_changes_while_it_decides_rounding_is_refused(tmp_path):
    text, cache = tmp_path / "text.txt", tmp_path / "cache"
    text.write_text("one")
    manifest = planned(tmp_path, dtype='"int4"\nevaluation = "text.txt"')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")

    def change(space, checkpoint):
        time.sleep(0.02)  # a tick of the kernel's clock
        text.write_text("two")

    with pytest.raises(CheckpointError, match=r"text\.txt: it changed while the build read it"):
        packed(manifest, cache, change)
    assert not files_of(cache)


def test_an_answer_that_becomes_another_token_packs_its_row(tmp_path):
    write_causal(tmp_path / "model", answers=True)
    answers = '[encode.answers]\nyes = "y"\nno = "n"'
    encoder_manifest(tmp_path / "m.toml", f"shapes = [[1, 8]]\n{answers}")
    manifest, tokenizer = read_manifest(tmp_path / "m.toml"), tmp_path / "model" / "tokenizer.json"
    rows = []
    for _ in range(2):
        _, layer = packed(manifest, tmp_path / "cache")
        rows.append(load_file(layer.content)["score.weight"])
        content = json.loads(tokenizer.read_text())
        ids = content["model"]["vocab"]
        ids["y"], ids["n"] = ids["n"], ids["y"]
        tokenizer.write_text(json.dumps(content))
    np.testing.assert_array_equal(rows[0], -rows[1])


def ids_of(directory, config, generation):
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return special_ids(directory, 50)


def test_tokens_that_begin_and_end_texts_or_begin_answers_are_ids_that_a_token_has(tmp_path):
    eos, bos, start = "eos_token_id", "bos_token_id", "decoder_start_token_id"
    for config, generation, expected in (
        ({}, {}, ((), None, ())),
        ({eos: 3, bos: 2}, {}, ((3,), 2, ())),
        ({eos: 3}, {eos: [7, 5, 7]}, ((5, 7), None, ())),
        ({eos: 3, bos: 1}, {eos: None}, ((), 1, ())),
        ({eos: 50256, bos: 50256}, {eos: 3, bos: 1}, ((3,), 1, ())),  # of a smaller vocabulary
        # A model that also reads images often gives them with the text model alone.
        ({"text_config": {eos: 4, bos: 5}}, {}, ((4,), 5, ())),
        ({eos: [3], bos: None, "text_config": {eos: 4, bos: 5}}, {}, ((3,), 5, ())),
        # Ids that no token has cannot end a text; -1 would be taken for "no token".
        ({eos: [-1, 3, 50, 2**70], bos: -1}, {}, ((3,), None, ())),
        ({start: 7}, {}, ((), None, (7,))),
        ({start: [9, 3, 9]}, {}, ((), None, (9, 3, 9))),
        ({start: None}, {}, ((), None, ())),
    ):
        assert ids_of(tmp_path, config, generation) == expected
    for name, wrong in ((bos, "2"), (eos, 1.0), (eos, True), (eos, [1, "2"]), (eos, {})):
        for file, both in (
            ("config", ({name: wrong}, {})),
            ("generation_config", ({}, {name: wrong})),
        ):
            with pytest.raises(CheckpointError, match=rf"/{file}\.json: {name}: expected a token"):
                ids_of(tmp_path, *both)
    for name, wrong in ((bos, 50), (eos, 50), (eos, [-1, 2**70]), (start, [3, 50])):
        said = rf"/generation_config\.json: {name}: expected ids below vocab_size = 50, found \d+"
        with pytest.raises(CheckpointError, match=said) as beyond:
            ids_of(tmp_path, {}, {name: wrong})
        assert "null" in beyond.value.hint


def test_beside_a_decoder_of_the_user_the_tokenizer_gives_what_no_file_says(tmp_path):
    assert special_ids(tmp_path, 50, own=True) == ((), None, ())
    added = [{"content": name, "id": at} for name, at in (("<s>", 1), ("</s>", 2), ("<x>", 70))]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "decoder_start_token": "<x>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    assert special_ids(tmp_path, 50, own=True) == ((2,), 1, ())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7]}')
    assert special_ids(tmp_path, 50, own=True) == ((7,), 1, ())
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    assert special_ids(tmp_path, 50, own=True) == ((7,), None, ())
