"""Weights in bfloat16 and int8, caches in bfloat16: what is stored, and that every form computes with it."""

from __future__ import annotations

from functools import partial
from typing import Any

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

from prejit.compiler.lowering.decoder import lower_decoder
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.models import model_registry, quantizing
from prejit.compiler.models.layers.linear import LARGE_MATRIX, REDUCED_ROWS, Embedding, Linear, dot
from prejit.compiler.models.layers.product_forms import Forms, using
from prejit.compiler.models.parameters import (
    flat_parameters,
    parameters_of,
    parametrized,
    with_parameters,
)
from prejit.compiler.native.products import KERNEL, Product
from prejit.runtime.errors import CheckpointError

Arrays = np.ndarray[Any, Any]

CONTEXT = 24
LARGEST = float(np.finfo(np.float32).max)
quick = partial(settings, deadline=None, derandomize=True, max_examples=examples(20, 60))
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])


def small_model(dtype: str) -> tuple[Any, dict[str, Arrays], dict[str, Arrays]]:
    """A GPT-2 of a test's size: config, float32 weights, stored weights."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "gpt2", vocab_size=61, n_positions=CONTEXT, n_embd=24, n_head=3, n_layer=2, bos_token_id=0
    )
    config.eos_token_id = 0
    random = np.random.default_rng(0)
    exact = {
        name: random.standard_normal(leaf.shape, np.float32) * np.float32(0.3)
        for name, leaf in parameters_of(model_registry.make_decoder(config)).items()
    }
    module = model_registry.make_decoder(config, dtype=dtype)
    changed = quantizing.readers(module, exact.__getitem__)
    names = flat_parameters(nnx.state(module))
    return (
        config,
        exact,
        {name: changed[name]() if name in changed else exact[name] for name in names},
    )


def logits(
    config: Any, dtype: str, weights: dict[str, Arrays], cache_dtype: str, *sizes: int
) -> Arrays:
    """After every token of one row that is fed in pieces, [T, V]."""
    shape = model_registry.describe(config, cache_dtype)
    graph, state = nnx.split(model_registry.make_decoder(config, dtype=dtype))

    @jax.jit
    def call(weights: Any, tokens: Any, start: Any, cache: Any) -> Any:
        length = jnp.full(1, tokens.shape[1], jnp.int32)
        module = nnx.merge(graph, with_parameters(state, weights))
        return module(tokens, start, length, cache, every=True)

    cache: Any = model_registry.make_decoder(config).make_cache(1, CONTEXT, cache_dtype)
    tokens = np.random.default_rng(1).integers(0, 61, (1, sum(sizes)), np.int32)
    found, start = [], 0
    for size in sizes:
        at = np.array([start], np.int32)
        after, cache = call(weights, tokens[:, start : start + size], at, cache)
        found.append(np.asarray(after[0]))
        start += size
    assert all(array.dtype == shape.cache_dtype for layer in cache for array in layer)
    return np.concatenate(found)


# --- What is stored ----------------------------------------------------------------------------------


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
def test_int8_is_off_by_more_than_half_a_step(values: Arrays, contracted: int, zeros: bool) -> None:
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


def test_an_output_of_another_size_spoils_its_neighbours() -> None:
    values = np.array([[1.0, -0.5], [1e-6, 5e-7]], np.float32)
    integers, scale = quantizing.quantized(values, 1)
    assert np.allclose(integers * scale[:, None], values, rtol=0.01, atol=0)


def test_bfloat16_is_rounded_to_even_and_holds_no_infinity() -> None:
    module = nnx.eval_shape(lambda: Linear(2, 2, bias=False))
    quantizing.store(module, "bfloat16")
    # Halves between two neighbours go to the even one; the third is above a half.
    values = np.array([[1 + 2**-8, 1 + 3 * 2**-8], [1 + 2**-8 + 2**-20, -1]], np.float32)
    read = quantizing.readers(module, lambda name: values)["weight"]
    assert read().dtype == ml_dtypes.bfloat16
    expected = [[1, 1 + 2**-6], [1 + 2**-7, -1]]
    assert read().astype(np.float32).tolist() == expected
    module = nnx.eval_shape(lambda: Linear(2, 2, bias=False))
    quantizing.store(module, "bfloat16")
    values = np.array([[1, np.finfo(np.float32).max], [0, 1]], np.float32)
    read = quantizing.readers(module, lambda name: values)["weight"]
    with pytest.raises(CheckpointError, match="weight: expected values that bfloat16 can hold"):
        read()


def test_norms_or_biases_are_quantized() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("llama", vocab_size=8, hidden_size=8, num_attention_heads=2)
    found = flat_parameters(nnx.state(model_registry.make_decoder(config, dtype="int8")))
    for name, leaf in found.items():
        matrix = name.endswith(".weight") and len(leaf.shape) == 2
        assert leaf.dtype == (jnp.int8 if matrix else jnp.float32), name
        assert not matrix or found[f"{name}_scale"].ndim == 1


# --- What is computed --------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("rows", [1, REDUCED_ROWS, REDUCED_ROWS + 1])
@pytest.mark.parametrize("sizes", [(24, 40), (40, 24)])  # stored (in, out) and (out, in)
def test_each_form_gives_the_same_values(dtype: str, rows: int, sizes: tuple[int, int]) -> None:
    random = np.random.default_rng(rows)
    module = Linear(*sizes, bias=True)
    values = random.standard_normal(module.weight.shape, np.float32)
    abstract = nnx.eval_shape(lambda: Linear(*sizes, bias=True))
    quantizing.store(abstract, dtype)
    read = quantizing.readers(abstract, lambda name: values)
    weights = {"weight": values, "bias": random.standard_normal(sizes[1], np.float32)}
    weights |= {name: values() for name, values in read.items()}
    graph, state = nnx.split(abstract)
    x = random.standard_normal((rows, sizes[0]), np.float32)
    call = jax.jit(lambda w, x: nnx.merge(graph, with_parameters(state, w))(x))

    matrix = weights["weight"].astype(np.float64)
    matrix = matrix if module.in_out else matrix.T
    expected = x @ (matrix * weights.get("weight_scale", 1.0)) + weights["bias"]
    for shaped in (x, x[None], x[:, None]):
        found = call(weights, shaped)
        assert found.dtype == jnp.float32
        assert np.allclose(np.asarray(found).reshape(rows, -1), expected, rtol=1e-5, atol=1e-5)


def test_a_large_matrix_takes_another_form_with_other_values() -> None:
    # Rows for which a small matrix is converted, and a large one is read in the loop.
    x = np.random.default_rng(0).standard_normal((REDUCED_ROWS + 1, 8), np.float32)
    large = np.ones((LARGE_MATRIX // 8 + 1, 8), np.int8)
    large[1::2] = -3
    found = np.asarray(jax.jit(dot, static_argnums=2)(x, large, 1))
    assert np.allclose(found[:, :2], x @ large[:2].T, atol=1e-5)


@dtypes
def test_rows_of_a_table_or_its_logits_lose_their_factor(dtype: str) -> None:
    values = np.random.default_rng(0).standard_normal((11, 6), np.float32)
    values *= np.arange(11, dtype=np.float32)[:, None]  # a row of zeros, and others that differ
    abstract = nnx.eval_shape(lambda: Embedding(11, 6))
    quantizing.store(abstract, dtype)
    weights = {"weight": values} | {
        name: read() for name, read in quantizing.readers(abstract, lambda name: values).items()
    }
    graph, state = nnx.split(abstract)
    table = nnx.merge(graph, with_parameters(state, jax.tree.map(jnp.asarray, weights)))
    stored = weights["weight"].astype(np.float64)
    stored = stored * weights.get("weight_scale", np.ones(11))[:, None]
    assert np.allclose(table(jnp.array([[0, 10], [99, 3]])), stored[[[0, 10], [10, 3]]], rtol=1e-6)
    x = np.random.default_rng(1).standard_normal((3, 6), np.float32)
    assert np.allclose(table.logits(jnp.asarray(x)), x @ stored.T, rtol=1e-5, atol=1e-5)


def exact_operands(dtype: str, rows: int) -> tuple[Arrays, Arrays, Arrays]:
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
def test_a_form_beside_a_kernel_does_not_round_x_as_the_kernel_does(dtype: str, rows: int) -> None:
    """Or a token of a batch would be computed with other numbers than the same token alone."""
    x, weight, expected = exact_operands(dtype, rows)
    scale = {"weight_scale": np.ones(40, np.float32)} if dtype == "int8" else {}
    product = Product(dtype, rows, 24, 40, in_out=False)
    layer = nnx.eval_shape(lambda: Linear(24, 40, bias=False, in_out=False))
    table = nnx.eval_shape(lambda: Embedding(40, 24))
    for form in set(product.forms) - {KERNEL}:
        for module, compute in ((layer, layer_of), (table, logits_of)):
            quantizing.store(module, dtype)
            graph, state = nnx.split(module)
            call = partial(compute, graph, state)
            with using(Forms({product: form})):
                found = np.asarray(jax.jit(call)({"weight": weight, **scale}, x))
            np.testing.assert_array_equal(found, expected, err_msg=f"{form} {compute.__name__}")


def layer_of(graph: Any, state: Any, weights: dict[str, Any], x: Any) -> Any:
    return nnx.merge(graph, with_parameters(state, weights))(x)


def logits_of(graph: Any, state: Any, weights: dict[str, Any], x: Any) -> Any:
    return nnx.merge(graph, with_parameters(state, weights)).logits(x)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_program_without_kernels_rounds_x_for_nothing(dtype: str) -> None:
    x, weight, rounded = exact_operands(dtype, 4)
    found = np.asarray(jax.jit(dot, static_argnums=2)(x, weight, 1))
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    assert np.abs(found - expected).max() < 1e-5 < np.abs(rounded - expected).max()


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.1), ("int8", 0.2)])
def test_stored_weights_give_nearly_the_same_model(dtype: str, tolerance: float) -> None:
    config, exact, stored = small_model(dtype)
    want = logits(config, "float32", exact, "float32", 20)
    once = logits(config, dtype, stored, "float32", 20)
    steps = logits(config, dtype, stored, "float32", 1, 1, 1, 12, 1, 1, 3)
    assert np.abs(once - steps).max() < 2e-5
    assert 0 < np.abs(want - once).max() < tolerance * want.std()


def test_a_bfloat16_cache_gives_another_model() -> None:
    config, exact, _ = small_model("float32")
    want = logits(config, "float32", exact, "float32", 12, 1, 1, 6)
    found = logits(config, "float32", exact, "bfloat16", 12, 1, 1, 6)
    assert 0 < np.abs(want - found).max() < 0.05 * want.std()


# --- What is compiled --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_stored_model_does_not_lower_for_every_platform(dtype: str) -> None:
    config, _, stored = small_model(dtype)
    model, shape = (
        model_registry.make_decoder(config, dtype=dtype),
        model_registry.describe(config, "bfloat16"),
    )
    spec = ProgramSpec("decode/b2-c16", "decode", {"batch": 2, "context": 16})
    program = lower_decoder(parametrized(model), shape, spec)
    assert program.platforms == ("cpu", "cuda", "tpu")
    assert set(program.weights) == set(stored)
    caches = [array for array in program.arguments if array.path[0] == "cache"]
    assert {array.dtype for array in caches} == {"bfloat16"}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    ("rows", "looped"), [(REDUCED_ROWS + 1, False), (1, True), (REDUCED_ROWS + 1, True)]
)
def test_float32_copies_of_all_weights_are_kept(dtype: str, rows: int, looped: bool) -> None:
    width, depth = 256, 12
    matrix = jax.ShapeDtypeStruct((width, width), jnp.dtype(dtype))
    rows_of_all = jax.ShapeDtypeStruct((depth * width, width), jnp.dtype(dtype))

    graph, state = nnx.split(nnx.eval_shape(lambda: Embedding(depth * width, width)))

    def layers(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        table = nnx.merge(graph, with_parameters(state, {"weight": weights[0]}))
        x += table(jnp.argmax(x, axis=1))
        for weight in weights[1:]:
            x = jnp.tanh(dot(x, weight, 1))
        return x

    def steps(x: jax.Array, weights: list[jax.Array], count: jax.Array) -> jax.Array:
        if not looped:
            return layers(x, weights)
        return jax.lax.fori_loop(0, count, lambda _, x: layers(x, weights), x)

    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(steps).lower(x, [rows_of_all, *[matrix] * depth], count).compile()
    kept = compiled.memory_analysis().temp_size_in_bytes
    one = width * width * 4
    assert kept < 3 * one, f"{kept / one:.1f} of {depth} matrices in float32"
