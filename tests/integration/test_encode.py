"""An encoder of 7 shapes, built through the command line and run from its bundle."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from tests.encoders import write_encoder
from tests.extent import cases
from tests.manifests import encoder_manifest
from tokenizers import normalizers

from prejit.runtime import (
    ClosedError,
    ContextError,
    DeadlineError,
    FallbackWarning,
    Fingerprint,
    TruncationWarning,
    UsageError,
    load,
)
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


def test_prompts_and_dimensions_are_those_of_the_model(bundle):
    expected = bundle.encode("q a b")
    np.testing.assert_array_equal(bundle.encode("a b", prompt_name="query"), expected)
    np.testing.assert_array_equal(bundle.encode("a b"), bundle.encode("a b", prompt_name=""))
    short = bundle.encode("q a b", dimensions=5)
    np.testing.assert_allclose(short, expected[:, :5] / np.linalg.norm(expected[:, :5]), rtol=1e-6)
    with pytest.raises(
        UsageError, match=r"prompt_name: expected 'document', 'query'; found 'qery'"
    ):
        bundle.encode("a", prompt_name="qery")
    with pytest.raises(UsageError, match="dimensions: expected 1 to 12, found 13"):
        bundle.encode("a", dimensions=13)


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
    computed = sum(
        int(batch) * int(length) * runs
        for shape, runs in stats.buckets.items()
        for batch, length in [shape.split("x")]
    )
    assert stats.padding == pytest.approx(1 - stats.tokens / computed)


def test_every_shape_gives_the_same_embeddings(bundle, module):
    ids = ids_of("a b c d")
    expected = module(ids)
    encoder = bundle.encoder
    assert [[b.batch, b.length] for b in encoder.buckets] == sorted(SHAPES)
    costs = {str(bucket): bucket.cost for bucket in encoder.buckets}
    assert costs["64x128"] > costs["1x16"] > 0, "they decide which shapes run"
    embedded = set()
    for bucket in encoder.buckets:
        tokens = np.full((bucket.batch, bucket.length), 9, np.int32)
        tokens[-1, : len(ids)] = ids
        length = np.zeros(bucket.batch, np.int32)
        length[-1] = len(ids)
        found = encoder._run(bucket, tokens, length, encoder.encoder.layers)[0][-1]
        assert np.abs(found - expected).max() <= 1e-5, str(bucket)
        embed = bucket.programs[0]
        inputs = [*encoder._weights(embed), encoder._device.put(tokens)]
        (hidden,) = encoder.programs[embed].run(inputs)
        embedded.add(np.asarray(hidden)[-1, : len(ids)].tobytes())
    assert len(embedded) == 1, "int8 layers make a step of what differs by a last digit"


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


@pytest.mark.thorough
def test_packed_sentences_are_what_they_are_alone_and_padded(packed, module):
    words = [0, 3, 9, 40, 61, 14, 15, 100, 1, 30, 2]
    texts = [" ".join(LETTERS[(n * 5 + count) % 26] for n in range(count)) for count in words]
    module_says = np.stack([module(ids_of(text)) for text in texts])
    for dtype, bundle in packed.items():
        encoder, ids = bundle.encoder, [ids_of(text) for text in texts]
        found = bundle.encode_batch(texts)
        assert "packed 256" in found.stats.buckets
        assert 0 < found.stats.padding < 0.3
        results = [found.embeddings]
        for only in ({0}, {64, 256}):  # each alone, padded and packed
            some = [b for b in encoder.buckets if (b.length in only if b.sentences else 0 in only)]
            rows = []
            for each in ids:
                bucket = min((b for b in some if b.length >= len(each)), key=lambda b: b.length)
                tokens = np.full((bucket.batch, bucket.length), 9, np.int32)
                tokens[0, : len(each)] = each
                length = np.zeros(bucket.most, np.int32)
                length[0] = len(each)
                rows.append(encoder._run(bucket, tokens, length, encoder.encoder.layers)[0][0])
            results.append(np.stack(rows))
        [grouped] = (
            b for b in encoder.buckets if b.batch == 16
        )  # its layers take 8 rows at a time
        tokens = np.full((16, 128), 9, np.int32)
        for row, each in enumerate(ids):
            tokens[row, : len(each)] = each
        length = np.array([*map(len, ids), *[0] * (16 - len(ids))], np.int32)
        together = encoder._run(grouped, tokens, length, encoder.encoder.layers)[0]
        results.append(together[: len(ids)])
        bound = 1e-5 if dtype == "float32" else 1e-6
        for other in results[1:]:
            assert np.abs(other - results[0]).max() <= bound
        if dtype == "float32":
            assert np.abs(found.embeddings - module_says).max() <= 1e-5
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


def test_nothing_and_token_ids_and_an_empty_text_are_taken(bundle, module):
    assert bundle.encode([]).shape == (0, 12)
    found = bundle.encode(["", [CLS, 7, SEP]])
    assert np.abs(found - np.stack([module([CLS, SEP]), module([CLS, 7, SEP])])).max() <= 1e-5
    np.testing.assert_array_equal(bundle.encode("a sentence"), bundle.encode(["a sentence"]))
    with pytest.raises(UsageError, match="sentences: expected a text or a list of texts, found 5"):
        bundle.encode(5)
    with pytest.raises(UsageError, match="0 to 39"):
        bundle.encode([[40]])


def test_a_longer_sentence_than_every_shape_is_cut_off_with_one_warning_or_refused(bundle, module):
    text = "a b c d " * 150
    cut = [*ids_of(text)[:511], SEP]
    with pytest.warns(TruncationWarning, match="2 of 3 .* 512 tokens, the longest shape") as told:
        bundle.encode([text, "a", text])
    assert len(told) == 1
    assert told[0].filename == __file__
    with pytest.warns(TruncationWarning):
        encoded = bundle.encode_batch([text, "a", text])
    assert encoded.stats.truncated == 2
    assert np.abs(encoded.embeddings[[0, 2]] - module(cut)).max() <= 1e-5
    with pytest.raises(ContextError, match="at most 512 tokens"):
        bundle.encode([text], on_too_long="error")


def test_callers_of_an_engine_share_runs_and_get_their_own_embeddings(bundle):
    engine = Engine(bundle)
    calls = [["a b", "c " * 40], [], "d", ["e f g " * 30] * 70, [[CLS, 7, SEP]]]
    lone = engine.encode(calls[0])
    np.testing.assert_array_equal(lone.embeddings, bundle.encode(calls[0]))
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
    np.testing.assert_array_equal(bundle.encode(calls[0]), lone.embeddings)


def test_a_fresh_process_compiles_nothing_and_may_end_while_shapes_are_loaded(
    run, python, built, bundle
):
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


def test_another_machine_compiles_what_it_needs_and_gives_the_same(
    built, bundle, tmp_path, monkeypatch
):
    monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(tmp_path))
    other = dataclasses.replace(Fingerprint.current(), jaxlib="0.0.1")
    with pytest.warns(FallbackWarning):
        fallen = load(built, fingerprint=other, while_compiling="smaller")
    texts = ["a b c", "d " * 20]
    assert np.abs(fallen.encode(texts) - bundle.encode(texts)).max() <= 1e-5
    compiled = [r for r in fallen.report() if r.source == "compiled"]
    assert 2 <= len(compiled) <= 5, "only the shapes that serve these sentences"
    # What is ready serves a sentence whose own shape is not.
    used = next(iter(fallen.encode_batch(["a"]).stats.buckets))
    assert used in {"1x16", "1x32", "2x32"}


def test_other_uses_of_an_encoder_name_the_command_that_encodes(bundle):
    uses = [
        lambda: bundle.generate("a"),
        lambda: bundle.call("encode/b1-t16/embed"),
        lambda: Engine(bundle).call("encode/b1-t16/embed"),
    ]
    for use in uses:
        with pytest.raises(UsageError, match=r"no decoder|no program") as caught:
            use()
        assert caught.value.hint == "encode sentences with `prejit encode` or `Bundle.encode`"
