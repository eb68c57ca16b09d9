"""Functions of float32 matrices compute the same with stored values, and products never widen a matrix."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tests.extent import one_in

from prejit.compiler.base.stored_dtypes import STORED_DTYPES
from prejit.compiler.models import quantizing
from prejit.compiler.models.narrow_matrices import NarrowMatrix, call_narrow

X = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 64), np.float32))
HEADS = X.reshape(2, 3, 4, 16)


def matrix(*shape, dtype, shared):
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    order = tuple(range(len(shape)))
    if dtype == "bfloat16":
        return NarrowMatrix(jnp.asarray(values, jnp.bfloat16), None, (), order)
    integers, scale = quantizing.quantized(values, shared, STORED_DTYPES[dtype])
    return NarrowMatrix(jnp.asarray(integers), jnp.asarray(scale), shared, order)


@jax.custom_jvp
def custom(x, w):
    return x @ w


custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0]))


def over_layers(w):
    return lax.scan(lambda x, layer: (jnp.tanh(x @ layer), x.sum()), X, w)


def over_rows(w):
    linear = equinox.nn.Linear(64, 5, key=jax.random.key(0))
    layer = equinox.tree_at(lambda each: each.weight, linear, w)
    return jax.vmap(jax.vmap(layer))(X)


PRODUCTS = {  # a function of a matrix, its shape, and the axes along which values share scales
    "matmul": (lambda w: X @ w, (64, 5), (0,)),
    "the matrix first": (lambda w: w @ X[0].T, (5, 64), (1,)),
    "transposed": (lambda w: X @ w.T, (5, 64), (1,)),
    "under checkpoint": (jax.checkpoint(lambda w: X @ w), (64, 5), (0,)),
    "with a derivative of its own": (lambda w: custom(X, w), (64, 5), (0,)),
    "under vmap": (over_rows, (5, 64), (1,)),
    "to heads": (lambda w: jnp.einsum("btd,dnh->btnh", X, w), (64, 4, 16), (0, 1)),
    "to heads, each scaled": (lambda w: jnp.einsum("btd,dnh->btnh", X, w), (64, 4, 16), (0,)),
    "from heads": (lambda w: jnp.einsum("btnh,nhd->btd", HEADS, w), (4, 16, 7), (0, 1)),
    "a stack of layers": (over_layers, (3, 64, 64), (1,)),
}
OTHERS = {
    "rows of a table": (lambda w: jnp.take(w, jnp.array([[1, 3]]), axis=0), (5, 64), (0,)),
    "from heads, with scales along both": (
        lambda w: jnp.einsum("btnh,nhd->btd", HEADS, w),
        (4, 16, 7),
        (1,),
    ),
    "with itself": (lambda w: w.T @ w, (64, 5), (0,)),
    "as it is": (lambda w: (w, {"same": w.T}), (64, 5), (0,)),
    "a stack that shares scales": (over_layers, (3, 64, 64), (0, 1)),
    "a condition": (lambda w: lax.cond(w[0, 0] > 9, lambda: X @ w, lambda: -X @ w), (64, 5), (0,)),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    one_in(
        2,
        [
            *((name, "int8") for name in (*PRODUCTS, *OTHERS)),
            *((name, "bfloat16") for name in ("matmul", "a stack of layers", "a condition")),
        ],
    ),
)
def test_a_use_has_stored_values(name, dtype, monkeypatch):
    function, shape, shared = {**PRODUCTS, **OTHERS}[name]
    narrow = matrix(*shape, dtype=dtype, shared=shared)
    expected = function(narrow.widened())
    widened, real = [], NarrowMatrix.widened
    noting = lambda self: widened.append(self.values.shape) or real(self)  # noqa: E731
    monkeypatch.setattr(NarrowMatrix, "widened", noting)
    call = jax.jit(lambda narrow: call_narrow(lambda wide: function(wide["w"]), {"w": narrow}))
    found = call(narrow)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    # Each is widened once for the shapes that the function is traced with.
    assert (len(widened) > 1) == (name in OTHERS)


def test_a_product_of_float16_is_not_replaced():
    narrow = matrix(64, 5, dtype="int8", shared=(0,))

    def call(wide):
        return X.astype(jnp.float16) @ wide["w"].astype(jnp.float16)

    found = jax.jit(lambda narrow: call_narrow(call, {"w": narrow}))(narrow)
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found, call({"w": narrow.widened()}), rtol=1e-2, atol=1e-2)
