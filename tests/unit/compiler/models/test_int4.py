"""Matrices in four bits: words of any size, which matrices they are for, and how they are rounded.

Rounding by the inputs of a text is compared with the paper's algorithm, column by column in float64.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples, one_in, sampled

from prejit.compiler.base.stored_dtypes import GROUPS_OF_32, Groups
from prejit.compiler.models import int4_rounding, quantizing
from prejit.compiler.models.families.latent_attention import LatentAttention
from prejit.compiler.models.layers import int4_words
from prejit.compiler.models.layers.experts import ExpertMatrices
from prejit.compiler.models.layers.int4_words import GROUP
from prejit.compiler.models.layers.linear import REDUCED_ROWS, Embedding, Linear
from prejit.compiler.models.parameters import with_parameters
from prejit.compiler.models.published_integers import Integers
from prejit.runtime.errors import CheckpointError

quick = partial(settings, deadline=None, derandomize=True, max_examples=examples(10, 60))


def wide_of(integers, scales, zeros=0):
    size = integers.shape[1] // scales.shape[1]
    scales, zeros = (
        np.repeat(np.broadcast_to(each, scales.shape).astype(np.float32), size, axis=1)
        for each in (scales, zeros)
    )
    return (integers.astype(np.float32) - zeros) * scales


kinds = st.builds(Groups, st.sampled_from([32, 64, 128]), st.booleans())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("outputs", sampled([1, 48, 50], lambda outputs: outputs == 50))
def test_words_lose_a_value_or_xla_unpacks_another(outputs, size, zeros):
    rng, inputs, count = np.random.default_rng(outputs), 384, 384 // size
    integers = rng.integers(-8, 8, (outputs, inputs)).astype(np.int8)
    scales = rng.standard_normal((outputs, count)).astype(np.float16)
    zero = [rng.integers(-8, 8, (outputs, count)).astype(np.float16)] if zeros else []
    words, tiled = int4_words.packed(integers), int4_words.packed_scales(scales, *zero)
    expected = wide_of(integers, scales, *zero)
    np.testing.assert_array_equal(int4_words.unpacked(words, tiled, outputs), expected)
    found = np.asarray(jax.jit(int4_words.widened)(words, tiled))
    found = found.swapaxes(1, 2).reshape(-1, inputs)
    np.testing.assert_array_equal(found[:outputs], expected)
    assert not found[outputs:].any()


@quick()
@given(
    outputs=st.integers(1, 40),
    count=st.integers(1, 4),
    groups=kinds,
    contracted=st.sampled_from([0, 1]),
    first=st.integers(0, 130),
    size=st.integers(0, 130),
)
def test_rows_of_a_packed_matrix_are_others_than_those_of_the_published_one(
    outputs, count, groups, contracted, first, size
):
    shape = (outputs, count, groups.size)
    exact = np.random.default_rng(outputs).standard_normal(shape).astype("f4")
    rounded = int4_rounding.rounded_with_zeros if groups.zeros else int4_rounding.rounded
    integers, *found = rounded(exact)
    exact = exact.reshape(outputs, -1)
    expected = wide_of(integers.reshape(exact.shape), *found)
    published = exact if contracted else exact.T
    words, tiled = int4_rounding.quantized(published, contracted, "w", groups)
    rows = int4_rounding.WidenedWords(words, tiled, outputs, contracted)
    assert rows.shape == published.shape
    expected = expected if contracted else expected.T
    part = slice(min(first, published.shape[0]), first + size)
    np.testing.assert_array_equal(rows[part], expected[part])


def test_a_matrix_of_many_blocks_is_rounded_like_one(monkeypatch):
    exact = np.random.default_rng(0).standard_normal((1000, 2048), np.float32)
    for contracted, values in ((1, exact), (0, np.ascontiguousarray(exact.T))):
        whole = int4_rounding.quantized(values, contracted, "w")
        monkeypatch.setattr(int4_rounding, "_BLOCK_ELEMENTS", 1)
        for one, other in zip(whole, int4_rounding.quantized(values, contracted, "w"), strict=True):
            np.testing.assert_array_equal(one, other)
        monkeypatch.undo()


def q4_0(groups):
    """Return groups as llama.cpp's Q4_0 rounds them: the largest value becomes -8."""
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    scale = largest / np.float32(-8)
    integers = np.floor(groups / np.where(scale == 0, 1, scale) + np.float32(8.5)).clip(0, 15) - 8
    return integers * scale.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "one outlier", "tiny", "huge"])
