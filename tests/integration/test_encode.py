"""An encoder of 7 shapes, built through the command line and run from its bundle."""

import dataclasses
import json
import math
import re
import time

import numpy as np
import pytest
from tests.encoders import write_encoder
from tests.extent import cases
from tests.manifests import encoder_manifest
from tokenizers import normalizers

from prejit.runtime import FallbackWarning, Fingerprint, TruncationWarning, UsageError, load
from prejit.runtime.encoding.buckets import fitting, partition
from prejit.runtime.errors import ClosedError, ContextError, DeadlineError
from prejit.server.engine.engine import Engine

SHAPES = [*([1, length] for length in (16, 32, 512)), [2, 32], [8, 32], [8, 128], [64, 128]]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CLS, SEP = 2, 3


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny sentence encoder with a tokenizer of letters."""
    directory = tmp_path_factory.mktemp("encoder") / "model"
    sizes = {"num_hidden_layers": 2, "vocab_size": 40, "max_position_embeddings": 600}
    modules = {"pooling": ("mean_tokens",), "normalize": True}
    tokenizer = write_encoder(directory, changes=sizes, **modules)
    said = json.dumps({"max_seq_length": 520, "do_lower_case": False})
    (directory / "sentence_bert_config.json").write_text(said)
    prompts = json.dumps({"prompts": {"query": "q ", "document": ""}})
    (directory / "config_sentence_transformers.json").write_text(prompts)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.enable_truncation(6)  # as published ones have it; sentence-transformers overrides it
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def built(run, model):
    manifest = encoder_manifest(model.parent / "encoder.toml", f"shapes = {SHAPES}", source=model)
    run("build", manifest, "-o", manifest.parent / "out", quick=True)
    return manifest.parent / "out" / "encoder"


@pytest.fixture(scope="session")
def bundle(built):
    return load(built, on_mismatch="error")


@pytest.fixture(scope="session")
def module(model):
    """The flax module itself: token ids of one sentence to its embedding, without padding."""
    import jax
    from flax import nnx

    from prejit.compiler.checkpoint.checkpoint import open_encoder
    from prejit.compiler.models import config_file, model_registry
    from prejit.compiler.models.parameters import with_parameters

    checkpoint = open_encoder(model)
    graph, state = nnx.split(model_registry.make_encoder(config_file.load_encoder(model)))
    weights = {name: checkpoint.read(name) for name in checkpoint.names}

    @jax.jit
    def run(weights, tokens):
        length = jax.numpy.full(1, tokens.shape[1])
        return nnx.merge(graph, with_parameters(state, weights))(tokens, length)

    return lambda ids: np.asarray(run(weights, np.array([ids], np.int32)))[0]


def ids_of(text):
    """What the tokenizer makes of words of one letter."""
    return [CLS, *(4 + LETTERS.index(word) for word in text.split()), SEP]


def assert_same(found, expected):
    """The first calls take buckets that are loaded, and buckets differ in the last bits of sums."""
    np.testing.assert_allclose(found, expected, atol=1e-6)


COMMAND = "encode sentences with `prejit encode` or `Bundle.encode`"
PROMPTS = "prompt_name: expected 'document', 'query'; found 'qery'"
PROGRAM = "encode/b1-t16/embed"
WRONG_USES = (
    (lambda b: b.encode("a", prompt_name="qery"), PROMPTS, ""),
    (lambda b: b.encode("a", dimensions=13), "dimensions: expected 1 to 12, found 13", ""),
    (lambda b: b.encode(5), "sentences: expected a text or a list of texts, found 5", ""),
    (lambda b: b.encode([[40]]), "0 to 39", ""),
    (lambda b: b.generate("a"), "no decoder", COMMAND),
    (lambda b: b.call(PROGRAM), "no program", COMMAND),
    (lambda b: Engine(b).call(PROGRAM), "no program", COMMAND),
)


def test_prompts_dimensions_texts_and_token_ids_are_taken_or_refused(bundle, module):
    expected = bundle.encode("q a b")
    assert_same(bundle.encode("a b", prompt_name="query"), expected)
    assert_same(bundle.encode("a b"), bundle.encode("a b", prompt_name=""))
    short = bundle.encode("q a b", dimensions=5)
    assert_same(short, expected[:, :5] / np.linalg.norm(expected[:, :5]))
    assert bundle.encode([]).shape == (0, 12)
    found = bundle.encode(["", [CLS, 7, SEP]])
    assert np.abs(found - np.stack([module([CLS, SEP]), module([CLS, 7, SEP])])).max() <= 1e-5
    assert_same(bundle.encode("a sentence"), bundle.encode(["a sentence"]))
    for use, message, hint in WRONG_USES:
        with pytest.raises(UsageError, match=message) as caught:
            use(bundle)
        assert hint in (caught.value.hint or "")


def test_embeddings_are_those_of_the_module_in_the_order_of_the_sentences(bundle, module):
    words = [3, 0, 14, 15, 3, 30, 31, 5, 5, 510]  # each length is a compilation of the module
    texts = [
        " ".join(LETTERS[(n * 7 + place) % 26] for n in range(count))
        for place, count in enumerate(words)
    ]
    encoded = bundle.encode_batch(texts)
    expected = np.stack([module(ids_of(text)) for text in texts])
    assert np.abs(encoded.embeddings - expected).max() <= 1e-5
    assert np.abs(expected[0] - expected[4]).max() > 1e-3, "one embedding for all would pass"
    assert encoded.embeddings.dtype == np.float32
    stats = encoded.stats
    assert (stats.sentences, stats.tokens, stats.truncated) == (10, sum(words) + 20, 0)
    sizes = {shape: math.prod(map(int, shape.split("x"))) for shape in stats.buckets}
    computed = sum(sizes[shape] * runs for shape, runs in stats.buckets.items())
    assert stats.padding == pytest.approx(1 - stats.tokens / computed)


def test_every_shape_gives_the_same_embeddings(bundle, module):
    ids = ids_of("a b c d")
    expected = module(ids)
    encoder = bundle.encoder
    assert sorted([b.batch, b.length] for b in encoder.buckets) == sorted(SHAPES)
    costs = {str(bucket): bucket.cost for bucket in encoder.buckets}
    assert costs["64x128"] > costs["1x16"] > 0, "they decide which shapes run"
    embedded = set()
    for bucket in encoder.buckets:
        tokens, length = (
            np.full((bucket.batch, bucket.length), 9, np.int32),
            np.zeros(bucket.batch, np.int32),
        )
        tokens[-1, : len(ids)], length[-1] = ids, len(ids)
        found = encoder._run(bucket, tokens, length, encoder.encoder.layers)[0][-1]
        assert np.abs(found - expected).max() <= 1e-5, str(bucket)
        embed = bucket.programs[0]
        inputs = [*encoder._weights(embed), encoder._device.put(tokens)]
        (hidden,) = encoder.programs[embed].run(inputs)
        embedded.add(np.asarray(hidden)[-1, : len(ids)].tobytes())
    assert len(embedded) == 1, "int8 layers make a step of what differs by a last digit"


def test_after_a_sleep_short_sentences_get_their_shape_again(built):
    """They ran in the first shape that was loaded again, for good: each other one seemed to need loading."""
    with load(built, on_mismatch="error") as loaded:
        short = [ids_of("a b")]
        loaded.encode_batch(short)
        ((best, *_),) = partition([len(short[0])], fitting(loaded.encoder.buckets))
        loaded.sleep()
        assert loaded.encode_batch([ids_of(" ".join("abcd" * 20))] * 8).stats.buckets
        ends = time.monotonic() + 20
        while (found := loaded.encode_batch(short).stats.buckets) != {str(best): 1}:
            assert time.monotonic() < ends, found


@pytest.fixture(scope="session")
def packed(run, model):
    """Bundles with packed batches in int8, and in float32 as well."""
    found = {}
    for dtype in cases(["int8"], others=["float32"]):
        keys = "shapes = [[1, 16], [2, 128], [16, 128]]\npacked = [256, 64]"
        stored = f'dtype = "{dtype}"'
        manifest = model.parent / f"{dtype}.toml"
        encoder_manifest(manifest, keys, source=model, model=stored)
        run("build", manifest, "-o", model.parent / "out", quick=True)
        found[dtype] = load(model.parent / "out" / dtype, on_mismatch="error")
    return found


def run_rows(encoder, bucket, rows):
    """Run one bucket; what no row has is a token that must not matter."""
    tokens = np.full((bucket.batch, bucket.length), 9, np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    lengths = np.zeros(bucket.most, np.int32)
    lengths[: len(rows)] = [*map(len, rows)]
    return encoder._run(bucket, tokens, lengths, encoder.encoder.layers)[0][: len(rows)]


@pytest.mark.thorough
def test_packed_sentences_are_what_they_are_alone_and_padded(packed, module):
    words = [0, 3, 9, 40, 61, 14, 15, 100, 1, 30, 2]
    texts = [" ".join(LETTERS[(n * 5 + count) % 26] for n in range(count)) for count in words]
    ids = [ids_of(text) for text in texts]
    for dtype, bundle in packed.items():
        encoder, bound = bundle.encoder, 1e-5 if dtype == "float32" else 1e-6
        found = bundle.encode_batch(texts)
        assert "packed 256" in found.stats.buckets
        assert 0 < found.stats.padding < 0.3
        results = []
        for only in ({0}, {64, 256}):  # each alone, padded and packed
            some = [b for b in encoder.buckets if (b.length in only if b.sentences else 0 in only)]
            fitting = ([b for b in some if b.length >= len(each)] for each in ids)
            least = [min(each, key=lambda b: b.length) for each in fitting]
            rows = [run_rows(encoder, *row) for row in zip(least, ([i] for i in ids), strict=True)]
            results.append(np.concatenate(rows))
        [grouped] = (b for b in encoder.buckets if b.batch == 16)  # layers take 8 rows at a time
        results.append(run_rows(encoder, grouped, ids))
        for other in results:
            assert np.abs(other - found.embeddings).max() <= bound
        if dtype == "float32":
            expected = np.stack([module(each) for each in ids])
            assert np.abs(found.embeddings - expected).max() <= 1e-5
        engine = Engine(bundle)
        shared = engine.encode(texts)
        np.testing.assert_allclose(shared.embeddings, found.embeddings, rtol=0, atol=bound)
        (metrics,) = engine.metrics().requests
        engine.close()
        positions = sum(
            math.prod(map(int, name.removeprefix("packed ").split("x"))) * runs
            for name, runs in shared.stats.buckets.items()
        )
        assert metrics.useful_positions < metrics.computed_positions == positions


def test_a_longer_sentence_than_every_shape_is_cut_off_with_one_warning_or_refused(bundle, module):
    text = "a b c d " * 150
    cut = [*ids_of(text)[:511], SEP]
    with pytest.warns(TruncationWarning, match="2 of 3 .* 512 tokens, the longest shape") as told:
        bundle.encode([text, "a", text])
    assert [each.filename for each in told] == [__file__]
    with pytest.warns(TruncationWarning) as told:
        encoded = bundle.encode_batch([text, "a", text])
    assert [each.filename for each in told] == [__file__]
    assert encoded.stats.truncated == 2
    assert np.abs(encoded.embeddings[[0, 2]] - module(cut)).max() <= 1e-5
    with pytest.raises(ContextError, match="at most 512 tokens"):
        bundle.encode([text], on_too_long="error")


def test_callers_of_an_engine_share_runs_and_get_their_own_embeddings(bundle):
    engine = Engine(bundle)
    calls = [["a b", "c " * 40], [], "d", ["e f g " * 30] * 70, [[CLS, 7, SEP]]]
    lone = engine.encode(calls[0])
    assert_same(lone.embeddings, bundle.encode(calls[0]))
    with engine._encoding._lane.alone(0):  # the encoder is busy, so they collect
        futures = [engine.submit_encode(call) for call in calls]
        with pytest.raises(UsageError, match="0 to 39"):
            engine.submit_encode([[40]])
        with pytest.raises(ContextError):
            engine.submit_encode(["a " * 600], on_too_long="error")
        with pytest.raises(DeadlineError):
            engine.encode("a", timeout=0.01)
        with pytest.warns(TruncationWarning) as told:
            cut = engine.submit_encode("a " * 600)
        assert told[0].filename == __file__
    for call, future in zip(calls, futures, strict=True):
        found = future.result(60)
        assert found.embeddings.shape == (len([call] if isinstance(call, str) else call), 12)
        assert np.abs(found.embeddings - bundle.encode(call)).max(initial=0) <= 1e-5
    assert futures[0].result().stats.tokens == 4 + 42
    assert futures[3].result().stats.sentences == 70
    assert cut.result(60).stats.truncated == 1
    (found_metrics,) = engine.metrics().requests
    assert (found_metrics.program, found_metrics.succeeded) == ("encode", 1 + 1 + len(calls))
    assert (found_metrics.finished["deadline"], found_metrics.failed) == (1, 1)
    assert found_metrics.rows == 2 + 2 + 1 + 70 + 1 + 1
    bucket_rows = found_metrics.rows + found_metrics.padded_rows
    assert bucket_rows <= 64 * found_metrics.runs
    assert 0 < found_metrics.useful_positions < found_metrics.computed_positions
    engine.close()
    with pytest.raises(ClosedError):
        engine.encode("a")
    assert_same(bundle.encode(calls[0]), lone.embeddings)


def test_a_fresh_process_compiles_nothing_and_may_end_while_loading(run, python, built, bundle):
    done = run("encode", built, "a b c", "", "--on-mismatch", "error", "--json")
    told = json.loads(done.stdout)
    assert np.abs(np.array(told["embeddings"]) - bundle.encode(["a b c", ""])).max() <= 1e-5
    assert {report["source"] for report in told["stats"]["obtained"]} <= {"loaded"}
    seconds = {n: s for n, s in told["start"].items() if n.endswith("_seconds")}
    assert min(seconds["loading_seconds"], seconds["first_run_seconds"]) > 0
    assert seconds.pop("total_seconds") == pytest.approx(sum(seconds.values()))
    shown = run("encode", built, "a b c", "--stats").stderr
    assert re.search(r"^start \d+ ms: process \d+, imports \d+, ", shown, re.M)
    # Nor is jax imported, or the process torn out of XLA by its end.
    python("import sys; from prejit.runtime import load; load(sys.argv[1])", built)


def test_another_machine_compiles_what_it_needs_alike(built, bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(tmp_path))
    other = dataclasses.replace(Fingerprint.current(), jaxlib="0.0.1")
    with pytest.warns(FallbackWarning):
        fallen = load(built, fingerprint=other, while_compiling="smaller")
    texts = ["a b c", "d " * 20]
    assert np.abs(fallen.encode(texts) - bundle.encode(texts)).max() <= 1e-5
    compiled = [r for r in fallen.report() if r.source == "compiled"]
    # Three programs of each shape, as far as they were ready.
    assert 2 <= len(compiled) <= 6, "only the shapes that serve these sentences"
    # What is ready serves a sentence whose own shape is not.
    used = next(iter(fallen.encode_batch(["a"]).stats.buckets))
    assert used in {"1x16", "1x32", "2x32"}
