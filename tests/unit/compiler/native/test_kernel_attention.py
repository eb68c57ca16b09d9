"""Attention kernels against plain NumPy in float64, on every level that this machine runs."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples

from prejit.compiler.models.layers import attention as attention_layer

from . import kernel_builds, kernel_frames
from .kernel_builds import TESTS
from .kernel_frames import KernelError

DRIVER = TESTS / "attention_driver.cc"
TOLERANCE = 3e-6
"""Of means of values between -3 and 3, where scores are exact: what errs is softmax and sums."""
EPSILON = 0.5
"""Large enough that a norm without it would be seen."""


@dataclass(frozen=True)
class Case:
    """What attention of a decoder is asked."""

    query: Any
    new_keys: Any
    new_values: Any
    start: Any
    length: Any
    query_start: Any
    keys: Any
    values: Any
    scale: float = 0.25
    softcap: float = 0.0
    window: int = 0
    packed: bool = False
    change: Any = ()
    interleaved: bool = False
    offset: float = 0.0

    @property
    def arrays(self):
        arrays = (self.query, self.new_keys, self.new_values, self.start, self.length)
        return (*arrays, self.query_start, self.keys, self.values)

    @property
    def is_packed(self):
        """Whether query, keys and values are parts of one array, as a fused projection gives them."""
        return self.packed and self.query.shape[1] == self.new_keys.shape[1]

    @property
    def attributes(self):
        heads, kv_heads = self.query.shape[2], self.keys.shape[1]
        return {
            **{"scale": self.scale, "softcap": self.softcap, "window": self.window},
            "key_head": heads if self.is_packed else 0,
            "value_head": heads + kv_heads if self.is_packed else 0,
            **{"interleaved": int(self.interleaved), "epsilon": EPSILON, "offset": self.offset},
        }


def run(case, library):
    """The attention of a case, and its cache after it; the handler writes a copy of the cache."""
    arrays = [np.ascontiguousarray(array) for array in case.arrays]
    if case.is_packed:
        whole = np.concatenate(arrays[:3], 2)
        arrays[:3] = whole, whole, whole
    out = np.full(case.query.shape, np.nan, np.float32)
    keys, values = arrays[6].copy(), arrays[7].copy()
    change = map(np.ascontiguousarray, case.change)
    results, given = (out, keys, values), [*arrays[:6], keys, values, *change]
    kernel_frames.call(library, "attention", given, results, **case.attributes)
    return results


def stored_rows(x, dtype):
    return np.array(attention_layer.stored_rows(x, dtype))


def reference(case):
    """By the definition, one query after the other."""
    batch, queries, heads, _ = case.query.shape
    kv_heads, slots = case.keys.shape[1:3]
    keys, values = case.keys.copy(), case.values.copy()
    out, doubt = np.zeros((2, *case.query.shape))
    for b in range(batch):
        for t in range(min(case.length[b], slots - case.start[b])):
            keys[b, :, case.start[b] + t] = stored_rows(case.new_keys[b, t], keys.dtype)
            values[b, :, case.start[b] + t] = stored_rows(case.new_values[b, t], values.dtype)
        seen = case.start[b] + case.length[b] - case.query_start[b]
        for t, n in itertools.product(range(min(queries, seen)), range(heads)):
            last = min(case.query_start[b] + t, slots - 1)
            first = max(0, last - case.window + 1) if case.window else 0
            head = (b, n // (heads // kv_heads), slice(first, last + 1))
            given = (case.query[b, t, n], keys[head], values[head])
            out[b, t, n], doubt[b, t, n] = weighted(*given, case.scale, case.softcap)
    return out, doubt, keys, values


def weighted(query, keys, values, scale, softcap=0.0):
    """The mean of values, and how far it may be off because weights lie between two bfloat16 numbers."""
    rounds = keys.dtype == ml_dtypes.bfloat16
    keys, values = (widened(rows, query.size) for rows in (keys, values))
    scores = keys @ (query.astype(np.float64) * scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.exp2(scores / np.log(2) - np.ceil(scores.max() / np.log(2)))
    doubt = np.zeros(len(weights))
    if rounds:
        exact, weights = weights, weights.astype(ml_dtypes.bfloat16).astype(np.float64)
        step = np.exp2(np.frexp(exact)[1] - 8.0)
        doubt[abs(abs(weights - exact) - step / 2) < exact * 2.0**-20] = 1
        doubt *= step
    total = weights.sum()
    return weights @ values / total, doubt @ (abs(values) + 3) / total


def widened(rows, size):
    """Return values as float64, of int8 times the factor that stands behind them."""
    wide = rows[..., :size].astype(np.float64)
    if rows.dtype == np.int8:
        wide *= np.ascontiguousarray(rows[..., size:]).view(np.float32)
    return wide


def with_factors(integers, factor):
    tail = np.broadcast_to(np.float32([factor]).view(np.int8), (*integers.shape[:-1], 4))
    return np.concatenate([integers.astype(np.int8), tail], -1)


def assert_close(found, expected, doubt=0.0):
    np.testing.assert_array_less(abs(found - expected), TOLERANCE + doubt)


def drawn(seed, *, size, slots, tokens, batch=1, kv_heads=1, group=1, **more):
    """A case with exact scores; behind what is valid is garbage. `queries=1` is of the last token alone."""
    rng, dtype = np.random.default_rng(seed), more.pop("dtype", np.float32)

    def wholes(*shape):
        return rng.integers(-3, 4, shape).astype(np.float32)

    def reals(*shape):
        return rng.uniform(-3, 3, shape).astype(np.float32)

    start = more.pop("start", rng.integers(0, slots + 2, batch)).astype(np.int32)
    length = more.pop("length", rng.integers(0, tokens + 1, batch)).astype(np.int32)
    alone = more.pop("queries", None) == 1
    keys, new_keys = wholes(batch, kv_heads, slots, size), wholes(batch, tokens, kv_heads, size)
    values = reals(batch, kv_heads, slots, size)
    if dtype == np.int8:  # the factor of each key is 1
        new_keys[..., -1] = 127
        keys, values, most = with_factors(keys, 1), stored_rows(values, dtype), np.inf
    else:
        keys, values = keys.astype(dtype), values.astype(dtype)
        most = ml_dtypes.finfo(dtype).max
    for b in range(batch):
        end = start[b] + length[b]
        keys[b, :, end:] = with_factors(keys[b, :, end:, :size], most) if dtype == np.int8 else most
        values[b, :, end:] = keys[b, :, end:] if dtype == np.int8 else -most
    return Case(
        query=wholes(batch, 1 if alone else tokens, kv_heads * group, size),
        new_keys=new_keys,
        new_values=reals(batch, tokens, kv_heads, size),
        start=start,
        length=length,
        query_start=(start + np.maximum(length - 1, 0)).astype(np.int32) if alone else start,
        keys=keys,
        values=values,
        **more,
    )


cases = st.builds(
    drawn,
    st.integers(0, 2**32 - 1),
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 1, 2, 3, 4, 8]),
    size=st.sampled_from([1, 3, 8, 16, 17, 32, 33, 64, 80, 128]),
    slots=st.one_of(st.integers(1, 40), st.integers(60, 70), st.integers(250, 700)),
    tokens=st.one_of(st.just(1), st.integers(2, 9), st.integers(10, 70)),
    queries=st.sampled_from([None, None, 1]),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16, np.int8]),
    scale=st.sampled_from([0.0625, 0.125, 0.25]),
    softcap=st.sampled_from([0.0, 0.0, 0.5, 4.0]),
    window=st.sampled_from([0, 0, 1, 7, 64, 300]),
    packed=st.booleans(),
)


@settings(max_examples=examples(12, 60), deadline=None)
@given(cases)
def test_attention_of_any_size_is_what_numpy_makes_of_it(kernels, case):
    out, keys, values = run(case, kernels)
    expected, doubt, expected_keys, expected_values = reference(case)
    assert_close(out, expected, doubt)
    np.testing.assert_array_equal(keys, expected_keys)
    np.testing.assert_array_equal(values, expected_values)


def drawn_change(rng, batch, tokens, size, *, pairs, has_norms):
    """Cosines and sines of a turn, longer than 1 as YaRN's are, and scales of norms."""
    angles = rng.uniform(-9, 9, (batch, tokens, 1, pairs))
    turns = [(1.25 * part(angles)).astype(np.float32) for part in (np.cos, np.sin)]
    return turns + [rng.uniform(0.5, 2, size).astype(np.float32) for _ in range(2 * has_norms)]