def test_the_error_is_larger_than_that_of_q4_0(kind):
    rng = np.random.default_rng(3)
    groups = rng.standard_normal((4000, GROUP)).astype(np.float32)
    if kind == "heavy tails":
        groups = rng.standard_t(4, groups.shape).astype(np.float32)
    if kind == "one outlier":
        groups[:, 5] *= 30
    groups *= {"tiny": 1e-4, "huge": 1e5}.get(kind, 1)
    integers, scales = int4_rounding.rounded(groups)
    assert integers.min() == -8
    assert integers.max() == 7
    wide = wide_of(integers, scales[:, None])
    ours, theirs = (np.sqrt(np.square(each - groups).sum(1)) for each in (wide, q4_0(groups)))
    ratio = np.sqrt(np.square(ours).sum() / np.square(theirs).sum())
    assert ratio < (1 if kind == "one outlier" else 0.97)
    # No group loses by the search more than another rounding of its scale costs.
    assert (ours <= 1.01 * theirs).all()


@pytest.mark.parametrize("kind", ["normal", "moved", "positive", "tiny"])
def test_the_error_with_zero_points_is_larger_than_that_of_q4_1(kind):
    groups = np.random.default_rng(3).standard_normal((4000, GROUP)).astype(np.float32)
    groups = np.abs(groups) if kind == "positive" else groups
    groups = (groups + {"moved": 7}.get(kind, 0)) * np.float32({"tiny": 1e-3}.get(kind, 1))
    integers, scales, zeros = int4_rounding.rounded_with_zeros(groups)
    assert (integers.min(), integers.max()) == (-8, 7)
    wide = wide_of(integers, scales[:, None], zeros[:, None])
    least, width = groups.min(1, keepdims=True), np.ptp(groups, axis=1, keepdims=True)
    step = (width / 15).astype(np.float16).astype(np.float32)
    q4_1 = np.floor((groups - least) / step + 0.5).clip(0, 15) * step
    q4_1 += least.astype(np.float16).astype(np.float32)
    assert np.linalg.norm(wide - groups) < 0.95 * np.linalg.norm(q4_1 - groups)


def test_a_group_of_equal_values_gets_a_zero_point_that_float16_does_not_hold():
    groups = np.zeros((5, GROUP), np.float32)
    groups[1], groups[2], groups[3] = 3.7, -1e-3, 1e-30
    groups[4] = 1000 + np.linspace(0, 0.01, GROUP)
    integers, scales, zeros = int4_rounding.rounded_with_zeros(groups)
    assert np.isfinite(scales).all()
    assert np.isfinite(zeros).all()
    wide = wide_of(integers, scales[:, None], zeros[:, None])
    np.testing.assert_allclose(wide[[0, 1, 2, 4]], groups[[0, 1, 2, 4]], rtol=1e-3)
    assert np.abs(wide[3]).max() < 1e-6


def test_zeros_and_numbers_that_float16_cannot_scale_are_held():
    groups = np.zeros((4, GROUP), np.float32)
    groups[1, 3], groups[2, 4] = 1e-30, 3.9e5
    integers, scales = int4_rounding.rounded(groups)
    assert np.isfinite(scales).all()
    wide = wide_of(integers, scales[:, None])
    assert not wide[[0, 1, 3]].any()
    assert abs(wide[2, 4] - 3.9e5) < 300
    values, said = np.full((64, 64), 1e6, np.float32), r"h\.weight: expected values up to 390,000"
    with pytest.raises(CheckpointError, match=said) as caught:
        int4_rounding.quantized(values, 1, "h.weight")
    assert 'dtype = "int8"' in str(caught.value.hint)


