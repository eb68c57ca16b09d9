"""Calls of the native kernels while a model is traced, and which form each of its matrix products gets.

A portable program uses XLA's forms only. For a CPU target with a kernel library, a program is lowered a
second time with calls of native kernels; `using` makes that choice known to the layers. In such a program
every form, XLA's too, rounds x to bfloat16 where the matrix is bfloat16 (kernels/linear.h), so that the
forms of a product differ in the order of its sums only. A portable program has no kernel to agree with and
does not round x. Beside an int8 matrix x is rounded to int8, or to 16 bits in a model of the user
(kernels/linear_integers.h); these products have no other form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from prejit.compiler.native.products import KERNEL, KERNEL_CALLS, KERNEL_OF, Product

_ACTIVATIONS = {None: 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "relu": 3, "silu": 4}
_ACTIVATIONS["swish"] = _ACTIVATIONS["silu"]
"""Names of transformers/activations.py; the numbers are those of kernels/activation.h."""


def has_activation(name: str | None) -> bool:
    """Return whether the kernel computes an activation, or None for no activation."""
    return name in _ACTIVATIONS


@dataclass(frozen=True)
class Operand:
    """The arrays of a linear layer, as the kernel takes them.

    Attributes:
        weight: [out, in], or words (int4_words.py).
        scale: float32 [out], if the stored dtype has scales; of words float16.
        bias: float32 [out].
        outputs: the number of outputs, if weight is words.
    """

    weight: jax.Array
    scale: jax.Array | None = None
    bias: jax.Array | None = None
    outputs: int | None = None

    @property
    def arrays(self) -> list[jax.Array]:
        """The arrays that are present, in the kernel's order."""
        return [array for array in (self.weight, self.scale, self.bias) if array is not None]


def linear(
    x: jax.Array,
    operand: Operand,
    *,
    activation: str | None = None,
    up: Operand | None = None,
    residual: jax.Array | None = None,
    form: str = KERNEL,
) -> jax.Array:
    """Return `activation(x W^T + b) * (x U^T + c) + residual`, in one call of a kernel.

    x is rounded as kernels/linear.h says. With INTEGERS it is rounded to int8, and sums are exact.

    Args:
        x: float32 [..., in].
        operand: W and b.
        activation: a key of linear.ACTIVATIONS, or None.
        up: U and c, in the dtype of W; None leaves the factor out.
        residual: float32 [..., out], or None.
        form: one that calls a kernel.
    """
    arrays = [x, *operand.arrays, *([] if up is None else up.arrays)]
    if residual is not None:
        arrays.append(residual)
    forms = _FORMS.get()
    return _call(
        KERNEL_OF[form],
        jax.ShapeDtypeStruct(
            (*x.shape[:-1], operand.outputs or operand.weight.shape[0]), jnp.float32
        ),
        *arrays,
        bias=np.int32(operand.bias is not None),
        gated=np.int32(up is not None),
        residual=np.int32(residual is not None),
        activation=np.int32(_ACTIVATIONS[activation]),
        many_rows=np.int32(forms is not None and forms.many_rows),
    )


def experts(
    x: jax.Array,
    chosen: jax.Array,
    operand: Operand,
    *,
    activation: str | None = None,
    is_gated: bool = False,
) -> jax.Array:
    """Return the product of each token with the matrix of each of its experts, where that lies.

    Args:
        x: float32 [R, in], or [R, chosen, in].
        chosen: int32 [R, chosen], the experts.
        operand: the matrices of all experts, [E, out, in] or words, with `outputs`.
        activation: a key of linear.ACTIVATIONS, or None.
        is_gated: whether the second half of the outputs are factors of the activated first half.

    Returns:
        float32 [R, chosen, out], or half as many outputs.
    """
    assert operand.outputs is not None
    outputs = operand.outputs // 2 if is_gated else operand.outputs
    return _call(
        "experts",
        jax.ShapeDtypeStruct((*chosen.shape, outputs), jnp.float32),
        x,
        chosen,
        *operand.arrays,
        bias=np.int32(operand.bias is not None),
        gated=np.int32(is_gated),
        activation=np.int32(_ACTIVATIONS[activation]),
    )