def changed(case, heads, scales, first):
    """Heads [B, T, N, H] after their norm and turn, by the definition; `first` is the token of the first."""
    heads = heads.astype(np.float64)
    if scales:
        mean = np.square(heads).mean(-1, keepdims=True)
        heads = heads / np.sqrt(mean + EPSILON) * (scales[0] + case.offset)
    tokens = np.arange(heads.shape[1]) + np.reshape(first, (-1, 1))
    cos, sin = (
        part[np.arange(len(heads))[:, None], tokens].astype(np.float64) for part in case.change[:2]
    )
    pairs = cos.shape[-1]
    places = np.arange(2 * pairs).reshape(*((-1, 2) if case.interleaved else (2, -1)))
    x, y = places.T if case.interleaved else places
    out = heads.copy()
    out[..., x] = heads[..., x] * cos - heads[..., y] * sin
    out[..., y] = heads[..., y] * cos + heads[..., x] * sin
    return out.astype(np.float32)


@settings(max_examples=examples(12, 60), deadline=None)
@given(cases, st.integers(0, 64), st.booleans(), st.booleans(), st.sampled_from([0.0, 1.0]))
def test_heads_meet_after_their_norm_and_turn(kernels, case, pairs, has_norms, interleaved, offset):
    size, (batch, tokens) = case.query.shape[-1], case.new_keys.shape[:2]
    rng = np.random.default_rng(pairs)
    arrays = drawn_change(
        rng, batch, tokens, size, pairs=min(pairs, size // 2), has_norms=has_norms
    )
    given_ = replace(case, change=arrays, interleaved=interleaved, offset=offset, softcap=0.0)
    first = case.query_start - case.start
    ready = replace(
        case,
        query=changed(
            given_, case.query, arrays[2:3], first if case.query.shape[1] < tokens else 0 * first
        ),
        new_keys=changed(given_, case.new_keys, arrays[3:4], 0 * first),
        softcap=0.0,
    )
    found, expected = run(given_, kernels), run(ready, kernels)
    # A last bit of a head may round to another number of the cache.
    step = {np.dtype(np.float32): 2e-5}.get(case.keys.dtype, 2e-2)
    with np.errstate(invalid="ignore"):  # of what stands behind the last token
        keys, wanted = (widened(each[1], size) for each in (found, expected))
    np.testing.assert_allclose(keys, wanted, rtol=step, atol=step * 10)
    np.testing.assert_array_equal(found[2], expected[2])
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=step * 40)


