"""Products of linear layers against plain NumPy in float64, on every level that this machine runs."""

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from tests.extent import examples

from prejit.compiler.models.layers import int4_words, linear
from prejit.compiler.native.kernel_library import SOURCES
from prejit.runtime.machine.fingerprint import Fingerprint

from . import kernel_builds, kernel_frames
from .kernel_builds import LEVELS, TESTS
from .kernel_frames import KernelError

DRIVER, CHOICE = TESTS / "linear_driver.cc", TESTS / "linear_choice.cc"
MULTIPLIERS = ("float32", "avx512bf16", "amx-bf16")
"""Of kernels/linear_multiplier.h, in its order; the others by the feature that they need."""
NONE, GELU_ERF, GELU_TANH, RELU, SILU = range(5)
INT4 = np.dtype(ml_dtypes.int4)
DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int8), INT4)
WITH_ZEROS = "int4 with zeros"
KINDS = (*map(str, DTYPES), WITH_ZEROS)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((LEVELS[0], "float32", ""), marks=pytest.mark.thorough),
        *((level, "float32", "") for level in LEVELS[1:]),
        *((LEVELS[-1], multiplier, "") for multiplier in MULTIPLIERS[1:]),
        pytest.param((LEVELS[1], "float32", "model of tiles"), marks=pytest.mark.thorough),
        (LEVELS[-1], "amx-bf16", "model of tiles"),
    ],
    ids=lambda param: " ".join(filter(None, param)),
)
def kernels(request, build_cache):
    """The library of a level, once with each multiplier of many rows that it can have, or a model of it."""
    level, multiplier, is_model = request.param
    if level != LEVELS[-1] and not is_model:  # nothing to choose
        library = kernel_builds.product_library(level, build_cache)
    else:
        sources, flags = [*SOURCES.glob("linear*.cc"), SOURCES / "threads.cc", CHOICE], ()
        if is_model:
            level, sources, flags = kernel_builds.with_tiles(level, sources)
        library = kernel_builds.load(level, build_cache, sources, flags)
        has_it = library.use_multiplier(MULTIPLIERS.index(multiplier))
        # Tiles may be refused by a sandbox although the CPU has them.
        if multiplier == "avx512bf16":
            assert bool(has_it) == ("avx512bf16" in Fingerprint.current().cpu_features)
        if not has_it:
            pytest.skip(f"this machine has no {multiplier}")
    library.multiplier = multiplier
    return library


@dataclass(frozen=True, eq=False)  # what is right is computed once for all kernels
class Case:
    """x [..., K] and weights [N, K]; factors of int4 are [N, groups], or [2, N, groups] with zero points."""

    x: Any
    weights: tuple[Any, ...]
    scales: tuple[Any, ...] = ()
    biases: tuple[Any, ...] = ()
    residual: Any = None
    activation: int = NONE
    many_rows: bool = False

    @property
    def arrays(self):
        found = [self.x]
        for i, weight in enumerate(self.weights):
            if weight.dtype == INT4:
                found += [int4_words.packed(weight.astype(np.int8))]
                for each in self.scales[i : i + 1]:
                    found += [int4_words.packed_scales(*(each if each.ndim == 3 else [each]))]
            else:
                found += [weight, *self.scales[i : i + 1]]
            found += [*self.biases[i : i + 1]]
        return found if self.residual is None else [*found, self.residual]


def run(case, library, kernel="linear"):
    out = np.full((*case.x.shape[:-1], case.weights[0].shape[0]), np.nan, np.float32)
    flags = {"bias": bool(case.biases), "gated": len(case.weights) == 2}
    flags |= {"residual": case.residual is not None, "activation": case.activation}
    flags["many_rows"] = case.many_rows
    arguments = [np.ascontiguousarray(array) for array in case.arrays]
    kernel_frames.call(library, kernel, arguments, [out], **flags)
    return out


def activated(activation, v):
    if activation == GELU_ERF:
        return v * 0.5 * (1 + special.erf(v / math.sqrt(2)))
    if activation == GELU_TANH:
        return v * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    if activation == RELU:
        return np.where(v < 0, 0, v)
    if activation == SILU:
        return v / (1 + np.exp(-np.maximum(v, -700)))
    return v


