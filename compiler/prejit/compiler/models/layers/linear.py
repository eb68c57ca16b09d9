"""Matrix products and embeddings, in the dtypes that weights are stored in, and norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from prejit.compiler.base.stored_dtypes import stored_as
from prejit.compiler.models.layers import int4_words, kernel_calls
from prejit.compiler.models.layers.row_adapters import StackPlace, are_changed, changed
from prejit.compiler.native.products import KERNEL_OF, LOOP, WIDENED, Product

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}
"""Activations by their names in transformers/activations.py, ACT2CLS."""


class XIELU(nnx.Module):
    """Apertus' activation, with parameters in each layer (Huang and Schlag 2024, arXiv 2411.13010)."""

    def __init__(self) -> None:
        self.alpha_p, self.alpha_n = nnx.Param(jnp.zeros(1)), nnx.Param(jnp.zeros(1))
        self.beta, self.eps = nnx.Param(jnp.zeros(())), nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the activation of x."""
        beta = self.beta[...]
        above = jax.nn.softplus(self.alpha_p[...]) * x * x
        below = jnp.expm1(jnp.minimum(x, self.eps[...])) - x
        below = below * (beta + jax.nn.softplus(self.alpha_n[...]))
        return jnp.where(x > 0, above, below) + beta * x


class Linear(nnx.Module):
    """y = x W^T + b. W is one array, (out, in) or (in, out) as `is_stored_in_out` decides.

    It may be stored in bfloat16, or in int8 with `weight_scale`, a float32 scale for each output: see
    quantizing.py. In int4 it is words with scales of groups, in an order of their own: see int4_words.py.
    """

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, in_out: bool | None = None
    ) -> None:
        """Create the matrix (in, out) if `in_out`; if that is None, as `is_stored_in_out` decides."""
        self.inputs, self.outputs = inputs, outputs
        self.in_out = is_stored_in_out(inputs, outputs) if in_out is None else in_out
        shape = (inputs, outputs) if self.in_out else (outputs, inputs)
        self.weight = nnx.Param(jnp.zeros(shape))
        self.weight_scale: nnx.Param[jax.Array] | None = None
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None
        self.adapters: StackPlace | None = None
        self.imitated = ""  # the dtype whose kernels a measurement in float32 imitates

    @property
    def is_narrow(self) -> bool:
        """Whether the matrix is stored in fewer bits than float32."""
        return self.weight.dtype != jnp.float32

    @property
    def contracted(self) -> int:
        """The axis of W that holds the inputs, unless W is words."""
        return 0 if self.in_out else 1

    def __call__(
        self, x: jax.Array, *, activation: str | None = None, residual: jax.Array | None = None
    ) -> jax.Array:
        """Map float32 [..., in] to [..., out], through one of ACTIVATIONS, plus a residual."""
        if not are_changed(self.adapters):
            return self._computed(x, activation, residual)
        if activation is None:
            return changed(x, self._computed(x, None, residual), self.adapters)
        # A row without an adapter takes its activation where it does without adapters: the same bits.
        if self.form(x) in KERNEL_OF and kernel_calls.has_activation(activation):
            y = changed(x, self._computed(x), self.adapters, activation)
        else:
            y = ACTIVATIONS[activation](changed(x, self._computed(x), self.adapters))
        return y if residual is None else residual + y

    def _computed(
        self, x: jax.Array, activation: str | None = None, residual: jax.Array | None = None
    ) -> jax.Array:
        if (form := self.form(x)) in KERNEL_OF:
            compute = partial(kernel_calls.linear, x, self.operand, form=form)
            if kernel_calls.has_activation(activation):
                return compute(activation=activation, residual=residual)
            y = compute()
        else:
            y = self._dot(_imitating(self.imitated, x))
            y = y if self.bias is None else y + self.bias[...]
        y = y if activation is None else ACTIVATIONS[activation](y)
        return y if residual is None else residual + y

    def form(self, x: jax.Array) -> str | None:
        """Return the form of the product with x; None if `dot` is to choose."""
        return kernel_calls.form_of(self.product(x))

    def product(self, x: jax.Array) -> Product:
        """Return the product with x."""
        stored, rows = stored_as(self.weight.dtype), math.prod(x.shape[:-1])
        in_out = self.in_out and stored.words is None
        return Product(stored.name, rows, self.inputs, self.outputs, in_out, stored.name == "int8")

    @property
    def operand(self) -> kernel_calls.Operand:
        """The arrays, as the kernel takes them."""
        scale = None if self.weight_scale is None else self.weight_scale[...]
        bias = None if self.bias is None else self.bias[...]
        return kernel_calls.Operand(self.weight[...], scale, bias, self.outputs)

    def _dot(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...]
        if stored_as(weight.dtype).words is None:
            y = dot(x, weight, self.contracted, self.form(x))
            return scaled(y, self.weight_scale)
        assert self.weight_scale is not None
        return dot_of_words(x, weight, self.weight_scale[...], self.outputs)


_STEPS = 253
"""Steps of the range of a row, from its least to its largest number or 0."""
_FEW_STEPS = 16
"""A row whose numbers have a mean size of fewer steps has second digits."""
_PARTS = 256
"""A second digit is one of so many parts of a step."""
_LEAST_RANGE = 1e-33
"""A smaller range counts as this one."""
_LEAST_OF_GROUP = 2.0**-100
"""A group of smaller numbers counts as zeros."""


def rounded(x: jax.Array) -> jax.Array:
    """Return x [..., D] with each row rounded to integers times a scale: kernels/linear_digits.h."""
    largest, least = x.max(-1, keepdims=True, initial=0), x.min(-1, keepdims=True, initial=0)
    half, middle = largest / 2 - least / 2, largest / 2 + least / 2  # the whole may not be finite
    half = jnp.where(jnp.abs(middle) <= half / 16, jnp.maximum(largest, -least), half)
    half = jnp.maximum(half, _LEAST_RANGE / 2)
    parts = jnp.round(x * (_STEPS / 2 / half) * _PARTS)
    whole = jnp.floor((parts + _PARTS // 2) / _PARTS)
    size = jnp.abs(whole).mean(-1, keepdims=True)
    is_few = (size > 0) & (size < _FEW_STEPS)
    return jnp.where(is_few, parts / _PARTS, whole) * (half / (_STEPS / 2))


def rounded_groups(x: jax.Array) -> jax.Array:
    """Return x [..., D] with each group of 32 rounded so: kernels/linear_int4_round.h."""
    groups = x.reshape(*x.shape[:-1], -1, int4_words.GROUP)
    most = jnp.abs(groups).max(-1, keepdims=True)
    is_some = most > _LEAST_OF_GROUP
    whole = jnp.round(groups * jnp.where(is_some, 127 / most, 0))
    return (whole * (most / 127)).reshape(x.shape)


def gated(gate: Linear, up: Linear, x: jax.Array, activation: str) -> jax.Array:
    """Return `activation(gate(x)) * up(x)`: float32 [..., in] to [..., out]."""
    form = gate.form(x)
    is_fused = form == up.form(x) and (gate.bias is None) == (up.bias is None)
    is_fused = is_fused and gate.weight.dtype == up.weight.dtype
    is_fused = is_fused and not are_changed(gate.adapters, up.adapters)
    if is_fused and form in KERNEL_OF and kernel_calls.has_activation(activation):
        compute = partial(kernel_calls.linear, x, gate.operand, form=form)
        return compute(activation=activation, up=up.operand)
    return gate(x, activation=activation) * up(x)


def is_stored_in_out(inputs: int, outputs: int) -> bool:
    """Return whether XLA:CPU is faster with a matrix stored (in, out) than with (out, in).

    Kernels read (out, in), so a bundle with kernels stores all matrices so.

    For one token, (out, in) streams rows of 1024 and more at up to 94 % of the memory bandwidth. With shorter
    rows (in, out) is up to 1.5 x as fast, if its rows are longer and the result stays in the first-level
    cache. For several tokens XLA transposes a matrix stored (out, in) on every call. GPT-2-124M takes 0.93 x
    the time of all (out, in) for decode, 0.87 x for a batch of 4 and for prefill of 32 or 512 tokens.
    """
    return not kernel_calls.are_stored_out_in() and inputs < 1024 and inputs < outputs <= 4096


class Embedding(nnx.Module):
    """A table of rows, [number, D], stored like the matrix of a Linear; with int8 each row has a scale."""

    contracted = 1

    def __init__(self, number: int, width: int) -> None:
        self.weight = nnx.Param(jnp.zeros((number, width)))
        self.weight_scale: nnx.Param[jax.Array] | None = None
        self.imitated = ""  # as that of a Linear

    def __call__(self, index: jax.Array) -> jax.Array:
        """Return the rows of an int32 [...] index, float32 [..., D]; indexes are clipped to the table."""
        rows = _rows(self.weight[...], index)
        if self.weight_scale is None:
            return rows
        return rows * self.weight_scale[...].at[index].get(mode="clip")[..., None]

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the product of x [..., D] with every row, as a tied head computes it: [..., number]."""
        weight = self.weight[...]
        form = kernel_calls.form_of(_product(x, weight, self.contracted))
        if form in KERNEL_OF:
            scale = None if self.weight_scale is None else self.weight_scale[...]
            return kernel_calls.linear(x, kernel_calls.Operand(weight, scale), form=form)
        x = _imitating(self.imitated, x)
        return scaled(dot(x, weight, self.contracted, form), self.weight_scale)