def test_a_cache_is_copied_without_an_alias_and_rounded_to_even(kernels):
    case = drawn(2, batch=2, kv_heads=2, size=16, slots=64, tokens=3)
    _, _, *expected = reference(case)
    before = [array.copy() for array in case.arrays[6:]]
    found = [np.zeros_like(array) for array in before]
    results = (np.empty_like(case.query), *found)
    kernel_frames.call(kernels, "attention", case.arrays, results, **case.attributes)
    for array, wanted in zip([*found, *case.arrays[6:]], [*expected, *before], strict=True):
        np.testing.assert_array_equal(array, wanted)
    at = {"start": np.array([2]), "length": np.ones(1)}
    case = drawn(6, size=8, slots=4, tokens=1, dtype=ml_dtypes.bfloat16, **at)
    # Two ties, to even up and down; what overflows; the least of all; a NaN whose upper half is infinite.
    bits = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 1, 0x7F800001, 0xFFFFFFFF, 0x80000000, 0x3F808001]
    case.new_keys[:] = np.array(bits, np.uint32).view(np.float32)
    _, keys, _ = run(case, kernels)
    found = keys[0, 0, 2].view(np.uint16)
    assert found[[0, 1, 2, 3, 6, 7]].tolist() == [0x3F80, 0x3F82, 0x7F80, 0, 0x8000, 0x3F81]
    assert np.isnan(keys[0, 0, 2, 4:6].astype(np.float32)).all()


