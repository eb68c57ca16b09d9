"""Sampling on the device against a plain float64 NumPy account of what transformers and OpenAI do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.extent import examples, one_in

from prejit.compiler.lowering import sampling_programs as programs
from prejit.compiler.lowering.sampling_programs import TOP_LOGPROBS, record
from prejit.runtime.generation.options import Sampling
from prejit.runtime.generation.sampling_arguments import arrays, history_row

V = 40
PROMPT = [1, 2, 2, 5, 30]
GENERATED = [5, 7, 7, 7, 31]
DRAWS = 20_000
sampled = jax.jit(programs.sample)


@jax.jit
def kept(logits, inputs, history):
    adjusted = programs._penalised(logits, inputs, history) + inputs.bias
    return programs._kept(adjusted, inputs)


def inputs_of(rows, vocab, logprobs=0):
    found = {"bias": np.zeros((len(rows), vocab), np.float32)}
    given = arrays(rows, vocab, [logprobs] * len(rows)).items()
    return programs.SamplingInputs(**found | {k: v for k, v in given if v is not None})


def choose(logits, rows, *, prompt=(), generated=(), position=None, logprobs=0):
    """Of logits [B, V]; the text is the same in every row."""
    count, vocab = logits.shape
    history = np.tile(history_row(prompt, generated, vocab), (count, 1))
    at = np.zeros(count) if position is None else np.asarray(position)
    inputs = inputs_of(rows, vocab, logprobs)
    chosen = sampled(jnp.asarray(logits, jnp.float32), inputs, history, at.astype(np.int32))
    return programs.Chosen(*(np.asarray(value) for value in chosen))


def reference(logits, sampling, prompt, generated):
    """The probability of each token, and how near (in probability) the nearest cut was to going otherwise."""
    scores = logits.astype(np.float64)
    for token in {*prompt, *generated}:
        penalty = float(np.float32(sampling.repetition_penalty))
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    for token in set(generated):
        scores[token] -= list(generated).count(token) * sampling.frequency_penalty
        scores[token] -= sampling.presence_penalty
    for token, value in dict(sampling.logit_bias).items():
        scores[token] += value
    if sampling.temperature == 0:
        ordered = np.sort(scores)
        return np.eye(len(scores))[np.argmax(scores)], float(ordered[-1] - ordered[-2])
    scores /= sampling.temperature
    margin = np.inf
    order = np.argsort(-scores, kind="stable")
    if 0 < sampling.top_k < len(order):
        last, first = scores[order[sampling.top_k - 1 : sampling.top_k + 1]]
        margin = last - first if last > -np.inf else np.inf
        order = order[: sampling.top_k]
    weights = np.exp(scores[order] - scores[order[0]])
    weights /= weights.sum()
    if sampling.top_p < 1:
        before = np.cumsum(weights) - weights
        margin = min(margin, np.abs(before[1:] - sampling.top_p).min(initial=np.inf))
        order = order[before < sampling.top_p]
    ratios = np.exp(scores[order] - scores[order[0]])
    margin = min(margin, np.abs(ratios - sampling.min_p)[1:].min(initial=np.inf))
    order = order[ratios >= sampling.min_p]
    probabilities = np.zeros(len(scores))
    probabilities[order] = np.exp(scores[order] - scores[order[0]])
    return probabilities / probabilities.sum(), margin


def assert_drawn_from(probabilities, draws):
    """Fails by chance once in 10,000 times; seeds here are fixed. Rare outcomes count as one."""
    counts = np.bincount(draws, minlength=len(probabilities))
    expected = probabilities * len(draws)
    assert not counts[expected == 0].any()
    is_rare = expected < 5
    found, wanted = (np.append(x[~is_rare], x[is_rare].sum()) for x in (counts, expected))
    assert stats.chisquare(found[wanted > 0], wanted[wanted > 0]).pvalue > 1e-4


def seeded(number, **options):
    return [Sampling(seed=seed, **options) for seed in range(number)]


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.5, 50.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 10, V - 1, V, V + 3]),
    top_p=st.sampled_from([1.0, 1.0, 0.001, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.1, 0.7, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.2, 3.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.5, 0.4, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.7, 0.3, 2.0]),
    logit_bias=st.dictionaries(
        st.integers(0, V - 1), st.sampled_from([-np.inf, -100.0, -1.0, 0.5, 6.0]), max_size=12
    ),
)


@settings(deadline=None, max_examples=examples(40, 200))
@given(
    rows=st.tuples(samplings, samplings, samplings),
    text=st.tuples(*[st.lists(st.integers(0, V - 1), max_size=9)] * 2),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
)
def test_all_processors_together_leave_what_the_reference_leaves(rows, text, seed, scale):
    logits = np.random.default_rng(seed).standard_normal((len(rows), V)).astype(np.float32) * scale
    expected = [reference(row, each, *text) for row, each in zip(logits, rows, strict=True)]
    # At the very edge of a cut float32 may decide otherwise than float64, and both are right.
    assume(all(margin > 1e-5 for _, margin in expected))
    history = np.tile(history_row(*text, V), (len(rows), 1))
    found = jax.nn.softmax(kept(logits, inputs_of(rows, V), history))
    tokens = choose(logits, rows, prompt=text[0], generated=text[1]).token
    for row, sampling in enumerate(rows):
        probabilities, _ = expected[row]
        if sampling.temperature == 0:
            assert tokens[row] == np.argmax(probabilities)
        else:
            assert np.array_equal(np.asarray(found[row]) > 1e-30, probabilities > 1e-30)
            np.testing.assert_allclose(found[row], probabilities, rtol=1e-3, atol=1e-6)
            assert probabilities[tokens[row]] > 0


def test_draws_of_one_seed_along_its_positions_follow_the_distribution_of_the_reference():
    filters = {"temperature": 1.4, "top_k": 12, "top_p": 0.8, "min_p": 0.05}
    penalties = {"repetition_penalty": 1.7, "presence_penalty": 1.3, "frequency_penalty": -0.6}
    options = {**filters, **penalties, "logit_bias": {3: 2.0, 5: -1.0, 39: -np.inf}}
    logits = np.random.default_rng(3).standard_normal(V).astype(np.float32)
    logits[[5, 7, 30]] = [1.5, 1.0, -2.0]  # penalties show where the text is likely
    expected, _ = reference(logits, Sampling(**options), PROMPT, GENERATED)
    rows = [Sampling(seed=2**63 + 5, **options)] * DRAWS
    text = {"prompt": PROMPT, "generated": GENERATED, "position": np.arange(DRAWS)}
    assert_drawn_from(expected, choose(np.tile(logits, (DRAWS, 1)), rows, **text).token)


@pytest.mark.parametrize("other", one_in(3, ["next position", "next seed", "upper half"]))
def test_seeds_and_positions_give_independent_draws(other):
    """Pairs of draws against the product of their distributions."""
    vocab = 6
    logits = np.tile(np.linspace(-1, 1, vocab, dtype=np.float32), (DRAWS, 1))
    seeds = np.arange(DRAWS)
    shifted = seeds + {"next seed": 1, "upper half": 2**32, "next position": 0}[other]
    rows = [[Sampling(temperature=1.0, seed=int(s)) for s in each] for each in (seeds, shifted)]
    first = choose(logits, rows[0]).token
    second = choose(logits, rows[1], position=np.full(DRAWS, other == "next position")).token
    expected, _ = reference(logits[0], Sampling(temperature=1.0), [], [])
    # Pairs of neighbouring seeds share a draw; every second pair does not.
    pairs = (first * vocab + second)[:: 2 if other == "next seed" else 1]
    assert_drawn_from(np.outer(expected, expected).ravel(), pairs)


def test_the_same_seed_gives_the_same_token_in_any_row_of_any_batch():
    generator = np.random.default_rng(1)
    logits = generator.standard_normal((6, V)).astype(np.float32)
    rows = [
        Sampling(temperature=0.9, seed=7),
        Sampling(),
        Sampling(temperature=1.3, seed=7, top_k=9, top_p=0.8, min_p=0.01),
        Sampling(temperature=2.0, seed=8, repetition_penalty=1.3, frequency_penalty=0.5),
        Sampling(temperature=0.4, seed=2**64 - 1, logit_bias={4: 3.0, 5: -np.inf}),
        Sampling(presence_penalty=1.0, logit_bias={9: 1.0}),
    ]
    text = {"prompt": PROMPT, "generated": GENERATED}

    def tokens(*order, at):
        asked = [rows[row] for row in order]
        position = [at + row for row in order]
        found = choose(logits[[*order]], asked, position=position, **text).token.tolist()
        return dict(zip(order, found, strict=True))

    for at in range(20):
        together = tokens(*range(6), at=at)
        assert tokens(3, 5, 0, 4, 2, 1, at=at) == together
        assert tokens(4, 1, 2, at=at) == {row: together[row] for row in (4, 1, 2)}
        assert {row: tokens(row, at=at)[row] for row in range(6)} == together


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_choice_or_numbers_disturbs_nobody(temperature):
    logits = np.random.default_rng(7).standard_normal((2, V)).astype(np.float32)
    forbidden = {token: -np.inf for token in range(V)}
    filters = {"top_k": 3, "top_p": 0.5, "min_p": 0.1}
    nothing = Sampling(temperature=temperature, logit_bias=forbidden, **filters)
    beside = Sampling(temperature=temperature, seed=3)
    with jax.debug_nans(True):
        chosen = choose(logits, [nothing, beside], logprobs=1)
    assert chosen.token[0] == -1
    assert chosen.logprob[0] == -np.inf
    assert chosen.token[1] == choose(logits[1:], [beside]).token[0]
    assert np.isfinite(chosen.top_logprobs).all()
    for value in (np.nan, np.inf):
        logits[0, 4] = value
        tokens = choose(logits, [Sampling(temperature=temperature)] * 2).token
        assert tokens[0] == -1
        assert tokens[1] >= 0
        wide = np.zeros((2, 9000), np.float32)  # XLA:CPU's maximum of such rows loses NaN
        wide[0, 4] = value
        assert choose(wide, [Sampling(temperature=temperature)] * 2).token[0] == -1


def test_extreme_values_give_allowed_tokens_not_nan():
    logits = np.tile(np.float32([[5, -90, 90, 0]]), (8, 1))
    forbidden = {2: -np.inf, 3: -np.inf}
    for options in (
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 1e38},
        {"logit_bias": {0: 3e38, 1: -3e38}},
        {"top_p": 1e-45},
        {"min_p": 1e-45},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": forbidden},
        {"logit_bias": forbidden, "top_k": 5, "top_p": 0.5, "min_p": 0.5},
    ):
        allowed = {0, 1} if forbidden in options.values() else {*range(4)}
        for temperature in (0.0, 1e-38, 1.0, 3e38):
            rows = seeded(8, temperature=temperature, **options)
            with jax.debug_nans(True):
                tokens = choose(logits, rows, prompt=[0, 1, 2, 3], generated=[0, 1]).token
            assert set(tokens.tolist()) <= allowed
    # Both positive logits would be infinite: they are equal instead.
    both = choose(logits, seeded(8, temperature=1.0, repetition_penalty=1e-38), prompt=[0, 1, 2, 3])
    assert set(both.token.tolist()) == {0, 2}
    top = choose(logits, seeded(8, temperature=1.0, top_p=1e-45)).token
    assert (top == 2).all()


def test_greedy_takes_the_first_of_equal_logits_beside_a_sampled_row_too():
    logits = np.zeros((40, V), np.float32)
    logits[1::2, [8, 12]] = 2
    rows = seeded(40)
    assert choose(logits, rows).token.tolist() == [0, 8] * 20
    beside = [*rows[:-1], Sampling(temperature=1.0)]
    assert choose(logits, beside).token[:-1].tolist() == ([0, 8] * 20)[:-1]
    # Filters keep tokens of equal logits together.
    logits = np.log(np.array([[0.3, 0.3, 0.3, 0.1]], np.float32))
    for filters in ({"top_k": 2}, {"top_p": 0.5}):
        inputs = inputs_of([Sampling(temperature=1, **filters)], 4)
        left = kept(logits, inputs, jnp.zeros((1, 4), int))[0]
        assert np.flatnonzero(np.isfinite(left)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("vocab", [7, TOP_LOGPROBS, V])
def test_logprobs_are_of_the_models_own_logits(vocab):
    logits = np.random.default_rng(8).standard_normal((3, vocab)).astype(np.float32) * 20
    rows = [
        Sampling(temperature=5.0, top_k=6, seed=1),
        Sampling(repetition_penalty=2.0, logit_bias={int(np.argmax(logits[1])): -np.inf}),
        Sampling(),
    ]
    chosen = choose(logits, rows, prompt=[1, 2], generated=[3], logprobs=1)
    wide = logits.astype(np.float64)
    expected = wide - wide.max(-1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    number = min(TOP_LOGPROBS, vocab)
    order = np.argsort(-expected, -1)[:, :number]
    assert chosen.top_tokens.tolist() == order.tolist()
    top = np.take_along_axis(expected, order, -1)
    np.testing.assert_allclose(chosen.top_logprobs, top, rtol=1e-6, atol=1e-5)
    picked = expected[np.arange(3), chosen.token]
    np.testing.assert_allclose(chosen.logprob, picked, rtol=1e-6, atol=1e-5)
    assert chosen.token[1] != order[1, 0]
    chosen = choose(np.ones((2, V), np.float32), [Sampling(), Sampling()])
    assert not any(np.any(value) for value in chosen[1:])


def test_history_counts_tokens_of_live_rows_as_the_host_does():
    history = np.stack([history_row(PROMPT, GENERATED, V)] * 65)  # many rows go in a loop
    token, live = np.resize([7, 7, -1, V - 1], 65), np.resize([1, 0, 1, 1], 65)
    recorded = jax.jit(record)(history, token.astype(np.int32), live.astype(np.int32))
    expected = [
        history_row(PROMPT, [*GENERATED, *([one] if alive and one >= 0 else [])], V)
        for one, alive in zip(token, live, strict=True)
    ]
    assert np.array_equal(recorded, expected)


@settings(deadline=None, max_examples=examples(15, 50))
@given(words=st.tuples(*[st.integers(0, 2**32 - 1)] * 4))
def test_random_bits_are_those_of_threefry(words):
    from jax.extend.random import threefry_2x32

    pairs = [jnp.array(words[at : at + 2], jnp.uint32) for at in (0, 2)]
    assert int(programs._threefry(*map(tuple, pairs))) == int(threefry_2x32(*pairs)[0])


@settings(deadline=None, max_examples=examples(10, 25))
@given(seed=st.integers(0, 2**32 - 1), penalised=st.booleans(), greedy=st.booleans())
def test_choosing_after_several_is_after_each(seed, penalised, greedy):
    random = np.random.default_rng(seed)
    rows, count = 2, 4
    logits = jnp.asarray(3 * random.standard_normal((rows, count, V)), jnp.float32)
    tokens = jnp.asarray(random.integers(0, V, (rows, count)), jnp.int32)
    history = jnp.asarray(random.integers(0, 4, (rows, V)), jnp.int32)
    start = jnp.asarray([3, 17], jnp.int32)
    wanted = Sampling(
        temperature=0.0 if greedy else 1.0,
        seed=seed,
        repetition_penalty=1.4 if penalised else 1.0,
        frequency_penalty=0.7 if penalised else 0.0,
    )
    inputs = inputs_of([wanted, Sampling(temperature=0.5, top_k=5)], V, logprobs=1)
    together = jax.jit(programs.sample_each)(logits, inputs, tokens, history, start)
    for at in range(count):
        history = record(history, tokens[:, at], jnp.ones(rows, jnp.int32))
        alone = sampled(logits[:, at], inputs, history, start + at + 1)
        for found, expected in zip(together, alone, strict=True):
            np.testing.assert_allclose(found[at], expected, rtol=1e-5, atol=1e-5)
