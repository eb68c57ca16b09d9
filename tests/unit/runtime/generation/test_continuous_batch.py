"""Slots: what comes out of them is the model's, whatever is asked for and whatever goes wrong."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.extent import cases

from prejit.runtime import Sampling, load
from prejit.runtime.errors import ContextError, UsageError
from prejit.runtime.generation import decode
from prejit.runtime.generation.continuous_batch import Batch
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.prefixes import PrefixCache

from .batches import CONTEXT, TEXT, VOCAB, Found, finish, ids, request, step, values

GREEDY = Sampling()
REPEATING = [7, 8, 9, 10] * 4


class Reference:
    """The model itself, run by jax as a whole on every text, and tokens chosen by NumPy."""

    def __init__(self, source):
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from prejit.compiler.checkpoint.checkpoint import open_checkpoint
        from prejit.compiler.models import config_file, model_registry
        from prejit.compiler.models.parameters import with_parameters

        config = config_file.load_config(source)
        graph, state = nnx.split(model_registry.make_decoder(config))
        checkpoint = open_checkpoint(source)
        weights = {name: jnp.asarray(checkpoint.read(name)) for name in checkpoint.names}

        def forward(tokens, length):
            model = nnx.merge(graph, with_parameters(state, weights))
            cache = model.make_cache(1, CONTEXT, "float32")
            return model(tokens, np.zeros(1, np.int32), length, cache)[0][0]

        self._forward = jax.jit(forward)

    def logits(self, text):
        """Of the next token, float32 [V]."""
        tokens = np.zeros((1, CONTEXT), np.int32)
        tokens[0, : len(text)] = text
        return np.asarray(self._forward(tokens, np.array([len(text)], np.int32)))

    def greedy(self, prompt, count, sampling=GREEDY):
        """Tokens by the definitions of the penalties, from the text alone."""
        generated = []
        for _ in range(count):
            logits = self.logits([*prompt, *generated]).astype(np.float64)
            for token in {*prompt, *generated}:
                penalty = sampling.repetition_penalty
                logits[token] *= penalty if logits[token] < 0 else 1 / penalty
            for token in set(generated):
                logits[token] -= sampling.frequency_penalty * generated.count(token)
                logits[token] -= sampling.presence_penalty
            generated.append(int(np.argmax(logits)))
        return generated


@pytest.fixture(scope="module")
def reference(decoder_dir):
    return Reference(decoder_dir.parent / "gpt2")


@pytest.fixture
def sixteen_steps(monkeypatch):
    """As many steps a call as there is room for: else the measured time of a step decides."""
    monkeypatch.setattr(decode, "CALL_SECONDS", 1e9)


def greedy(bundle, prompt, count=8, **options):
    return bundle.generate(prompt, max_new_tokens=count, **{"stop_token_ids": (), **options})


@pytest.mark.parametrize(
    ("length", "count", "reason"),
    [
        *((length, 12, "length") for length in (1, 10, 11, 60)),
        *((length, None, "context") for length in (69, CONTEXT)),
        (CONTEXT, 1, "length"),
    ],
)
def test_greedy_tokens_are_those_of_the_model(bundle, reference, length, count, reason):
    expected = reference.greedy(TEXT[:length], count or CONTEXT - length + 1)
    for lookup in (False, True):
        result = greedy(bundle, TEXT[:length], count, prompt_lookup=lookup)
        assert (list(result.token_ids), result.finish_reason) == (expected, reason)


def test_a_long_prompt_and_a_foreign_prefix_are_refused(bundle, decoder_dir):
    with pytest.raises(ContextError, match=r"at most 72 tokens \(the longest context\), found 73"):
        greedy(bundle, [*TEXT, 1])
    prefix = load(decoder_dir, on_mismatch="error").prefix(TEXT[:5])
    with pytest.raises(UsageError, match="prefix: expected one that this bundle computed"):
        bundle.generate(TEXT[:9], prefix=prefix)


@pytest.mark.parametrize("length", [1, 5])
def test_a_stop_token_may_be_the_first_or_any_of_several(bundle, length):
    tokens = list(greedy(bundle, TEXT[:length], 20).token_ids)
    for stops in ({tokens[0]}, {tokens[9], tokens[5]}):
        first = min(map(tokens.index, stops))
        result = greedy(bundle, TEXT[:length], 20, stop_token_ids=stops, logprobs=2)
        assert (list(result.token_ids), result.finish_reason) == (tokens[:first], "stop")
        assert len(result.logprobs) == result.stats.new_tokens == first


def test_rows_finish_inside_a_call_and_others_go_on(bundle, sixteen_steps):
    batch = bundle.batch(3)
    counts = (1, 5, 18)
    slots = batch.insert(*[request(TEXT[: 4 + n], n) for n in counts])
    calls, found = 0, Found()
    while step(batch, found):
        calls += 1
    assert calls == 3, "what prefill gave, 16 steps, one more"
    for slot, count in zip(slots, counts, strict=True):
        assert tuple(ids(found[slot])) == greedy(bundle, TEXT[: 4 + count], count).token_ids
        assert found[slot][-1].finish_reason == "length"
        assert found[slot][-1].usage.passes <= 17


@pytest.mark.parametrize(("error", "at"), [(KeyboardInterrupt, "prefill"), (OSError, "decode")])
def test_a_program_that_fails_frees_all_slots(bundle, monkeypatch, error, at):
    """Its donated cache is gone: nothing of it may be used again."""
    batch = bundle.batch(3)
    batch.insert(request(TEXT[:12], 20))
    run = DecoderPrograms.run

    def fail(decoder, program, *arguments):
        results = run(decoder, program, *arguments)
        if program.kind == at:
            raise error
        return results

    def go_on():
        batch.insert(request(TEXT[:13], 20))
        for _ in range(3):
            batch.step()

    with monkeypatch.context() as patch:
        patch.setattr(DecoderPrograms, "run", fail)
        with pytest.raises(error):
            go_on()
    assert (batch.free, batch.step()) == (3, [])
    (slot,) = batch.insert(request(TEXT[:12]))
    found = finish(batch)[slot]
    assert tuple(ids(found)) == greedy(bundle, TEXT[:12]).token_ids
    assert found[-1].usage.reused_tokens == 0


@pytest.fixture(scope="module")
def broken_dir(make_decoder, tmp_path_factory, decoder_dir):
    """A decoder that has no numbers for token 47: the sum of its embedding is beyond float32."""
    source, broken = decoder_dir.parent / "gpt2", tmp_path_factory.mktemp("broken")
    tensors = load_file(source / "model.safetensors")
    tensors["transformer.wte.weight"][47] = 3e38
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    (broken / "config.json").write_text((source / "config.json").read_text())
    return make_decoder(broken, batch=(1, 3), prompt=(3, 10), context=(24, 72))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": Sampling(logit_bias={5: -np.inf})},  # forbids one token: others are left
        {"token_mask": lambda _: np.arange(VOCAB) != 5},
    ],
    ids=["plain", "bias", "mask"],
)
def test_no_number_in_one_row_spoils_no_other(broken_dir, options):
    """A row whose logits are no numbers leaves none behind in its slot."""
    broken = load(broken_dir)
    batch = broken.batch(3)
    odd = request([1, 2, 47, 4, 5, 6, 7, 8], 4, **options)
    slots = batch.insert(request([1, 2, 3], 4), odd, request([9], 4))
    found = finish(batch)
    assert [found[slot][-1].finish_reason for slot in slots] == ["length", "nan", "length"]
    for _ in range(2):
        slots = batch.insert(*[request(TEXT[:n], 6) for n in (1, 2, 3)])
        found = finish(batch)
        for slot, n in zip(slots, (1, 2, 3), strict=True):
            assert tuple(ids(found[slot])) == greedy(broken, TEXT[:n], 6).token_ids


def test_a_move_that_cannot_be_costs_no_text(decoder_dir):
    bundle = load(decoder_dir)
    batch = bundle.batch(3)
    (slot,) = batch.insert(request(TEXT[:30], 6))
    found = {}
    step(batch, found)
    assert batch.resize(2) == {slot: slot}  # the same bucket
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle.decoder, "_copy", {})
        with pytest.raises(UsageError, match="copies caches of 3 x 72 to 1 x 72, found none"):
            batch.resize(1)
    assert tuple(ids(finish(batch, found)[slot])) == greedy(bundle, TEXT[:30], 6).token_ids


def test_a_text_that_goes_on_is_computed_for_its_row_alone(bundle):
    """Beside another one. A prefill of the whole batch would compute the new tokens for each row."""
    bundle.prepare()
    batch = bundle.batch(3)
    (first,) = batch.insert(request(TEXT[:20], 4))
    text = [*TEXT[:20], *ids(finish(batch)[first]), 5, 6]
    batch.insert(request([3], 40))
    (slot,) = batch.begin(request(text, 4))
    found = finish(batch)[slot]
    assert (slot, tuple(ids(found))) == (first, greedy(bundle, text, 4).token_ids)
    usage = found[-1].usage
    assert usage.reused_tokens == 23
    prefills = [name for name in usage.programs if name.startswith("prefill")]
    assert [name for name in prefills if name.startswith("prefill/b1-")] == prefills != []


def test_prompts_that_leave_half_computed_leave_no_nan(broken_dir):
    """The programs of a model of the user's own may read what lies behind a text, times zero."""
    batch = load(broken_dir).batch(3)
    batch.insert(request([1, 2, 3], 40))
    slots = batch.begin(*[request([n, 2, 47, *TEXT[:40]], 4) for n in (4, 5)])
    while not any(np.isnan(each).any() for each in values(batch._cache)):
        batch.step(prefill_tokens=9)
    assert batch.entering == 2
    for slot in slots:
        batch.evict(slot)
    assert not any(np.isnan(each).any() for each in values(batch._cache))