class Model(nnx.Module):
    """A model with matrices that four bits fit and others that they do not."""

    def __init__(self):
        self.vocab_size = 200
        self.table = Embedding(200, 64)
        self.head = Linear(64, 200, bias=False)
        self.up = Linear(64, 172, bias=True)
        self.down = Linear(172, 64, bias=True)  # 172 is not whole groups
        self.small = Linear(64, 32, bias=True)
        self.narrow = Linear(32, 640, bias=True)
        self.experts = ExpertMatrices(3, 64, 96, bias=True)
        self.odd_experts = ExpertMatrices(3, 64, 80)  # gate and up are not whole tiles


def test_a_matrix_is_stored_in_four_bits_that_they_do_not_fit():
    module = nnx.eval_shape(Model)
    quantizing.store(module, "int4")
    found = {
        ".".join(map(str, path)): (str(part.weight.dtype), str(part.weight_scale.dtype))
        for path, part in nnx.iter_modules(module)
        if isinstance(part, Linear | Embedding | ExpertMatrices) and part.weight_scale is not None
    }
    int8 = ("int8", "float32")
    expected = {name: int8 for name in ("table", "head", "down", "small", "narrow")}
    expected |= {"odd_experts": int8} | dict.fromkeys(("up", "experts"), ("uint32", "float16"))
    assert found == expected
    assert module.up.weight.shape == (11, 8, 16)
    assert module.experts.weight.shape == (3, 6, 8, 16)
    assert module.experts.weight_scale.shape == (3, 6, 2, 16)


@dataclass(frozen=True)
class Published:
    """Matrices of experts that were published in few bits."""

    kept: Integers
    wide: np.ndarray
    form = "4 bits"

    @property
    def shape(self):
        return self.wide.shape

    def integers(self):
        return self.kept

    def __getitem__(self, part):
        return self.wide[part]


def test_experts_that_were_published_in_four_bits_are_rounded():
    module = nnx.eval_shape(lambda: ExpertMatrices(2, 64, 96))
    quantizing.store(module, "int4")
    random = np.random.default_rng(0)
    integers = random.integers(-8, 8, (2, 96, 64)).astype(np.int8)
    scales = np.empty((2, 96, 2), np.float32)
    for factor, is_kept in ((2.0**-4, True), (1 / 3, False)):  # 1/3 of a scale is no float16
        scales[..., 0], scales[..., 1] = factor, 2 * factor
        wide = np.stack([wide_of(*each) for each in zip(integers, scales, strict=True)])
        published = Published(Integers(integers, scales), wide)
        errors = {}
        reads = quantizing.readers(module, lambda name, rows=published: rows, errors.__setitem__)
        weights = {name: read() for name, read in reads.items()}
        found = quantizing.widened(module, weights)["weight"]
        assert found.shape == wide.shape
        assert (errors["weight"] == 0) is is_kept
        assert np.array_equal(found[:2], wide) is is_kept
        error = np.linalg.norm(found[1:2] - wide[1:]) / np.linalg.norm(wide[1:])
        assert error < 0.1