def attention(
    query: jax.Array,
    new: tuple[jax.Array, jax.Array],
    start: jax.Array,
    length: jax.Array,
    query_start: jax.Array,
    layer: tuple[jax.Array, ...],
    *,
    scale: float,
    cap: float | None,
    window: int | None,
    heads: int | None = None,
    key_head: int = 0,
    value_head: int = 0,
    turns: Sequence[jax.Array] = (),
    is_interleaved: bool = False,
    norms: Sequence[jax.Array] = (),
    epsilon: float = 0.0,
    offset: float = 0.0,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Write new keys and values into the cache, in place, and attend to it.

    Args:
        query: float32 [B, Q, N, H], for the positions from query_start on.
        new: keys and values, float32 [B, T, K, H].
        start: int32 [B], the position of the first new token.
        length: int32 [B], the number of valid new tokens.
        query_start: int32 [B], the position of the first query.
        layer: the cache, [B, K, S, W].
        scale: factor of the scores.
        cap: soft bound of the scores, or None.
        window: number of positions that each query sees, or None for all.
        heads: N, if query holds other heads behind its own; None if it does not.
        key_head: the first key head in new[0], which may hold others.
        value_head: the first value head in new[1].
        turns: cosines and sines by which queries and new keys turn, float32 [B, T, 1, P]; empty: they stay.
        is_interleaved: whether component 2i of a head turns with 2i + 1, rather than i with i + P.
        norms: scales of the RMS norms of each query head and key head, before they turn, float32 [H]; empty:
            they have none. Without `turns` it must be empty.
        epsilon: of these norms.
        offset: added to their scales.

    Returns:
        float32 [B, Q, N, H]; the cache.
    """
    arguments = (query, *new, start, length, query_start, *layer)
    caches = len(arguments) - 2
    shape = (*query.shape[:2], heads or query.shape[2], query.shape[3])
    results = (jax.ShapeDtypeStruct(shape, jnp.float32), *map(_shape, layer))
    mixed, keys, values = _call(
        "attention",
        results,
        *(*arguments, *turns, *norms),
        aliases={caches: 1, caches + 1: 2},
        scale=np.float32(scale),
        softcap=np.float32(cap or 0),
        window=np.int32(window or 0),
        key_head=np.int32(key_head),
        value_head=np.int32(value_head),
        interleaved=np.int32(is_interleaved),
        epsilon=np.float32(epsilon),
        offset=np.float32(offset),
    )
    return mixed, (keys, values)


def norm(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    epsilon: float,
    centred: bool = False,
    offset: float = 0.0,
) -> jax.Array:
    """Return the layer norm (`centred`) or RMS norm of x [..., D], times `weight + offset`, plus `bias`."""
    arrays = [x, weight, *([] if bias is None else [bias])]
    return _call(
        "norm",
        _shape(x),
        *arrays,
        centred=np.int32(centred),
        epsilon=np.float32(epsilon),
        offset=np.float32(offset),
    )


def row_adapters(
    x: jax.Array,
    y: jax.Array,
    slots: jax.Array,
    down: jax.Array,
    up: jax.Array,
    *,
    layer: int,
    activation: str | None,
) -> jax.Array:
    """Return `activation(y + x A^T B)`, with A and B of each row's slot, where they lie.

    Args:
        x: float32 [B, T, in].
        y: float32 [B, T, out].
        slots: int32 [B], 0 for a row that keeps y.
        down: A, float32 [slots, L, rank, in].
        up: B, float32 [slots, L, rank, out].
        layer: of L.
        activation: a name for which `has_activation` is true.
    """
    return _call(
        "row_adapters",
        _shape(y),
        *(x, y, slots, down, up),
        aliases={1: 0},
        layer=np.int32(layer),
        activation=np.int32(_ACTIVATIONS[activation]),
    )


def choose(
    logits: jax.Array, bias: jax.Array, options: Sequence[jax.Array], position: jax.Array
) -> jax.Array:
    """Return the next token of each row: int32 [B], -1 for none.

    Args:
        logits: float32 [B, V], after penalties.
        bias: float32 [B, V], added to them.
        options: temperature, top-k, top-p, min-p and seeds, as in sampling_programs.SamplingInputs.
        position: int32 [B], of the new token.
    """
    token = jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32)
    return _call("choose", token, logits, bias, *options, position)


def encoder_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
    scale: float,
    *,
    rounds: bool,
) -> jax.Array:
    """Return attention of every token to the valid tokens of its row: float32 [B, T, N, H], int32 [B].

    With one row and lengths [S], S sentences lie in the row, and a token sees its own. With `rounds` all
    factors are rounded to bfloat16.
    """
    return _call(
        "encoder_attention",
        _shape(query),
        *(query, keys, values, length),
        scale=np.float32(scale),
        rounds=np.int32(rounds),
    )


def _call(
    kernel: str,
    results: Any,
    *arguments: jax.Array,
    aliases: dict[int, int] | None = None,
    **attributes: np.generic,
) -> Any:
    call = jax.ffi.ffi_call(KERNEL_CALLS[kernel], results, input_output_aliases=aliases)
    return call(*arguments, **attributes)


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@dataclass(frozen=True)
class Forms:
    """The forms of products for a target with kernels.

    Attributes:
        chosen: the form of each product that does not get its default form.
        many_rows: whether sums have the order that suits many rows, for any number of them. It belongs to a
            model: its programs of few rows and of many must agree.
        met: collects every product that is traced.
    """

    chosen: Mapping[Product, str] = field(default_factory=dict)
    many_rows: bool = False
    met: set[Product] = field(default_factory=set)

    def form(self, product: Product) -> str:
        """Return the form of a product."""
        return self.chosen.get(product, product.default_form)


_FORMS: ContextVar[Forms | None] = ContextVar("forms", default=None)
_OUT_IN: ContextVar[bool] = ContextVar("out_in", default=False)

T = TypeVar("T")


@contextmanager
def while_tracing(variable: ContextVar[Any], value: T) -> Iterator[T]:
    """Give a variable this value inside the block."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def using(forms: Forms | None) -> AbstractContextManager[Any]:
    """Trace models with these forms and with kernels inside the block; None means XLA's forms only."""
    return while_tracing(_FORMS, forms)


def storing(*, out_in: bool) -> AbstractContextManager[Any]:
    """Store matrices (out, in), as kernels read them, inside the block; otherwise as is fastest for XLA."""
    return while_tracing(_OUT_IN, out_in)


def are_stored_out_in() -> bool:
    """Return whether all matrices are stored (out, in)."""
    return _OUT_IN.get()


def has_kernels() -> bool:
    """Return whether the program that is traced now may call kernels."""
    return _FORMS.get() is not None


def form_of(product: Product) -> str | None:
    """Return the form of a product in the program that is traced now.

    None means a portable program, in which `linear.dot` chooses one of XLA's forms.
    """
    forms = _FORMS.get()
    if forms is None:
        return None
    forms.met.add(product)
    return forms.form(product)
