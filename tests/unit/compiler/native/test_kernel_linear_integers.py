"""Products with x rounded to int8, against plain NumPy, by each way to multiply integers."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples

from prejit.compiler.models.layers import linear
from prejit.compiler.native.kernel_library import SOURCES

from . import kernel_builds
from .kernel_builds import LEVELS
from .test_kernel_linear import CHOICE, GELU_ERF, MULTIPLIERS, SILU, Case, activated, run

product = partial(run, kernel="linear_integers")


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((each, "pairs"), marks=pytest.mark.thorough) for each in LEVELS[:2]),
        *((LEVELS[1], "any"), (LEVELS[2], "pairs"), (LEVELS[2], "bytes"), (LEVELS[2], "tiles")),
    ],
    ids=" ".join,
)
def kernels(request, build_cache):
    """The library of a level that multiplies pairs of 16 bits, bytes, a model's tiles, or as the CPU can."""
    level, way = request.param
    if way == "any":
        return kernel_builds.product_library(level, build_cache)
    sources, flags = [*SOURCES.glob("linear*.cc"), SOURCES / "threads.cc", CHOICE], ()
    if way == "tiles":
        level, sources, flags = kernel_builds.with_tiles(level, sources)
    library = kernel_builds.load(level, build_cache, sources, flags)
    multiplier = MULTIPLIERS.index("amx-bf16" if way == "tiles" else "float32")
    has_it = library.use_multiplier(multiplier) and library.use_byte_tiles(way == "tiles")
    if not (has_it and (way == "tiles" or library.use_vnni(way == "bytes"))):
        pytest.skip(f"this machine multiplies no {way}")
    return library


def drawn(seed, rows, inputs, outputs):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (rows, inputs)).astype(np.float32)
    weight = rng.integers(-128, 128, (outputs, inputs)).astype(np.int8)
    return x, weight, rng.uniform(0.001, 0.02, outputs).astype(np.float32)


@settings(max_examples=examples(20, 60), deadline=None)
@given(data=st.data())
def test_any_size_is_exactly_numpys_integers(kernels, data):
    rows = data.draw(st.integers(0, 60) | st.integers(1020, 1030), "rows")
    inputs = data.draw(st.integers(1, 140) | st.integers(370, 420), "inputs")
    outputs, seed = data.draw(st.integers(0, 150), "outputs"), data.draw(st.integers(0, 1000))
    x, weight, scale = drawn(seed, rows, inputs, outputs)
    x[::2] = np.maximum(x[::2], -0.1)  # as an activation leaves it
    half = (x.max(-1, keepdims=True, initial=0) - x.min(-1, keepdims=True, initial=0)) / 2
    middle = (x.max(-1, keepdims=True, initial=0) + x.min(-1, keepdims=True, initial=0)) / 2
    largest = np.abs(x).max(-1, keepdims=True)
    half = np.where(np.abs(middle) <= half / 16, largest, half)
    parts = np.rint(x * (np.float32(126.5) / half) * 256).astype(np.int64)
    whole = (parts + 128) // 256
    few = np.abs(whole).mean(-1, keepdims=True) < 16
    sums = np.where(few, parts, 256 * whole) @ weight.astype(np.int64).T
    high, low = sums >> 8, sums & 255
    expected = high.astype(np.float32) * 256 + low.astype(np.float32)
    expected = expected * (half / np.float32(126.5) / 256) * scale
    np.testing.assert_array_equal(product(Case(x, [weight], [scale]), kernels), expected)


@pytest.mark.parametrize(
    ("shape", "activation"),
    [((97, 385, 130), GELU_ERF), ((70, 520, 130), SILU), ((7, 1536, 66), SILU)],
)
def test_what_follows_a_product_and_rows_with_a_peak(kernels, shape, activation):
    """One product, and two of a gated layer; a row's result is its own, and large numbers hide no other."""
    x, weight, scale = drawn(1, *shape)
    x[1::3, 5] *= 200
    large = np.arange(x.shape[1]) % 6 == 0  # as channels of trained models
    x[2::3] *= np.where(large, 1, 1 / 60)  # the root mean square has 30 steps
    up, residual, bias = weight[::-1].copy(), drawn(2, len(x), len(weight), 1)[0], scale * 30
    rounded = np.asarray(linear.rounded(x), np.float64)
    values = [rounded @ each.astype(np.float64).T * scale + bias for each in (weight, up)]
    flags = {"biases": (bias, bias), "activation": activation}
    plain = product(Case(x, [weight], [scale], residual=residual, **flags), kernels)
    expected = activated(activation, values[0])
    np.testing.assert_allclose(plain, expected + residual, rtol=1e-5, atol=1e-4)
    gated = product(Case(x, [weight, up], [scale, scale], **flags), kernels)
    np.testing.assert_allclose(gated, expected * values[1], rtol=1e-5, atol=1e-3)
    for part in (slice(1), slice(1, 3), slice(-5, None), slice(64)):
        alone = product(Case(x[part], [weight, up], [scale, scale], **flags), kernels)
        np.testing.assert_array_equal(alone, gated[part])
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    error = np.linalg.norm(rounded @ weight.astype(np.float64).T - exact, axis=1)
    share = error / np.linalg.norm(exact, axis=1)
    digits = np.where(np.arange(len(x)) % 3, 2, 1)
    assert share[digits == 2].max() < 1e-3 < share[digits == 1].min()
    assert share.max() < 0.02


@pytest.mark.parametrize("rows", [1, 50])
def test_neither_nan_nor_infinity_is_hidden_and_small_rows_are_finite(kernels, rows):
    x, weight, scale = drawn(3, rows, 70, 80)
    right = product(Case(x, [weight], [scale]), kernels)
    for wrong in (np.nan, np.inf, -np.inf, np.array(0xFFFFFFFF, np.uint32).view(np.float32)):
        changed = x.copy()
        changed[rows // 2, 9] = wrong
        found = product(Case(changed, [weight], [scale]), kernels)
        assert not np.isfinite(found[rows // 2]).any()
        others = [np.delete(each, rows // 2, axis=0) for each in (found, right)]
        np.testing.assert_array_equal(*others)
    for small in (0, 1e-40, 1e-37):
        found = product(Case(x * np.float32(small), [weight], [scale]), kernels)
        np.testing.assert_allclose(found, right * small, atol=1e-34, rtol=0)
    large = product(Case(x * np.float32(1e34), [weight], [scale]), kernels)
    np.testing.assert_allclose(large, right * np.float64(1e34), rtol=1e-5, atol=1e29)
    one = np.eye(len(weight), x.shape[1], dtype=np.int8)
    x[:, :2] = 1, -1
    x *= np.float32(3e38)  # the range of a row is beyond float32
    found = product(Case(x, [one], [scale]), kernels)[:, : x.shape[1]] / scale[: x.shape[1]]
    np.testing.assert_allclose(found, x, rtol=0, atol=3e38 / 252)
    np.testing.assert_allclose(linear.rounded(x), found, rtol=1e-6, atol=0)


def test_sums_beyond_32_bits_are_right(kernels):
    """65,536 products always fit; x of more is rounded otherwise, and these numbers are exact."""
    for inputs in (1 << 16, 70000):
        weight, scale = np.full((3, inputs), -128, np.int8), np.ones(3, np.float32)
        found = product(Case(np.ones((2, inputs), np.float32), [weight], [scale]), kernels)
        np.testing.assert_allclose(found, -128 * inputs, rtol=1e-6)