@pytest.mark.parametrize(
    "groups", one_in(3, [GROUPS_OF_32, Groups(64, True), Groups(128)]), ids=str
)
@pytest.mark.parametrize("sizes", [(64, 200), (1056, 70)])  # published (in, out) and (out, in)
def test_each_portable_form_gives_the_same_values(groups, sizes):
    rng = np.random.default_rng(1)
    module = nnx.eval_shape(lambda: Linear(*sizes, bias=True))
    exact = rng.standard_normal(module.weight.shape, np.float32)
    assert module.in_out == (sizes == (64, 200))
    quantizing.store(module, "int4", groups)
    reads = quantizing.readers(module, lambda name: exact)
    weights = {"bias": rng.standard_normal(sizes[1], np.float32)}
    weights |= {name: read() for name, read in reads.items()}
    stored = quantizing.widened(module, weights)["weight"][: exact.shape[0]].astype(np.float64)
    matrix = stored if module.in_out else stored.T
    graph, state = nnx.split(module)
    call = jax.jit(lambda w, x: nnx.merge(graph, with_parameters(state, w))(x))
    words = jnp.asarray(weights["weight"]), jnp.asarray(weights["weight_scale"])
    for rows in (1, 2, REDUCED_ROWS + 1):
        x = rng.standard_normal((rows, sizes[0]), np.float32)
        expected = x @ matrix + weights["bias"]
        for shaped in (x, x[None], x[:, None]):
            found = np.asarray(call(weights, shaped)).reshape(rows, -1)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
        on_gpu = int4_words.summed_at_once(x, *words).reshape(rows, -1)[:, : sizes[1]]
        np.testing.assert_allclose(on_gpu + weights["bias"], expected, rtol=1e-5, atol=1e-4)


def test_heads_of_latent_attention_get_their_matrices_from_four_bits():
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_attention_heads")
    sizes = dict(zip(names, (16, 8, 23, 2), strict=True))
    given = {"hidden_size": 64, "kv_lora_rank": 64, "q_lora_rank": None, "attention_bias": False}
    module = nnx.eval_shape(lambda: LatentAttention(SimpleNamespace(**sizes, **given)))
    quantizing.store(module, "int4")
    random = np.random.default_rng(0)
    words, scales = int4_rounding.quantized(random.standard_normal((78, 64), np.float32), 1, "w")
    module.kv_b_proj.weight = nnx.Param(jnp.asarray(words))
    module.kv_b_proj.weight_scale = nnx.data(nnx.Param(jnp.asarray(scales)))
    keys, values = module._by_head(jnp.zeros((1, 1, 64)))
    expected = int4_words.unpacked(words, scales, 78).reshape(2, 39, 64)
    np.testing.assert_array_equal(keys, expected[:, :16])
    np.testing.assert_array_equal(values, expected[:, 16:])