def rounded_to_bytes(x):
    """Return float32 [..., K] as integers of -127 to 127 times a float32 scale for each 32."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // int4_words.GROUP, int4_words.GROUP)
    most = np.abs(groups).max(-1, keepdims=True, initial=0)
    inverse = np.float32(127) / np.where(most > 2**-100, most, np.float32(np.inf))
    integers = np.rint(groups * inverse).astype(np.float64)
    return (integers * (most / np.float32(127))).reshape(x.shape)


def test_measurements_round_x_as_kernels_of_int4():
    x = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    x[1, :32] *= 1e-35
    found = linear.rounded_groups(x)
    np.testing.assert_allclose(found, rounded_to_bytes(x), rtol=1e-6)


def fixed_point(x):
    """Return float32 [..., K] as integers of 16 bits times a float32 factor of each row."""
    most = np.abs(x).max(-1, keepdims=True, initial=np.float32(1e-33))
    integers = np.rint(x * (np.float32(126.5) / most * 256)).astype(np.float64)
    return integers * (most / np.float32(126.5) / 256)


@functools.lru_cache(512)
def reference(case):
    """What is right, and how large the terms are of which it is the sum."""
    x = case.x
    if case.weights[0].dtype == INT4:
        x = rounded_to_bytes(x)
    elif case.weights[0].dtype == np.int8:
        x = fixed_point(x)
    elif case.weights[0].dtype != np.float32:
        x = x.astype(ml_dtypes.bfloat16)
    x = x.astype(np.float64)
    values, sizes = [], []
    for i, weight in enumerate(case.weights):
        scale = case.scales[i].astype(np.float64) if case.scales else 1.0
        bias = case.biases[i].astype(np.float64) if case.biases else 0.0
        wide = weight.astype(np.float64)
        largest = np.abs(wide)
        if weight.dtype == INT4:
            factors = np.repeat(scale, wide.shape[1] // max(1, scale.shape[-1]), axis=-1)
            scale = 1.0
            if factors.ndim == 3:  # the products with integers and with zero points are apart
                wide, largest = wide - factors[1], largest + np.abs(factors[1])
                factors = factors[0]
            wide, largest = wide * factors, largest * np.abs(factors)
        values.append(x @ wide.T * scale + bias)
        sizes.append(np.abs(x) @ largest.T * scale + np.abs(bias))
    y, size = activated(case.activation, values[0]), sizes[0]
    if len(values) == 2:
        size = size * np.abs(values[1]) + np.abs(y) * sizes[1]
        y = y * values[1]
    if case.residual is not None:
        y, size = y + case.residual, size + np.abs(case.residual)
    return y, size


def assert_right(case, library):
    found = run(case, library)
    expected, size = reference(case)
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    # Rounding of float32 sums, each term to one part in 2^24.
    error = np.abs(found - expected) / (size + 1e-30)
    assert error.max(initial=0) < 2e-6


@functools.lru_cache(512)
def drawn(seed, shape, dtype, *, bias=False, gated=False, residual=False, activation=NONE):
    rows, inputs, outputs = shape
    has_zeros = dtype == WITH_ZEROS
    dtype = INT4 if has_zeros else np.dtype(dtype)
    if dtype == INT4:
        inputs = -(-inputs // int4_words.GROUP) * int4_words.GROUP
    rng = np.random.default_rng(seed)

    def normal(*of):
        return rng.standard_normal(of).astype(np.float32)

    def weight():
        if dtype == np.int8:
            return rng.integers(-128, 128, (outputs, inputs)).astype(np.int8)
        if dtype == INT4:
            return rng.integers(-8, 8, (outputs, inputs)).astype(INT4)
        return normal(outputs, inputs).astype(dtype)

    products = 1 + gated
    factors = tuple(rng.uniform(0.001, 0.02, outputs).astype(np.float32) for _ in range(products))
    if dtype == INT4:  # of either sign, and subnormal ones
        size = next(each for each in (128, 64, 32)[seed % 3 :] if inputs % each == 0)
        shape = (2, outputs, inputs // size)
        sizes = rng.choice(np.float16([-0.11, 0, 0.07, 0.4, 3e-6]), shape)
        if has_zeros:
            zeros = rng.choice(np.float16([-8, 0, 7, 2.37, 30]), shape)
            sizes = np.stack([sizes, zeros], axis=1)
        factors = tuple(sizes[:products])
    return Case(
        x=normal(rows, inputs),
        weights=tuple(weight() for _ in range(products)),
        scales=factors if dtype in (np.int8, INT4) else (),
        biases=tuple(normal(outputs) for _ in range(products)) if bias else (),
        residual=normal(rows, outputs) if residual else None,
        activation=activation,
    )


@settings(max_examples=examples(4, 60), deadline=None)
@given(data=st.data())
def test_any_size_and_flags_are_as_numpys(kernels, data):
    shapes = st.tuples(
        st.integers(0, 40) | st.integers(120, 200),
        st.integers(0, 100) | st.integers(370, 420),
        st.integers(0, 150),
    )
    seed, shape, dtype = data.draw(st.tuples(st.integers(0, 1000), shapes, st.sampled_from(KINDS)))
    flags = {name: data.draw(st.booleans(), name) for name in ("bias", "gated", "residual")}
    activation = data.draw(st.integers(0, 4), "activation")
    case = drawn(seed, shape, dtype, activation=activation, **flags)
    assert_right(replace(case, many_rows=data.draw(st.booleans(), "many rows")), kernels)


@pytest.mark.parametrize("dtype", KINDS)
def test_sizes_of_models_are_as_numpys(kernels, dtype):
    for many in (False, True):
        for shape in ((1, 8192, 70), (130, 8200, 70)):
            assert_right(replace(drawn(0, shape, dtype), many_rows=many), kernels)
        for rows in (1, 5, 300):
            case = drawn(rows, (rows, 768, 1100), dtype, bias=True, activation=GELU_TANH)
            assert_right(replace(case, many_rows=many), kernels)


@pytest.mark.parametrize(
    ("dtype", "many"), [*((kind, False) for kind in KINDS), ("bfloat16", True)]
)
def test_a_row_and_a_sequence_are_their_own_in_a_batch(kernels, dtype, many):
    """Greedy tokens must not depend on the batch: bit for bit, on either side of each threshold."""
    edge = many_rows(kernels.multiplier, dtype)
    few = [rows for rows in (1, 2, 3, 4, 5, 6, 8, 9, 23, 24, 33, 127) if rows < (edge or 1111)]
    compared = [(1111, few)]
    if edge is not None:
        compared = [(edge - 1, few), (1111, [edge, edge + 1, 2 * edge + 1, 1100])]
    cases = [
        (drawn(4, (all_rows, 1069, 77), dtype, bias=True, activation=SILU), fewer)
        for all_rows, fewer in compared
    ]
    if dtype != "float32":  # Many rows sum many inputs in parts, one row sums them at once.
        cases += [(drawn(10, ((edge or 131) - 1, 4203, 41), dtype), (1, 2, 3, 4, 5, 7))]
    # A prompt or a sentence has a product of its own: panels, filled or not.
    for positions in (32, 61):
        case = drawn(5, (5 * positions, 401, 101), dtype, bias=True, activation=GELU_ERF)
        cases += [(replace(case, x=case.x.reshape(5, positions, -1)), (1, 2))]
        assert_right(cases[-1][0], kernels)
    for case, fewer in cases:
        case = replace(case, many_rows=many)
        together = run(case, kernels)
        for rows in fewer:  # the first ones and the last ones: a row's place must not count either
            for part in (slice(rows), slice(-rows, None)):
                found = run(replace(case, x=case.x[part]), kernels)
                np.testing.assert_array_equal(found, together[part], err_msg=f"{rows} rows")


def many_rows(multiplier, dtype):
    """From so many rows on a product is summed in another order: kernels/linear.h."""
    if dtype.startswith("int"):
        return None
    if dtype == "float32" or multiplier == "float32":
        return 128
    return {"amx-bf16": 8, "avx512bf16": None}[multiplier]


def test_activations_are_right_everywhere(kernels):
    v = np.concatenate([np.linspace(-30, 30, 20011), [-1e30, -200, -88, 0, 88, 200, 1e30]])
    v, one = v.astype(np.float32), (np.ones((1, 1), np.float32),)
    for activation in (GELU_ERF, GELU_TANH, SILU, RELU):
        found = run(Case(v[:, None], one, activation=activation), kernels)
        with np.errstate(over="ignore"):
            expected = activated(activation, v.astype(np.float64))
        np.testing.assert_allclose(found[:, 0], expected, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("dtype", KINDS)
def test_neither_nan_nor_infinity_is_hidden(kernels, dtype):
    for activation, rows in itertools.product(range(5), (1, 6, 150)):
        case = drawn(5, (rows, 40, 50), dtype, gated=True, activation=activation)
        x = case.x.copy()
        x[rows // 2, 7] = np.array(0x7FFFFFFF, np.uint32).view(np.float32)  # adding 1 bit overflows
        found = run(replace(case, x=x), kernels)
        is_nan = np.isnan(found).all(axis=1)
        assert is_nan.tolist() == [row == rows // 2 for row in range(rows)], (activation, rows)
        assert not np.isnan(np.delete(found, rows // 2, axis=0)).any()
        x[rows // 2, 7] = np.inf
        plain = Case(x, case.weights[:1], case.scales[:1])
        assert not np.isfinite(run(plain, kernels)[rows // 2]).any()


def test_no_way_to_multiply_bytes_changes_a_number(kernels):
    if not hasattr(kernels, "use_vnni"):
        pytest.skip("this level has one way to multiply bytes")
    ways = [way for way in ((0, 0), (1, 0), (0, 1)) if uses_bytes_by(kernels, *way)]
    if len(ways) == 1:
        pytest.skip("this level or machine has neither VNNI nor AMX")
    sizes = (*itertools.product((1, 2, 3, 16, 17, 50), (0, 32, 416)), (150, 8192))
    names = [("linear", kind) for kind in KINDS[-3:]] + [("linear_integers", "int8")]
    for (kernel, dtype), (rows, inputs) in itertools.product(names, sizes):
        case = drawn(rows, (rows, inputs, 40), dtype, gated=True)
        if rows > 3 and inputs > 0:
            x = case.x.copy()
            x[1, 7], x[rows - 1, 31] = np.nan, np.inf
            x[2], x[3, 0] = np.abs(x[2]), 1000  # a row on one side of 0, one of two digits
            case = replace(case, x=x)
        found = []
        for way in ways:
            assert uses_bytes_by(kernels, *way)
            found.append(run(case, kernels, kernel).view(np.int32))  # NaN has bits, too
        for each in found[1:]:
            np.testing.assert_array_equal(each, found[0], f"{kernel}, {rows} rows, {inputs} inputs")


def uses_bytes_by(kernels, vnni, tiles):
    return kernels.use_vnni(vnni) and kernels.use_byte_tiles(tiles)


def test_bytes_of_extreme_inputs_are_right(kernels):
    """Groups that nothing fits beside, and those whose scale is no normal number."""
    case = drawn(12, (8, 64, 33), "int4")
    for size in (0, 1e-44, 2.0**-100, 2.0**-99, 1e-20, 1e30):
        x = case.x.copy()
        x[:, :32] = np.where(np.arange(32) % 2, -1, 1) * np.float32(size)
        x[2, 5], x[3, 6] = x[2, 5] * np.float32(0.5 / 127), x[3, 6] * np.float32(1.5 / 127)
        part = replace(case, x=x)
        found, (expected, of_terms) = run(part, kernels), reference(part)
        assert (np.abs(found - expected) <= 2e-6 * of_terms + 2.0**-92).all(), size


@pytest.mark.parametrize("rows", [8, 40])
def test_rows_of_extreme_sizes_are_right_in_int8(kernels, rows):
    case = drawn(13, (rows, 70, 33), "int8")
    x = case.x.copy()
    sizes = np.float32([0, 1e-44, 1e-36, 1e-34, 2e-33, 1e-20, 1e30])
    x[: len(sizes)] *= sizes[:, None]
    part = replace(case, x=x)
    found, (expected, of_terms) = run(part, kernels), reference(part)
    assert (np.abs(found - expected) <= 2e-6 * of_terms + 1e-30).all()


def test_wrong_arguments_are_an_error_and_no_crash(kernels):
    case, narrow = drawn(7, (2, 8, 6), DTYPES[0]), np.ones((6, 8), ml_dtypes.bfloat16)
    scales = (np.ones(6, np.float32),)
    for wrong, message in (
        (Case(case.x[:, :7], case.weights), r"\[outputs, inputs\]"),
        (Case(case.x, (np.ones((6, 8), np.int8),)), "factor for each output"),
        (Case(case.x, case.weights, scales), "fewer arguments"),
        (Case(case.x, (*case.weights, narrow)), "two weights of one dtype"),
        (Case(case.x, (np.ones((6, 8), np.int16),)), "found another dtype"),
        (Case(case.x, (np.ones((6, 8), np.uint32),)), "expected words"),
        (Case(case.x, (np.ones((1, 1, 16), np.uint32),)), "float16 factors"),
    ):
        with pytest.raises(KernelError, match=message):
            run(wrong, kernels)


@pytest.mark.thorough
@pytest.mark.parametrize("model_of", ["", *LEVELS[1:]])
@pytest.mark.parametrize(
    ("sanitizers", "ways"),
    [
        pytest.param("address,undefined", [[], ["fork"]], id="address"),
        pytest.param("thread", [[]], id="thread"),  # it does not follow a fork
    ],
)
def test_sanitizers_find_nothing(model_of, sanitizers, ways, build_cache):
    names = {each.name for each in SOURCES.glob("linear*.cc")} - {"linear_ffi.cc"}
    names |= {"experts.cc", "row_adapters.cc", "threads.cc"}
    level, sources, flags = None, [SOURCES / name for name in sorted(names)], ()
    if model_of:
        level, sources, flags = kernel_builds.with_tiles(model_of, sources)
    driver = kernel_builds.sanitized(DRIVER, sources, sanitizers, build_cache, level, flags)
    for arguments in ways[:1] if model_of else ways:
        kernel_builds.assert_runs_clean(driver, *arguments)
