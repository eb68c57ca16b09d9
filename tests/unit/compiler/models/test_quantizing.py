"""Weights in bfloat16 and int8, caches in bfloat16: what is stored, and that every form computes with it."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.extent import examples

from prejit.compiler.models import quantizing
from prejit.compiler.models.layers import int4_words
from prejit.compiler.models.layers.kernel_calls import Forms, using
from prejit.compiler.models.layers.linear import (
    REDUCED_ROWS,
    Embedding,
    Linear,
    dot,
    dot_of_parts,
    dot_of_words,
)
from prejit.compiler.models.parameters import with_parameters
from prejit.compiler.native.products import KERNEL, Product
from prejit.runtime.errors import CheckpointError

LARGEST = float(np.finfo(np.float32).max)
quick = partial(settings, deadline=None, derandomize=True, max_examples=examples(20, 60))
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])


@quick()
@given(
    values=arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 9), st.integers(1, 9)),
        elements=st.floats(-LARGEST, LARGEST, width=32),
    ),
    contracted=st.sampled_from([0, 1]),
    zeros=st.booleans(),
)
def test_int8_is_off_by_more_than_half_a_step(values, contracted, zeros):
    if zeros:
        values[0] = 0
        values[:, 0] = 0
    integers, scale = quantizing.quantized(values, contracted)
    assert integers.dtype == np.int8
    assert scale.dtype == np.float32
    assert scale.shape == (values.shape[1 - contracted],)
    assert (integers != -128).all()
    steps = np.expand_dims(scale.astype(np.float64), contracted)
    assert (np.abs(integers * steps - values) <= 0.5001 * steps).all()
    assert (integers[values == 0] == 0).all()


def test_bfloat16_is_rounded_to_even_and_holds_no_infinity():
    def rounded(values):
        module = nnx.eval_shape(lambda: Linear(2, 2, bias=False))
        return stored(module, "bfloat16", np.array(values, np.float32))[0]["weight"]

    # Halves between two neighbours go to the even one; the third is above a half.
    found = rounded([[1 + 2**-8, 1 + 3 * 2**-8], [1 + 2**-8 + 2**-20, -1]])
    assert found.dtype == ml_dtypes.bfloat16
    assert found.astype(np.float32).tolist() == [[1, 1 + 2**-6], [1 + 2**-7, -1]]
    with pytest.raises(CheckpointError, match="weight: expected values that bfloat16 can hold"):
        rounded([[1, LARGEST], [0, 1]])


def stored(module, dtype, values, **others):
    """Weights of a module whose matrix has values in a dtype, a call with them, and the matrix in float64."""
    quantizing.store(module, dtype)
    reads = quantizing.readers(module, lambda name: values)
    weights = {"weight": values, **others} | {name: read() for name, read in reads.items()}
    return weights, partial(called, *nnx.split(module)), weights["weight"].astype(np.float64)


def called(graph, state, name, weights, x):
    return getattr(nnx.merge(graph, with_parameters(state, weights)), name)(x)


@dtypes
@pytest.mark.parametrize("sizes", [(24, 40), (40, 24)])  # stored (in, out) and (out, in)
def test_each_form_gives_the_same_values(dtype, sizes):
    random = np.random.default_rng(1)
    module = nnx.eval_shape(lambda: Linear(*sizes, bias=True))
    values = random.standard_normal(module.weight.shape, np.float32)
    bias = random.standard_normal(sizes[1], np.float32)
    weights, call, matrix = stored(module, dtype, values, bias=bias)
    matrix, call = matrix if module.in_out else matrix.T, jax.jit(partial(call, "__call__"))
    for rows in (1, REDUCED_ROWS, REDUCED_ROWS + 1):
        x = random.standard_normal((rows, sizes[0]), np.float32)
        expected = x @ (matrix * weights.get("weight_scale", 1.0)) + bias
        for shaped in (x, x[None], x[:, None]):
            found = call(weights, shaped)
            assert found.dtype == jnp.float32
            assert np.allclose(np.asarray(found).reshape(rows, -1), expected, rtol=1e-5, atol=1e-5)


@dtypes
def test_rows_of_a_table_or_its_logits_lose_their_factor(dtype):
    values = np.random.default_rng(0).standard_normal((11, 6), np.float32)
    values *= np.arange(11, dtype=np.float32)[:, None]  # a row of zeros, and others that differ
    weights, call, matrix = stored(nnx.eval_shape(lambda: Embedding(11, 6)), dtype, values)
    matrix = matrix * weights.get("weight_scale", np.ones(11))[:, None]
    weights = jax.tree.map(jnp.asarray, weights)
    rows = call("__call__", weights, jnp.array([[0, 10], [99, 3]]))
    assert np.allclose(rows, matrix[[[0, 10], [10, 3]]], rtol=1e-6)
    x = np.random.default_rng(1).standard_normal((3, 6), np.float32)
    found = call("logits", weights, jnp.asarray(x))
    assert np.allclose(found, x @ matrix.T, rtol=1e-5, atol=1e-5)


def exact_operands(dtype, rows):
    """x, a matrix [out, in] and x W^T of x rounded to even: all sums are exact, in whatever order.

    Each x is halfway between two bfloat16 numbers, a bit more or a bit less.
    """
    random = np.random.default_rng(rows)
    choices = [1 + 1 / 256, 1 + 3 / 256, 1 + 1 / 256 + 2**-20, 1 + 3 / 256 - 2**-20, -1 - 1 / 256]
    x = random.choice(np.array(choices, np.float32), (rows, 24))
    weight = random.integers(-3, 4, (40, 24)).astype(np.dtype(jnp.dtype(dtype)))
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    return x, weight, rounded @ weight.astype(np.float64).T


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("rows", [1, 2, REDUCED_ROWS + 1, 40])
def test_a_form_beside_a_kernel_does_not_round_x_as_the_kernel_does(dtype, rows):
    """Or a token of a batch would be computed with other numbers than the same token alone."""
    x, weight, expected = exact_operands(dtype, rows)
    scale = {"weight_scale": np.ones(40, np.float32)} if dtype == "int8" else {}
    product = Product(dtype, rows, 24, 40, in_out=False)
    layer = nnx.eval_shape(lambda: Linear(24, 40, bias=False, in_out=False))
    table = nnx.eval_shape(lambda: Embedding(40, 24))
    for form in set(product.forms) - {KERNEL}:
        for module, name in ((layer, "__call__"), (table, "logits")):
            quantizing.store(module, dtype)
            call = partial(called, *nnx.split(module), name)
            with using(Forms({product: form})):
                found = np.asarray(jax.jit(call)({"weight": weight, **scale}, x))
            np.testing.assert_array_equal(found, expected, err_msg=f"{form} {name}")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize(("rows", "loops"), [(1, True), (REDUCED_ROWS + 1, True), (40, False)])
def test_float32_copies_of_all_weights_are_kept(dtype, rows, loops):
    width, depth = 256, 12
    if dtype == "int4":
        words = jax.ShapeDtypeStruct(int4_words.word_shape(width, width), jnp.uint32)
        scales = jax.ShapeDtypeStruct(int4_words.scale_shape(width, width), jnp.float16)
        matrix, dtype = (words, scales), "int8"  # of its table
    else:
        matrix = jax.ShapeDtypeStruct((width, width), dtype)
    rows_of_all = jax.ShapeDtypeStruct((depth * width, width), dtype)
    graph, state = nnx.split(nnx.eval_shape(lambda: Embedding(depth * width, width)))

    def layers(x, weights):
        table = nnx.merge(graph, with_parameters(state, {"weight": weights[0]}))
        x += table(jnp.argmax(x, axis=1))
        for weight in weights[1:]:
            by_words = isinstance(weight, tuple)
            x = jnp.tanh(dot_of_words(x, *weight, width) if by_words else dot(x, weight, 1))
        return x

    def steps(x, weights, count):
        looped = jax.lax.fori_loop
        return looped(0, count, lambda _, x: layers(x, weights), x) if loops else layers(x, weights)

    x, count = (jax.ShapeDtypeStruct(*each) for each in (((rows, width), "f4"), ((), "i4")))
    compiled = jax.jit(steps).lower(x, [rows_of_all, *[matrix] * depth], count).compile()
    kept, one = compiled.memory_analysis().temp_size_in_bytes, width * width * 4
    assert kept < 3 * one, f"{kept / one:.1f} of {depth} matrices in float32"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("contracted", [0, 1])
def test_parts_of_x_lose_bits_of_float32(dtype, contracted):
    rng = np.random.default_rng(1)
    weight = jnp.asarray(rng.normal(0, 30, (64, 70)), dtype)
    x = rng.standard_normal((5, weight.shape[contracted]), np.float32)
    wide = np.asarray(weight, np.float64)
    exact = x.astype(np.float64) @ (wide if contracted == 0 else wide.T)
    found = np.asarray(jax.jit(dot_of_parts, static_argnums=2)(x, weight, contracted))
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6 * np.abs(exact).max())


def test_an_infinite_row_changes_the_others():
    rng = np.random.default_rng(1)
    weight = jnp.asarray(rng.standard_normal((64, 70)), jnp.bfloat16)
    x = rng.standard_normal((REDUCED_ROWS + 1, 64), np.float32)
    expected = np.asarray(dot(x, weight, 0))
    x[0, 0] = np.inf
    np.testing.assert_array_equal(np.asarray(dot(x, weight, 0))[1:], expected[1:])