def _rows(table: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows of a table, in float32.

    XLA:CPU cannot gather bfloat16: it converts the table, as a part of the gather. Without the barrier it
    moves that out of the loop over decode steps and converts the whole table: 154 MB for GPT-2.
    """
    if table.dtype != jnp.float32:
        table, index = lax.optimization_barrier((table, index))
    return table.at[index].get(mode="clip").astype(jnp.float32)


def scaled(y: jax.Array, scale: nnx.Param[jax.Array] | None) -> jax.Array:
    """Return y [..., out] times the scale of each output, if there are scales."""
    return y if scale is None else y * scale[...]


def _product(x: jax.Array, weight: jax.Array, contracted: int) -> Product:
    inputs, outputs = weight.shape[contracted], weight.shape[1 - contracted]
    rows, dtype = math.prod(x.shape[:-1]), str(weight.dtype)
    return Product(dtype, rows, inputs, outputs, contracted == 0, dtype == "int8")


def _imitating(dtype: str, x: jax.Array) -> jax.Array:
    """Return x as the kernels of a dtype round it."""
    if dtype == "int8":
        return rounded(x)
    return rounded_groups(x) if dtype == "int4" else x


def dot(x: jax.Array, weight: jax.Array, contracted: int, form: str | None = None) -> jax.Array:
    """Return the product over the last axis of x and one axis of a matrix, which is not rearranged.

    A matrix of another dtype is widened to float32, and sums are float32. In a program with kernels x is
    rounded to bfloat16 for a matrix in bfloat16, as the kernels do it: forms depend on the number of rows,
    and the numbers of a token must not depend on how many rows share its product.

    Args:
        x: float32 [..., in].
        weight: the matrix.
        contracted: the axis of the matrix that holds the inputs.
        form: one of XLA's forms (native/products.py), in a program with kernels. None, in a portable
            program, chooses by the number of rows.
    """
    if weight.dtype == jnp.float32:
        return lax.dot_general(x, weight, (((x.ndim - 1,), (contracted,)), ((), ())))
    rows = math.prod(x.shape[:-1])
    flat = x.reshape(-1, x.shape[-1])
    if form is None:
        form = WIDENED if are_many(rows, weight.size) else LOOP
        on_cpu = partial(_widened_dot, contracted=contracted, form=form)
        elsewhere = partial(dot_of_parts, contracted=contracted) if rows > 1 else on_cpu
        y = lax.platform_dependent(flat, weight, cpu=on_cpu, default=elsewhere)
    else:
        if weight.dtype == jnp.bfloat16:
            # XLA drops a pair of astype conversions, because it only loses precision.
            flat = lax.reduce_precision(flat, exponent_bits=8, mantissa_bits=7)
        y = _widened_dot(flat, weight, contracted, form)
    return y.reshape(*x.shape[:-1], -1)


def dot_of_words(x: jax.Array, words: jax.Array, scales: jax.Array, outputs: int) -> jax.Array:
    """Return the product over the last axis of x and a matrix in four bits: float32 [..., out].

    It is the form of portable programs, so x is not rounded. See `_widened_dot` for the barrier.
    """
    rows = x.reshape(-1, x.shape[-1])
    elsewhere = int4_words.summed_at_once if len(rows) <= REDUCED_ROWS else _dot_of_widened_words
    if are_many(len(rows), words.size * int4_words.IN_WORD):
        y = _dot_of_widened_words(rows, words, scales)
    else:
        y = lax.platform_dependent(rows, words, scales, cpu=int4_words.summed, default=elsewhere)
    return y.reshape(len(rows), -1)[:, :outputs].reshape(*x.shape[:-1], outputs)


def _dot_of_widened_words(x: jax.Array, words: jax.Array, scales: jax.Array) -> jax.Array:
    words, x = lax.optimization_barrier((words, x))
    wide = _after(x, int4_words.widened(words, scales))
    return lax.dot_general(x, wide, (((1,), (1,)), ((), ())))


def are_many(rows: int, elements: int) -> bool:
    """Return whether so many rows are worth a float32 copy of a matrix."""
    return rows > REDUCED_ROWS * (4 if elements > LARGE_MATRIX else 1)


REDUCED_ROWS = 8
"""Maximum rows for which XLA:CPU multiplies and sums in one loop, which reads bfloat16 and int8 directly."""
LARGE_MATRIX = 1 << 23
"""Elements of a matrix whose float32 copy fits no cache: the loop is faster for 4 times as many rows."""


def _widened_dot(x: jax.Array, weight: jax.Array, contracted: int, form: str) -> jax.Array:
    """Return the product of x [R, in] with a matrix that is not float32: float32 [R, out].

    XLA:CPU converts the operand of a dot as a whole. Many rows amortize that; for one row it costs 5 x the
    product. GPT-2-124M, two threads, ms a step (float32 dot | converted | this):

        1 row   20 | 110 (and 4.5 tokens/s as a bfloat16 dot) | 29 bfloat16, 23 int8
        4 rows  53 | 130 | 45 bfloat16, 29 int8
        128     144 | 310 | 156 bfloat16, 145 int8

    Without the barrier XLA moves the conversion of all weights out of the loop over decode steps, into 494 MB
    of float32. Without the added zero, which depends on x, it converts the weights of all layers before the
    first product, into the same 494 MB instead of 10.
    """
    rows = x.shape[0]
    weight, x = lax.optimization_barrier((weight, x))
    wide = weight.astype(jnp.float32)
    if form == WIDENED:
        return lax.dot_general(x, _after(x, wide), (((1,), (contracted,)), ((), ())))
    if rows > 1:
        return (x[:, None, :] * wide if contracted else x[:, :, None] * wide).sum(1 + contracted)
    # With a dimension of one row XLA would store all products in memory: 1400 ms instead of 30.
    return (x[0] * wide if contracted else x[0][:, None] * wide).sum(contracted)[None]


def dot_of_parts(x: jax.Array, weight: jax.Array, contracted: int) -> jax.Array:
    """Return the product of x [R, in] with a bfloat16 or int8 matrix: float32 [R, out], for tensor cores.

    x is the sum of three bfloat16 numbers, so only the sums are rounded, to float32. On an H200 8 rows times
    2048 x 8192 in bfloat16 take 14 µs; one loop over all, as on CPUs, 46; widened to float32 53.
    """
    high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    rest = jnp.where(jnp.isfinite(high), x - high, 0)  # inf - inf is no number
    middle = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
    parts = jnp.concatenate([high, middle, rest - middle]).astype(jnp.bfloat16)
    weight, parts = lax.optimization_barrier((weight, parts))  # see _widened_dot
    if weight.dtype != jnp.bfloat16:
        weight = _after(parts, weight.astype(jnp.bfloat16))
    dimensions = (((1,), (contracted,)), ((), ()))
    y = lax.dot_general(parts, weight, dimensions, preferred_element_type=jnp.float32)
    of_high, of_middle, of_low = y.reshape(3, len(x), -1)
    return of_high + (of_middle + of_low)


def _after(x: jax.Array, wide: jax.Array) -> jax.Array:
    """Return a matrix that XLA cannot convert before it has x [R, in]."""
    if not jax.sharding.get_abstract_mesh().empty:  # on a mesh not every device has x[0, 0]
        return wide
    bits = lax.bitcast_convert_type(x[0, 0].astype(jnp.float32), jnp.int32)
    zero = jnp.minimum(bits & 0x7FFFFFFF, 0)  # for any x, which XLA does not see
    return wide + zero.astype(wide.dtype)


def split(x: jax.Array, *axes: str | None) -> jax.Array:
    """Return x with its dimensions split over these axes of the mesh in context; x itself without a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return lax.with_sharding_constraint(x, PartitionSpec(*axes))


class LayerNorm(nnx.Module):
    """Layer norm (Ba et al. 2016). `offset` is added to the scale: Nemotron publishes scales minus 1.

    The width may be (N, H): then each of N heads has scales of its own.
    """

    def __init__(
        self,
        width: int | tuple[int, int],
        epsilon: float,
        *,
        scale: bool = True,
        bias: bool = True,
        offset: float = 0.0,
    ) -> None:
        self.weight = nnx.Param(jnp.full(width, 1 - offset)) if scale else None
        self.bias = nnx.Param(jnp.zeros(width)) if bias else None
        self.epsilon = epsilon
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x [..., D] with mean 0 and variance 1 along D, then scaled and shifted."""
        weight = jnp.ones(x.shape[-1]) if self.weight is None else self.weight[...]
        if kernel_calls.has_kernels() and weight.ndim == 1:
            bias = None if self.bias is None else self.bias[...]
            options: dict[str, Any] = {"epsilon": self.epsilon, "offset": self.offset}
            return kernel_calls.norm(x, weight, bias, centred=True, **options)
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        scale = weight + self.offset if self.offset else weight
        y = centred * lax.rsqrt(variance + self.epsilon) * scale
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Division by the root mean square along the last axis, then a scale.

    `offset` is added to the scale: Gemma publishes scales minus 1.
    """

    def __init__(
        self, width: int, epsilon: float, *, scale: bool = True, offset: float = 0.0
    ) -> None:
        self.weight = nnx.Param(jnp.full(width, 1 - offset)) if scale else None
        self.epsilon = epsilon
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the norm of x [..., width]."""
        weight = self.scales(x.shape[-1])
        if kernel_calls.has_kernels():
            return kernel_calls.norm(x, weight, epsilon=self.epsilon, offset=self.offset)
        mean_square = jnp.square(x).mean(-1, keepdims=True)
        scale = weight + self.offset if self.offset else weight
        return x * lax.rsqrt(mean_square + self.epsilon) * scale

    def scales(self, width: int) -> jax.Array:
        """Return the scale of each component, without the offset: float32 [width]."""
        return jnp.ones(width) if self.weight is None else self.weight[...]
