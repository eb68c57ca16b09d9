"""Decoders of the user: every kind is found, its matrices are stored narrow, and mistakes are explained."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from tests import own_decoders
from tests.extent import sampled
from tests.own_decoders import VOCAB

from prejit.compiler.lowering.user.modules import UserModules
from prejit.compiler.lowering.user.own_decoder import find_model
from prejit.compiler.manifest.manifest import Model
from prejit.compiler.models.layers.kernel_calls import Forms, using
from prejit.compiler.models.layers.linear import Embedding, Linear
from prejit.compiler.models.protocol import DecoderModel
from prejit.compiler.native.products import KERNEL
from prejit.runtime.errors import BuildError, ManifestError


def find(module, dtype="float32", params=None, *, out_in=False):
    model = Model(module=module, dtype=dtype)
    return find_model(model, "m.toml", params, UserModules(None), out_in=out_in)


def read_all(values):
    return {name: read() for name, read in values.items()}


EQUINOX = own_decoders.equinox_decoder
KINDS = {
    "nnx": own_decoders.nnx_decoder,
    "linen variables": own_decoders.LinenDecoder,
    "linen params": own_decoders.linen_decoder,
    "equinox": EQUINOX,
    "plain": own_decoders.PlainDecoder(),
}


def params_of(kind):
    if "linen" not in kind:
        return None
    variables = own_decoders.linen_variables()
    named = traverse_util.flatten_dict(variables if "var" in kind else variables["params"], sep=".")
    return {name: np.asarray(value) for name, value in named.items()}


def logits(stored, tokens):
    """What a stored model returns after each of the tokens, int32 [B, T]."""
    rows, count = tokens.shape
    length = np.full(rows, count, np.int32)

    def call(weights, tokens):
        model = stored.model.bind(weights)
        assert isinstance(model, DecoderModel)
        cache = model.make_cache(rows, count, "float32")
        return model(tokens, jnp.zeros_like(length), length, cache, every=True)[0]

    weights = read_all(stored.values)
    shapes, found = stored.model.weights, {n: (v.shape, v.dtype) for n, v in weights.items()}
    assert found == {name: (shape.shape, shape.dtype) for name, shape in shapes.items()}
    return np.asarray(jax.jit(call)(weights, tokens))


TOKENS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.int32)


@pytest.mark.parametrize("kind", sampled(KINDS, "nnx".__eq__))
def test_every_kind_computes_with_stored_values_what_it_computes_itself(kind):
    module, params = KINDS[kind], params_of(kind)
    wide, bfloat16, int8 = (find(module, d, params) for d in ("float32", "bfloat16", "int8"))
    assert (wide.vocab_size, wide.max_positions) in ((VOCAB, own_decoders.LONGEST), (VOCAB, None))
    expected = logits(wide.exact, TOKENS)
    np.testing.assert_array_equal(logits(wide.stored, TOKENS), expected)
    for narrow, tolerance, share in ((bfloat16, 0.09, 0.53), (int8, 0.24, 0.30)):
        found = logits(narrow.stored, TOKENS)
        assert 0 < np.abs(found - expected).max() < tolerance * expected.std()
        assert size(narrow.stored) < share * size(wide.stored)
    # Matrices for products alone are stored (out, in).
    given, out_in = int8.stored, find(module, "int8", params, out_in=True).stored
    narrow = {name for name, leaf in given.model.weights.items() if leaf.dtype == jnp.int8}
    tables = {name for name in narrow if "embed" in name or "places" in name}
    assert narrow - out_in.orders.keys() == tables
    assert set(out_in.orders.values()) == {(1, 0)}
    for name in out_in.orders:
        np.testing.assert_array_equal(out_in.values[name](), given.values[name]().T)
    forms, weights = Forms(), read_all(out_in.values)
    one = jax.ShapeDtypeStruct((1,), jnp.int32)

    def call(start, length):
        model = out_in.model.bind({name: jnp.asarray(value) for name, value in weights.items()})
        return model(start[:, None], start, length, model.make_cache(1, 8, "float32"))

    with using(forms):  # what a CPU with kernels computes, by its shapes
        jax.eval_shape(call, one, one)
    assert {product.default_form for product in forms.met} == {KERNEL}
    np.testing.assert_allclose(logits(out_in, TOKENS), logits(given, TOKENS), atol=2e-5)


def size(stored):
    return sum(value.nbytes for value in read_all(stored.values).values())


def drawn(*shape, scale=1.0):
    values = np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
    return nnx.Param(jnp.asarray(values * scale))


class Shaped(nnx.Module):
    """Parameters of many shapes: stacks of layers, heads, and those that are no matrices."""

    vocab_size, max_positions = 66, None

    def __init__(self):
        made = partial(drawn, scale=0.2)
        self.layers, self.heads, self.last = made(3, 66, 66), made(66, 4, 17), made(68, 66)
        self.norms, self.small, self.vector = made(12, 768), made(64, 63), made(9000)
        self.mask = nnx.Param(jnp.where(jnp.tri(80) > 0, 0, -jnp.inf))
        self.half = nnx.Param(jnp.ones((80, 80), jnp.float16))
        self.angles = nnx.Variable(jnp.ones((80, 80)))

    def make_cache(self, rows, positions, dtype):
        return (jnp.zeros((rows, positions)),)

    def __call__(self, tokens, start, length, cache, *, every=False):
        x = jax.nn.one_hot(tokens, 66)
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, self.layers[...])
        x = jnp.einsum("btd,dnh->btnh", x, self.heads[...])
        x = x.reshape(*x.shape[:2], -1) @ self.last[...]
        return x if every else x[:, -1], cache


def test_only_what_is_a_matrix_and_can_be_held_is_narrowed_and_stored_out_in():
    found, out_in = (find(Shaped, "int8", out_in=each) for each in (False, True))
    weights = found.stored.model.weights
    narrow = {name: leaf.shape for name, leaf in weights.items() if leaf.dtype == jnp.int8}
    assert narrow == {"layers": (3, 66, 66), "heads": (66, 4, 17), "last": (68, 66)}
    # A scale for each output of each layer; and one for all of the short axis of the heads.
    assert weights["layers_scale"].shape == (3, 66)
    assert weights["heads_scale"].shape == (17,)
    exact = found.exact.values["layers"]()
    integers, scale = (found.stored.values[name]() for name in ("layers", "layers_scale"))
    assert np.abs(integers * scale[:, None] - exact).max() <= scale.max() * 0.501
    bfloat16 = find(Shaped, "bfloat16").stored.model.weights
    assert {name for name, leaf in bfloat16.items() if leaf.dtype == jnp.bfloat16} == set(narrow)
    assert out_in.stored.orders == {"layers": (0, 2, 1), "heads": (1, 2, 0), "last": (1, 0)}
    as_given, turned = (logits(each.stored, TOKENS) for each in (found, out_in))
    np.testing.assert_allclose(turned, as_given, atol=2e-5)


class OurLayers(Shaped):
    """A decoder of prejit's layers: each token's logits depend on that token alone."""

    vocab_size = 70

    def __init__(self):
        self.table, self.head = Embedding(70, 64), Linear(64, 70, bias=True)
        for part in (self.table, self.head):
            part.weight = drawn(*part.weight.shape)
        self.middle = drawn(64, 64)

    def __call__(self, tokens, start, length, cache, *, every=False):
        assert every
        return self.head(jnp.tanh(self.table(tokens) @ self.middle[...])), cache


def test_layers_of_prejit_and_params_give_the_stored_values():
    found = find(OurLayers, "int8")
    weights = found.stored.model.weights
    assert weights["table.weight_scale"].shape == (70,)  # for each token, as in our own models
    assert weights["head.weight"].dtype == weights["middle"].dtype == jnp.int8
    expected = logits(found.exact, TOKENS)
    assert np.abs(logits(found.stored, TOKENS) - expected).max() < 0.05 * np.abs(expected).max()
    own = read_all(find(EQUINOX).exact.values)
    changed = {name: (value * 2).astype(np.float16) for name, value in own.items()}
    for name, value in read_all(find(EQUINOX, params=changed).exact.values).items():
        np.testing.assert_array_equal(value, changed[name].astype(np.float32))
    shapes = find(equinox.filter_eval_shape(EQUINOX), params=own)  # values come from params
    name = "head.weight"
    np.testing.assert_array_equal(shapes.exact.values[name](), own[name])


def breaks():
    raise ValueError("no such file")


@dataclass
class Wrong:
    vocab_size: Any = 5
    max_positions: Any = None

    def make_cache(self, rows, positions, dtype):
        return ()

    def __call__(self, *arguments):
        return ()


def test_a_mistake_is_explained():
    for module, params, expected in (
        (own_decoders.NnxDecoder, None, "expected a class that takes no"),
        (breaks, None, "cannot make the model of breaks: ValueError: no"),
        (partial(lambda: jnp.ones(3)), None, "has no make_cache, no __call__"),
        (Wrong(None), None, "vocab_size: expected an integer of 1 or more, found"),
        (own_decoders.linen_decoder, None, "expected model.params beside"),
        (EQUINOX, {"tail": np.ones(3, np.float32)}, "params: expected the names of the parameters"),
        (lambda: equinox.filter_eval_shape(EQUINOX), None, "embed.weight: expected a value, found"),
    ):
        with pytest.raises((ManifestError, BuildError)) as caught:
            find(module, params=params)
        assert expected in str(caught.value)
        assert str(caught.value).startswith("m.toml: model.")
        assert caught.value.hint