@pytest.mark.parametrize("tokens", [1, 5, 60])
def test_a_row_gets_the_same_bits_alone_and_in_a_batch(kernels, tokens):
    # Alone, 1000 positions of 2 heads are split over threads; in the batch they are not.
    start = np.array([1000, 3, 640, 77, 500, 901])
    sizes = {"kv_heads": 2, "group": 2, "size": 64, "slots": 1100, "tokens": tokens}
    case = drawn(3, batch=6, **sizes, start=start, length=np.full(6, tokens))
    arrays = {name: each for name, each in vars(case).items() if isinstance(each, np.ndarray)}
    together, _, _ = run(case, kernels)
    for b in range(6):
        row = replace(case, **{name: each[b : b + 1] for name, each in arrays.items()})
        np.testing.assert_array_equal(run(row, kernels)[0][0], together[b])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize(("window", "interleaved"), [(0, None), (70, None), (0, True), (70, False)])
def test_a_token_gets_the_same_bits_alone_and_in_a_prompt(kernels, dtype, window, interleaved):
    size, tokens = {"kv_heads": 2, "group": 2, "size": 40, "slots": 400}, 300
    at = {"start": np.zeros(1, np.int32), "length": np.full(1, tokens)}
    case = drawn(8, **size, tokens=tokens, dtype=dtype, window=window, **at)
    if interleaved is not None:
        change = drawn_change(np.random.default_rng(1), 1, tokens, 40, pairs=18, has_norms=True)
        case = replace(case, change=change, interleaved=interleaved)
    prompt, keys, values = run(case, kernels)
    for token in (0, 1, 63, 64, 65, 200, 299):
        one = {
            name: getattr(case, name)[:, token : token + 1]
            for name in ("query", "new_keys", "new_values")
        }
        place: Any = {"start": np.int32([token]), "query_start": np.int32([token])}
        place["change"] = [*(x[:, token : token + 1] for x in case.change[:2]), *case.change[2:]]
        alone = replace(case, **one, **place, length=np.int32([1]), keys=keys, values=values)
        np.testing.assert_array_equal(run(alone, kernels)[0][0, 0], prompt[0, token])


def test_what_is_no_number_reaches_those_who_see_it_alone(kernels):
    for tokens in (1, 5, 40):
        at = {"start": np.array([258, 7]), "length": np.full(2, tokens)}
        case = drawn(4, batch=2, kv_heads=2, group=2, size=32, slots=300, tokens=tokens, **at)
        case.query[0, tokens - 1, 2, 3] = np.nan
        out, _, _ = run(case, kernels)
        assert np.isnan(out[0, tokens - 1, 2]).all()
        case.query[0, tokens - 1, 2] = 0
        expected = reference(case)[0]
        out[0, tokens - 1, 2] = expected[0, tokens - 1, 2] = 0
        assert_close(out, expected)
    case = drawn(5, size=16, slots=400, tokens=1, length=np.ones(1), start=np.array([299]))
    case.values[0, 0, 200] = np.nan
    assert np.isnan(run(case, kernels)[0]).all()
    assert np.isfinite(run(replace(case, window=99), kernels)[0]).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tokens", [1, 20])
def test_the_largest_score_may_become_huge_with_a_later_key(kernels, tokens, dtype):
    at = {"start": np.array([300]), "length": np.array([tokens])}
    case = drawn(9, size=8, slots=320, tokens=tokens, dtype=dtype, scale=1.0, **at)
    case.query[:] = 1
    for power, sign in itertools.product((12, 14, 17, 20, 22), (-1, 1)):
        case.keys[:] = case.new_keys[:] = 0
        case.keys[..., 0] = case.new_keys[..., 0] = sign * 2.0**power
        case.keys[..., 1], case.new_keys[..., 1] = -3, 2
        np.testing.assert_allclose(run(case, kernels)[0], reference(case)[0], atol=0.01)