def test_a_common_beginning_that_is_nan_is_not_kept(broken_dir):
    """Layers after the first have NaN also before the token, where attention multiplies it by zero."""
    decoder = load(broken_dir).decoder
    decoder.programs.prepare(*(each.name for each in decoder.prefills(1, 72)))
    kept = PrefixCache(decoder, 1 << 20)
    for odd, found in ((47, 0), (46, 20)):
        text = [*TEXT[:18], odd, 5]
        batch = Batch(decoder, 3, prefixes=kept)
        batch.insert(*[request([*text, n, 2], 2) for n in (3, 4)])
        finish(batch)
        prefix = kept.find([*text, 1], 72, ())
        assert found == (0 if prefix is None else len(prefix.token_ids))


def test_no_numbers_are_an_error_of_the_command(broken_dir, ran):
    command = ["generate", broken_dir, "--prompt-ids", "1,47,2", "--max-new-tokens", "3"]
    said = ran(*command, "--json", status=1)
    assert "error[no-numbers]: decoder: expected logits that are numbers, found NaN" in said.err
    assert json.loads(said.out)["finish_reason"] == "nan"


def allow(*tokens):
    mask = np.zeros(VOCAB, np.bool_)
    mask[list(tokens)] = True
    return mask


@pytest.mark.parametrize("length", [1, 5, 30])
def test_only_allowed_tokens_come_and_an_empty_mask_ends_the_text(bundle, reference, length):
    asked = []

    def mask(generated):
        asked.append(list(generated))
        return None if len(generated) == 2 else allow(3, 5 + len(generated), 40)

    result = greedy(bundle, TEXT[:length], 6, token_mask=mask)
    expected = []
    for place in range(6):
        logits = reference.logits([*TEXT[:length], *expected])
        if place != 2:
            logits = np.where(allow(3, 5 + place, 40), logits, -np.inf)
        expected.append(int(np.argmax(logits)))
    assert list(result.token_ids) == expected
    assert all(one == expected[: len(one)] for one in asked)
    assert {len(one) for one in asked} == set(range(6))
    expected = greedy(bundle, TEXT[:length], 8).token_ids
    batch = bundle.batch(3)
    for after in (0, 2):
        nothing = lambda ids, n=after: allow() if len(ids) == n else None  # noqa: E731
        masked = request(TEXT[:length], token_mask=nothing)
        slots = batch.insert(masked, request(TEXT[:length], 8))
        found = finish(batch)
        assert tuple(ids(found[slots[0]])) == expected[:after]
        assert found[slots[0]][-1].finish_reason == "mask"
        assert tuple(ids(found[slots[1]])) == expected