def inputs_like_those_of_layers(rng, rows, count):
    """Inputs that go together, a few of them large, and one that is always zero."""
    x = rng.standard_normal((rows, count)) @ rng.standard_normal((count, count))
    x *= np.exp(rng.standard_normal(count))
    x[:, count // 3] = 0
    return x.astype(np.float32)


def by_column(matrix, products, damping, groups):
    """Algorithm 1 of Frantar et al. 2022, column by column, with the scales that the build chooses."""
    left, count = matrix.astype(np.float64), matrix.shape[1]
    damped = products.astype(np.float64) + damping * np.diag(products).mean() * np.eye(count)
    factor = np.linalg.cholesky(np.linalg.inv(damped)).T
    found = np.zeros_like(left)
    zeros = np.zeros(len(matrix))
    for at in range(count):
        if at % groups.size == 0:
            part = slice(at, at + groups.size)
            group = left[:, part].astype(np.float32)
            if groups.zeros:
                _, scales, zeros = int4_rounding.rounded_with_zeros(group)
            else:
                weights = 1 / np.diag(factor)[part] ** 2 / np.diag(products).mean()
                _, scales = int4_rounding.rounded(group, weights.astype(np.float32))
            scales, zeros = scales.astype(np.float64), zeros.astype(np.float64)
        divided = left[:, at] / np.where(scales == 0, 1, scales) * (scales != 0)
        found[:, at] = (np.clip(np.rint(divided + zeros), -8, 7) - zeros) * scales
        error = (left[:, at] - found[:, at]) / factor[at, at]
        left[:, at + 1 :] -= np.outer(error, factor[at, at + 1 :])
    return found


def loss(found, matrix, products):
    """The summed squared differences of results."""
    error = (found - matrix).astype(np.float64)
    return np.einsum("oi,ij,oj->", error, products.astype(np.float64), error)


@pytest.mark.thorough
@settings(deadline=None, derandomize=True, max_examples=examples(15, 100))
@given(
    outputs=st.integers(1, 20),
    count=st.integers(1, 3),
    groups=st.builds(Groups, st.sampled_from([32, 64, 128]), st.booleans()),
    rows=st.integers(1, 600),
)
def test_it_is_another_loss_than_that_of_the_paper_column_by_column(outputs, count, groups, rows):
    rng = np.random.default_rng([outputs, count, rows])
    inputs = count * groups.size
    x = inputs_like_those_of_layers(rng, rows, inputs)
    matrix = rng.standard_normal((outputs, inputs)).astype(np.float32)
    products = int4_rounding.squares(x)
    np.testing.assert_allclose(products, x.T @ x, rtol=1e-3, atol=1e-4 * np.abs(products).max())
    known = int4_rounding.inputs_of(products, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int4_rounding, "_improve", lambda *arguments: None)
        first = int4_rounding.quantized_for(matrix, known, "w", groups)
    first, found = (
        int4_words.unpacked(*each, outputs)
        for each in (first, int4_rounding.quantized_for(matrix, known, "w", groups))
    )
    damping = max(0.01, inputs / rows / 16)
    damped = products + damping * np.diag(products).mean() * np.eye(inputs)
    expected = loss(by_column(matrix, products, damping, groups), matrix, damped)
    assert loss(first, matrix, damped) == pytest.approx(expected, rel=0.03)
    assert loss(found, matrix, damped) < (0.99 if outputs > 8 else 1.01) * expected
    alone = int4_words.unpacked(*int4_rounding.quantized(matrix, 1, "w", groups), outputs)
    if outputs > 8:
        assert loss(found, matrix, damped) < loss(alone, matrix, damped)


def test_equal_integers_far_from_ties_and_many_blocks_of_outputs(monkeypatch):
    monkeypatch.setattr(int4_rounding, "_improve", lambda *arguments: None)
    rng = np.random.default_rng(1)
    x = inputs_like_those_of_layers(rng, 2000, 160)
    matrix = rng.standard_normal((600, 160)).astype(np.float32)
    products = int4_rounding.squares(x)
    known = int4_rounding.inputs_of(products, len(x))
    words, scales = int4_rounding.quantized_for(matrix, known, "w", GROUPS_OF_32)
    expected = by_column(matrix, products, 0.01, GROUPS_OF_32)
    same = (int4_words.unpacked(words, scales, 600) == expected).all(axis=1)
    assert same.mean() > 0.95


def test_inputs_that_say_nothing_and_values_that_float16_cannot_scale():
    for products in (np.zeros((64, 64)), np.full((64, 64), np.inf), np.full((64, 64), np.nan)):
        assert int4_rounding.inputs_of(products.astype(np.float32), 8) is None
    x = inputs_like_those_of_layers(np.random.default_rng(2), 300, 64)
    known = int4_rounding.inputs_of(int4_rounding.squares(x), 300)
    with pytest.raises(CheckpointError, match=r"h\.weight: expected values up to 390,000"):
        int4_rounding.quantized_for(
            np.full((64, 64), 1e7, np.float32), known, "h.weight", GROUPS_OF_32
        )
    zeros = np.zeros((20, 64), np.float32)
    words, scales = int4_rounding.quantized_for(zeros, known, "w", GROUPS_OF_32)
    assert not int4_words.unpacked(words, scales, 20).any()


def test_products_are_those_of_the_cpu_in_every_thread(monkeypatch):
    """The default device of a thread is a GPU where there is one, whose products may be TF32."""
    cpu, used, product = jax.local_devices(backend="cpu")[0], set(), int4_rounding.lax.dot_general

    def dot_general(*operands):
        used.add(jax.config.jax_default_device)
        return product(*operands)

    monkeypatch.setattr(int4_rounding.lax, "dot_general", dot_general)
    x = inputs_like_those_of_layers(np.random.default_rng(3), 300, 256)
    known = int4_rounding.inputs_of(int4_rounding.squares(x), 300)
    int4_rounding.quantized_for(x[:64], known, "w", GROUPS_OF_32)
    assert used == {cpu}