def test_wrong_places_and_shapes_never_lead_out_of_the_cache(kernels):
    case = drawn(7, batch=4, size=8, slots=16, tokens=4, length=np.full(4, 4))
    most = np.iinfo(np.int32).max
    start = np.array([-2, -100, most, 15], np.int32)
    length = np.array([4, most, 4, most], np.int32)
    out, _, _ = run(replace(case, start=start, query_start=start, length=length), kernels)
    assert out.shape == case.query.shape
    case = drawn(8, batch=2, kv_heads=2, size=8, slots=16, tokens=1)
    shapes, zeros = "prejit_attention: expected out", np.zeros(case.keys.shape, np.float16)
    angles = np.zeros((2, 1, 1, 4), np.float32)
    for wrong, message in (
        ({"new_keys": case.new_keys[:, :, :, :4]}, shapes),
        ({"new_values": case.new_values[:, :, :1]}, shapes),
        ({"length": case.length[:1]}, shapes),
        ({"query": np.ones((2, 1, 3, 8), np.float32)}, shapes),
        ({"keys": case.keys[:, :, :8]}, shapes),
        ({"keys": case.keys.astype(ml_dtypes.bfloat16)}, "one dtype"),
        ({"keys": zeros.astype(np.int8), "values": zeros.astype(np.int8)}, shapes),
        ({"keys": zeros, "values": zeros}, "float32, bfloat16 or int8"),
        ({"change": [angles]}, "expected cos and sin, or these and two norms"),
        ({"change": [angles, angles[:, :, :, :2]]}, "float32 .B, T, 1, P., P at most H / 2"),
        ({"change": [angles[:1]] * 2}, "float32 .B, T, 1, P., P at most H / 2"),
        ({"change": [np.zeros((2, 1, 1, 5), np.float32)] * 2}, "P at most H / 2"),
        ({"change": [angles[..., 0]] * 2}, "float32 .B, T, 1, P., P at most H / 2"),
        ({"change": [angles, angles, angles[0, 0, 0], np.ones(8, np.float32)]}, "float32 .H."),
    ):
        with pytest.raises(KernelError, match=message):
            run(replace(case, **wrong), kernels)


def encode(library, query, keys, values, length, scale, rounds):
    out = np.full(query.shape, np.nan, np.float32)
    arguments = [np.ascontiguousarray(x) for x in (query, keys, values, length.astype(np.int32))]
    attributes = {"scale": scale, "rounds": int(rounds)}
    kernel_frames.call(library, "encoder_attention", arguments, [out], **attributes)
    return out


@settings(max_examples=examples(12, 60), deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 20) | st.integers(45, 300) | st.just(600), min_size=1, max_size=5),
    st.integers(1, 4),
    st.sampled_from([1, 3, 16, 32, 33, 64, 100]),
    st.booleans(),
)
def test_an_encoder_is_what_numpy_makes_of_it_and_packed_sentences_are_as_alone(
    kernels, seed, lengths, heads, size, rounds
):
    rng = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths) + 1, heads, size)
    query, keys = rng.integers(-3, 4, (2, *shape)).astype(np.float32)
    values = rng.uniform(-3, 3, shape).astype(np.float32)
    expected, doubt = np.zeros((2, *shape))
    stored = ml_dtypes.bfloat16 if rounds else np.float32
    for b, valid in enumerate(lengths):
        for array in (query, keys, values):
            array[b, valid:] = np.finfo(np.float32).max
        for t, n in itertools.product(range(valid), range(heads)):
            seen = (keys[b, :valid, n].astype(stored), values[b, :valid, n].astype(stored))
            expected[b, t, n], doubt[b, t, n] = weighted(query[b, t, n], *seen, 0.25)
    alone = encode(kernels, query, keys, values, np.array(lengths), 0.25, rounds)
    assert_close(alone, expected, doubt)
    padding = np.full((9, heads, size), np.nan, np.float32)
    rows = [[*(x[b, :n] for b, n in enumerate(lengths)), padding] for x in (query, keys, values)]
    rows[1][0] = rows[1][0] * np.nan  # a broken sentence
    packed = [np.concatenate(each)[None] for each in rows]
    found = encode(kernels, *packed, np.array(lengths), 0.25, rounds)[0]
    whole = np.concatenate([each[:n] for each, n in zip(alone, lengths, strict=True)])
    np.testing.assert_array_equal(found[lengths[0] : -9], whole[lengths[0] :])
    assert not found[-9:].any()
    assert np.isnan(found[: lengths[0]]).all()


@pytest.mark.thorough
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizers, build_cache):
    names = (
        "attention.cc",
        "encoder_attention.cc",
        "linear_multiplier.cc",
        "norm.cc",
        "threads.cc",
    )
    sources = [kernel_builds.SOURCES / name for name in names]
    driver = kernel_builds.sanitized(DRIVER, sources, sanitizers, build_cache)
    kernel_builds.assert_runs_clean(driver)