@pytest.mark.parametrize(
    ("says", "error", "after"),
    [
        *((ZeroDivisionError(), ZeroDivisionError, after) for after in (0, 2)),
        (np.ones(3, np.bool_), UsageError, 0),
        (np.ones(VOCAB, np.float32), UsageError, 2),
    ],
)
def test_a_mask_that_fails(bundle, after, says, error):
    def mask(generated):
        if len(generated) != after:
            return None
        if isinstance(says, Exception):
            raise says
        return says

    batch = bundle.batch(3)
    (other,) = batch.insert(request(TEXT[:9], 12))
    got = ids(batch.step())

    def go_on():
        batch.insert(request(TEXT[:5], 6, token_mask=mask))
        while True:
            got.extend(ids([token for token in batch.step() if token.slot == other]))

    with pytest.raises(error):
        go_on()
    assert batch.free == (2 if after == 0 else 1)
    for slot in {0, 1, 2} - {other}:
        batch.evict(slot)
    assert (*got, *ids(finish(batch)[other])) == greedy(bundle, TEXT[:9], 12).token_ids


MANY = {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": -0.3}


@pytest.mark.parametrize("penalty", cases([MANY], [{"repetition_penalty": 1.4}]), ids=str)
def test_penalties_are_by_the_text_however_it_was_computed(bundle, reference, penalty):
    sampling = Sampling(**penalty)
    for prompt in ([5], REPEATING, TEXT[:20]):
        expected = reference.greedy(prompt, 14, sampling)
        session = bundle.session()
        session.generate([*prompt, *expected[:3]], max_new_tokens=2)
        results = [
            greedy(bundle, prompt, 14, **penalty),
            greedy(bundle, prompt, 14, **penalty, prompt_lookup=True),
            greedy(bundle, prompt, 14, **penalty, prefix=bundle.prefix(prompt)),
            session.generate(prompt, max_new_tokens=14, stop_token_ids=(), **penalty),
            *bundle.generate_n(prompt, 3, max_new_tokens=14, stop_token_ids=(), **penalty),
        ]
        assert [list(result.token_ids) for result in results] == [expected] * 7
        assert results[2].stats.reused_tokens == len(prompt) - 1
        batch, found = bundle.batch(3), Found()
        batch.insert(request([6, 6, 6], 3, sampling=Sampling(frequency_penalty=2.0)))
        step(batch, found)
        (slot,) = batch.insert(request(prompt, 14, sampling=sampling))
        while len(ids(found.get(slot, ()))) < 14:
            step(batch, found)
            if batch.free:
                batch.insert(request([5], 2, sampling=Sampling(presence_penalty=2.0)))
        assert ids(found[slot]) == expected


def test_further_continuations_have_the_next_seeds(bundle):
    options, last = {"temperature": 1.3, "max_new_tokens": 12, "stop_token_ids": ()}, 2**64 - 1
    results = bundle.generate_n(TEXT[:20], 7, seed=last - 2, **options)  # in 3 slots
    assert len({result.token_ids for result in results}) == 7
    for result, seed in zip(results, (last - 2, last - 1, last, 0, 1, 2, 3), strict=True):
        assert result.token_ids == bundle.generate(TEXT[:20], seed=seed, **options).token_ids


@pytest.mark.parametrize("lookup", [False, True])
def test_logprobs_are_those_of_the_model_before_its_logits_change(bundle, reference, lookup):
    for prompt in ([5], REPEATING, TEXT[:20]):
        options = {"temperature": 0.7, "seed": 4, "frequency_penalty": 0.5, "logit_bias": {9: 3.0}}
        result = greedy(bundle, prompt, 10, **options, logprobs=3, prompt_lookup=lookup)
        assert [one.token_id for one in result.logprobs] == list(result.token_ids)
        text = list(prompt)
        for one in result.logprobs:
            wide = reference.logits(text).astype(np.float64)
            expected = wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()
            assert one.logprob == pytest.approx(expected[one.token_id], abs=1e-4)
            best = np.argsort(-expected)[:3]
            assert [token for token, _ in one.top] == best.tolist()
            assert [value for _, value in one.top] == pytest.approx(expected[best], abs=1e-4)
            text.append(one.token_id)
    assert greedy(bundle, [5], 2).logprobs is None
    none = greedy(bundle, [5], 2, logprobs=0).logprobs
    assert [one.top for one in none] == [(), ()]


def test_what_prompts_share_is_computed_once_and_a_prefix_serves_what_begins_so(bundle):
    def generated(prompts, count):
        results = bundle.generate_batch(prompts, max_new_tokens=count, stop_token_ids=())
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == greedy(bundle, prompt, count).token_ids
        return [result.stats for result in results]

    stats = generated([TEXT[:n] for n in (30, 1, 5, 11, 60, 2, 24)], 9)
    assert stats[-1].queue_seconds > stats[0].queue_seconds
    assert bundle.generate_batch([]) == []
    with pytest.raises(UsageError, match="sampling: expected 2, one for each prompt; found 1"):
        bundle.generate_batch([[1], [2]], sampling=[Sampling()])
    for length, reused in ((30, [0, 30, 30]), (10, [0, 0, 0])):
        stats = generated([[*TEXT[:length], tail, tail + 1] for tail in range(3)], 4)
        assert [each.reused_tokens for each in stats] == reused
    prefix = bundle.prefix(TEXT[:30])
    for prompt, reused in (
        (TEXT[:40], 30),
        (TEXT[:30], 29),
        (TEXT[:12], 11),
        ([*TEXT[:7], 0, 1, 2], 7),
        ([int(TEXT[0] == 0), 1, 2], 0),
    ):
        plain = greedy(bundle, prompt)
        result = greedy(bundle, prompt, prefix=prefix)
        assert (result.token_ids, result.stats.reused_tokens) == (plain.token_ids, reused)
        together = bundle.generate_batch(
            [prompt, [3], [*TEXT[:30], 1]], max_new_tokens=8, stop_token_ids=(), prefix=prefix
        )
        assert together[0].token_ids == plain.token_ids


def test_figures_add_up(decoder_dir, sixteen_steps):
    bundle = load(decoder_dir, on_mismatch="error")
    first = greedy(bundle, TEXT[:12], 17).stats
    assert (first.prompt_tokens, first.new_tokens, first.reused_tokens) == (12, 17, 0)
    assert first.programs == ("prefill/b1-t10-c72", "prefill/b1-t3-c72", "decode/b1-c72")
    assert "decode/b1-c72" in {report.program for report in first.obtained}
    assert (first.passes, first.drafted_tokens, first.accepted_tokens) == (16, 0, 0)
    assert first.padding == pytest.approx(1 - (12 + 16) / (13 + 16))
    assert 0 <= first.queue_seconds < first.first_token_seconds
    assert 0 < first.prefill_seconds <= first.first_token_seconds
    assert min(first.decode_seconds, first.tokens_per_second) > 0
    assert greedy(bundle, TEXT[:12], 17).stats.obtained == (), "all was ready"
    one = greedy(bundle, [5], 1).stats
    assert (one.tokens_per_second, one.padding, one.passes) == (0.0, 0.0, 1)
    session = bundle.session()
    for length, reused in ((12, 0), (20, 12), (8, 7)):
        stats = session.generate(TEXT[:length], max_new_tokens=2, stop_token_ids=()).stats
        assert stats.reused_tokens == reused
    rows = bundle.generate_batch([[5], [6]], max_new_tokens=16, stop_token_ids=())
    assert [row.stats.padding for row in rows] == pytest.approx([1 / 3, 1 / 3])  # 3 slots


def test_drafts_save_passes_change_no_token_and_do_not_go_round_a_mask(bundle):
    saved = 0
    for start in range(6):
        prompt = [*TEXT[start : start + 4]] * 4
        plain, drafted = (greedy(bundle, prompt, 40, prompt_lookup=on) for on in (False, True))
        assert plain.token_ids == drafted.token_ids
        assert drafted.stats.passes == plain.stats.passes - drafted.stats.accepted_tokens
        saved += drafted.stats.accepted_tokens
    assert saved > 0
    forbidden = greedy(bundle, REPEATING, 3).token_ids[2]
    masked = {"token_mask": lambda _: ~allow(forbidden)}
    result = greedy(bundle, REPEATING, 12, **masked, prompt_lookup=True)
    assert forbidden not in result.token_ids
    assert result.token_ids == greedy(bundle, REPEATING, 12, **masked).token_ids


def test_a_session_does_one_generation_at_a_time(bundle):
    session = bundle.session()
    ask = {"max_new_tokens": 20, "stop_token_ids": ()}
    stream, late = (session.stream(TEXT[:6], **ask) for _ in range(2))
    first = next(stream).token_id
    for other in (lambda: session.generate(TEXT[:6]), lambda: next(late)):
        with pytest.raises(UsageError, match="found one that is generating"):
            other()
    expected = greedy(bundle, TEXT[:6], 20).token_ids
    assert (first, *(piece.token_id for piece in stream)) == expected
    assert session.generate(TEXT[:6], **ask).token_ids == expected


@pytest.mark.parametrize("how", ["close", "drop", "close session"])
def test_a_stream_that_is_left_frees_its_slot(bundle, how):
    session = bundle.session()
    stream = session.stream(TEXT[:6], max_new_tokens=20, stop_token_ids=())
    next(stream)
    if how == "close":
        stream.close()
    if how == "close session":
        session.close()
        with pytest.raises(UsageError, match="found 1 that became free"):
            list(stream)  # it would wait for ever
    del stream
    result = session.generate(TEXT[:6], max_new_tokens=8, stop_token_ids=())
    assert result.token_ids == greedy(bundle, TEXT[:6]).token_ids
    assert result.stats.reused_tokens == (0 if how == "close session" else 5)
