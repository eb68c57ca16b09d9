"""A draft model changes how fast tokens come, and none of them."""

import contextlib
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from tests.encoders import bert_config
from tests.extent import ALL, cases, examples
from tests.lettered import write_lettered
from tests.manifests import write_manifest
from tests.threads import in_threads

from prejit.compiler import build
from prejit.runtime import load
from prejit.runtime.errors import CheckpointError, ManifestError, RejectError
from prejit.runtime.format.bundle_schema import Config
from prejit.runtime.format.checks.seldom_parts import parted
from prejit.runtime.generation import decode
from prejit.runtime.generation.cache_plan import TableBuckets, peak_bytes
from prejit.runtime.generation.draft_model import DraftModel
from prejit.server.engine.engine import Engine

CONTEXTS = (24, 72)
PROMPT = (3, 10) if ALL else (10,)
SIZES = {"batch": (1, 3), "prompt": PROMPT, "context": CONTEXTS, "draft_tokens": 4}


@pytest.fixture(scope="session")
def lettered(tmp_path_factory):
    """A model, and a smaller one with its tokens and other weights."""
    base = tmp_path_factory.mktemp("drafting")
    write_lettered(base / "model")
    write_lettered(base / "small", n_layer=1, n_embd=18)
    return base


@pytest.fixture(scope="session", params=cases(["itself in int8"], others=["another model"]))
def drafted_dir(request, make_decoder, lettered):
    name, dtype = ("model", "int8") if "itself" in request.param else ("small", "float32")
    return make_decoder(lettered / "model", **SIZES, draft=(lettered / name, dtype))


@pytest.fixture(scope="session")
def bundle(drafted_dir):
    return load(drafted_dir, on_mismatch="error")


@pytest.fixture
def waiting(monkeypatch):
    """Programs are loaded when they are wanted: else a thread loads them while the text goes on."""
    monkeypatch.setattr(DraftModel, "_is_loaded", lambda model, context, *names: True)


def prompts(bundle, seed, count):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, CONTEXTS[-1], count)
    return [rng.integers(0, bundle.config.decoder.vocab_size, n).tolist() for n in lengths]


def same(by, prompt, plain=None, **options):
    """Check that a draft model changes nothing of what is written, and return how much it had right."""
    options = {"stop_token_ids": (), **options}
    found = by.generate(prompt, **options)
    alone = (plain or by).generate(prompt, draft=False, **options)
    assert found.token_ids == alone.token_ids
    assert (found.text, found.finish_reason) == (alone.text, alone.finish_reason)
    assert found.logprobs == alone.logprobs
    assert alone.stats.drafted_tokens == 0
    assert found.stats.accepted_tokens <= found.stats.drafted_tokens
    return found.stats


def test_tokens_are_the_same_up_to_the_end_of_the_context(bundle, waiting):
    drafted = accepted = 0
    for prompt in prompts(bundle, 0, examples(12, 60)):
        stats = same(bundle, prompt)
        drafted, accepted = drafted + stats.drafted_tokens, accepted + stats.accepted_tokens
    assert drafted
    if bundle.config.draft.cache == bundle.config.decoder.cache:
        assert accepted > drafted / 2, "the same model in int8 is right most of the time"


OPTIONS = (
    {"temperature": 0.9},
    {"temperature": 1.5, "top_p": 0.8, "top_k": 20},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"logit_bias": {3: 4.0, 7: -np.inf}, "presence_penalty": 1.0},
    {"logprobs": 3},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_are_the_same_with_each_option(bundle, waiting, options):
    drafted = 0
    for seed, prompt in enumerate(prompts(bundle, 1, examples(4, 16))):
        drafted += same(bundle, prompt[:20], max_new_tokens=30, seed=seed, **options).drafted_tokens
    assert drafted


def test_the_draft_draws_the_random_numbers_of_the_model(lettered, bundle, waiting):
    if bundle.config.draft.cache != bundle.config.decoder.cache:
        pytest.skip("another model would draw other tokens")
    stats = same(bundle, [1, 2, 3], max_new_tokens=60, temperature=1.0, seed=5)
    assert stats.accepted_tokens > stats.drafted_tokens / 2


def test_texts_end_where_they_would_end(bundle, waiting):
    whole = bundle.generate("ab", max_new_tokens=40, stop_token_ids=(), draft=False)
    for place in (1, 2, 5, 11):
        same(bundle, "ab", max_new_tokens=40, stop_token_ids=[whole.token_ids[place]])
        same(bundle, "ab", max_new_tokens=place)
        same(bundle, "ab", max_new_tokens=40, stop=whole.text[place : place + 2])
    same(bundle, "ab", max_new_tokens=12, min_new_tokens=6, stop_token_ids=whole.token_ids[2:3])
    pieces = list(bundle.stream("ab", max_new_tokens=40, stop_token_ids=()))
    assert tuple(piece.token_id for piece in pieces) == whole.token_ids


def test_a_mask_several_rows_and_prompt_lookup_have_no_draft(bundle, waiting):
    even = np.arange(bundle.config.decoder.vocab_size) % 2 == 0
    stats = same(bundle, [2, 4, 6], max_new_tokens=12, token_mask=lambda _: even)
    assert stats.drafted_tokens == 0
    options = {"max_new_tokens": 20, "stop_token_ids": ()}
    two = [[1, 2], [3, 4, 5]]
    rows = bundle.generate_batch(two, **options)
    assert [row.stats.drafted_tokens for row in rows] == [0, 0]
    alone = [bundle.generate(prompt, **options).token_ids for prompt in two]
    assert [row.token_ids for row in rows] == alone
    found, plain = (
        bundle.generate([7, 8, 9] * 4, **options, prompt_lookup=True, **draft)
        for draft in ({}, {"draft": False})
    )
    assert found.token_ids == plain.token_ids


def test_a_session_goes_on_with_what_the_draft_model_has_read(bundle, waiting):
    session, plain = bundle.session(), bundle.session()
    text = prompts(bundle, 2, 1)[0][:9]
    for length in (8, 8, 8):
        stats = same(session, text, plain, max_new_tokens=length)
        assert stats.drafted_tokens
        written = bundle.generate(text, max_new_tokens=length, stop_token_ids=()).token_ids
        text = [*text, *written, 5]
    same(session, text[:4], plain, max_new_tokens=9)
    session.close()
    same(session, text, plain, max_new_tokens=9)


def test_a_text_goes_on_while_its_programs_are_loaded(drafted_dir, monkeypatch):
    """Without `waiting`: nothing waits for a draft, and nothing is drafted before it is loaded."""
    fresh = load(drafted_dir, on_mismatch="error")
    monkeypatch.setattr(fresh.decoder.draft.programs, "obtained", dict)
    assert same(fresh, [1, 2, 3], max_new_tokens=8).drafted_tokens == 0


def test_an_engine_drafts_for_a_request_that_is_alone_and_threads_draft_apart(bundle, waiting):
    texts, options = prompts(bundle, 3, 4), {"max_new_tokens": 12, "stop_token_ids": ()}
    wanted = [bundle.generate(each, **options, draft=False).token_ids for each in texts]
    with contextlib.closing(Engine(bundle, slots=3)) as engine:
        lone = [engine.submit(each, **options).result().token_ids for each in texts]
        jobs = [engine.submit(each, **options) for each in texts]
        assert lone == [job.result().token_ids for job in jobs] == wanted

    def run(place):
        assert bundle.generate(texts[place], **options).token_ids == wanted[place]

    in_threads(4, run)


def test_the_cache_of_the_draft_model_may_be_longer_than_that_of_the_batch(bundle, waiting):
    """A batch without rows that changes its size begins with a short cache again."""
    batch, options = bundle.batch(1), {"max_new_tokens": 12, "stop_token_ids": ()}
    for length in (40, 4):
        prompt, found = list(range(length, 0, -1)), []
        batch.insert(bundle.request(prompt, **options))
        while tokens := batch.step():
            found += [token.token_id for token in tokens]
        assert found == [*bundle.generate(prompt, **options, draft=False).token_ids]
        batch.resize(3)
        batch.resize(1)


@pytest.mark.measured_drafts
def test_drafts_of_a_model_as_slow_as_the_model_are_given_up(bundle, monkeypatch):
    monkeypatch.setattr(decode, "CALL_SECONDS", 1e-9)
    for _ in range(6):
        same(bundle, [1, 2, 3], max_new_tokens=60)
    stats = bundle.generate([1, 2, 3], max_new_tokens=60, stop_token_ids=()).stats
    assert stats.drafted_tokens < 60


def test_memory_counts_the_caches_of_the_draft_model(bundle):
    config = bundle.config
    whole = TableBuckets.of(config, config.decoder)
    assert whole.draft is not None
    assert (whole.draft.batches, whole.draft.contexts) == ((1,), CONTEXTS)
    without = TableBuckets(whole.decoder, whole.batches, whole.contexts, whole.cache)
    more = peak_bytes(whole, 3, 72, 1) - peak_bytes(without, 3, 72, 1)
    assert more > 0


def test_a_draft_model_must_fit_the_model(lettered, tmp_path):
    """Each mistake is found before anything compiles, and its message names both files."""
    bert = bert_config(vocab_size=48, hidden_size=24, max_position_embeddings=64)
    small = lettered / "small"
    drafts = {name: tmp_path / name for name in ("other", "none", "vocabulary", "encoder", "short")}
    for path in drafts.values():
        shutil.copytree(small, path)
    tokenizer = json.loads((small / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = list(vocab)[5:7]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (drafts["other"] / "tokenizer.json").write_text(json.dumps(tokenizer))
    (drafts["none"] / "tokenizer.json").unlink()
    write_lettered(drafts["vocabulary"], n_layer=1, vocab_size=400)
    (drafts["encoder"] / "config.json").write_text(json.dumps(bert))
    write_lettered(drafts["short"], n_layer=1, n_positions=64)
    for name, words in {
        "other": ["other/tokenizer.json", "model/tokenizer.json", f"{a!r} is"],
        "none": ["none/tokenizer.json: expected the tokenizer of", "found no file"],
        "vocabulary": ["draft.source: expected", "model/config.json", "found 400 in"],
        "encoder": ["encoder/config.json"],
        "short": ["expected at most 64", "short/config.json", "found 72"],
    }.items():
        more = f"draft_tokens = 2\n[draft]\nsource = {json.dumps(name)}"
        sizes = {"prompt": (8,), "context": (72,), "generate": more}
        manifest = write_manifest(tmp_path / f"{name}.toml", lettered / "model", **sizes)
        with pytest.raises((ManifestError, CheckpointError)) as error:
            build(manifest, tmp_path / "out", cache=tmp_path / "cache", quiet=True)
        assert all(word in str(error.value) for word in words), (name, str(error.value))


def test_forged_tables_are_refused(bundle):
    config: Config = bundle.config
    plain, draft = parted(config)
    assert plain.draft is None
    assert {p.kind for p in draft.programs} == {"prefill", "decode", "copy"}
    small = replace(config.draft, vocab_size=7)
    lone = tuple(p for p in config.programs if p.name != "draft-decode/b1-c24")
    unverified = tuple(p for p in config.programs if p.kind != "verify")
    state = replace(config.draft, cache=('["cache",0] float32[1,4] ~batch,',))
    for forged, message in (
        (replace(config, draft=None), "expected 'draft'"),
        (replace(config, decoder=None), "expected 'decoder'"),
        (replace(config, draft=small), "tokens of the decoder"),
        (replace(config, draft=state), "positions alone"),
        (replace(config, programs=lone), "contexts of the decoder"),
        (replace(config, programs=unverified), "verify drafts"),
    ):
        with pytest.raises((ValueError, RejectError), match=message):
            parted(forged)
