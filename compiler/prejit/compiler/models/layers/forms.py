"""How products and attention are computed: by XLA alone, or with the native kernels of a target.

A portable program has XLA's forms only. For a CPU target with a kernel library (kernel_library.py) a program
is lowered a second time, with calls of the kernels where they are faster; `using` says so to the modules of a
model while they are traced. In such a program every form, XLA's too, rounds x to bfloat16 where the matrix is
bfloat16 or int8 (kernels/linear.h), so the forms of a product differ by the order of its sums alone. A
portable program has no kernels to agree with and leaves x as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prejit.compiler.native.calls import KERNEL_CALLS
from prejit.compiler.native.products import Product

_ACTIVATIONS = {None: 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "relu": 3, "silu": 4}
_ACTIVATIONS["swish"] = _ACTIVATIONS["silu"]
"""By the names of transformers/activations.py; the numbers are those of kernels/linear.h."""


@dataclass(frozen=True)
class Forms:
    """What may be used for a target.

    Attributes:
        chosen: the form of products that were measured. Others have the kernel where it can compute them.
        met: every product that was traced is added.
    """

    chosen: Mapping[Product, str] = field(default_factory=dict)
    met: set[Product] = field(default_factory=set)

    def form(self, product: Product) -> str:
        """Of a product."""
        return self.chosen.get(product, product.forms[-1])


_FORMS: ContextVar[Forms | None] = ContextVar("forms", default=None)
_OUT_IN: ContextVar[bool] = ContextVar("out_in", default=False)


@contextmanager
def using(forms: Forms | None) -> Iterator[None]:
    """While the block runs, models are traced with these; None: with XLA's forms alone."""
    token = _FORMS.set(forms)
    try:
        yield
    finally:
        _FORMS.reset(token)


@contextmanager
def storing(*, out_in: bool) -> Iterator[None]:
    """While the block runs, matrices are made (out, in), as kernels read them; else as XLA wants each."""
    token = _OUT_IN.set(out_in)
    try:
        yield
    finally:
        _OUT_IN.reset(token)


def are_stored_out_in() -> bool:
    """What `storing` says."""
    return _OUT_IN.get()


def has_kernels() -> bool:
    """Whether what is traced now may call kernels."""
    return _FORMS.get() is not None


def form_of(product: Product) -> str | None:
    """The form of a product in what is traced now; None: XLA's, by the rules of decoder.py."""
    forms = _FORMS.get()
    if forms is None:
        return None
    forms.met.add(product)
    return forms.form(product)


@dataclass(frozen=True)
class Operand:
    """The matrix of a product, as a Linear has it.

    Attributes:
        weight: [out, in].
        scale: float32 [out], of an int8 matrix.
        bias: float32 [out].
    """

    weight: jax.Array
    scale: jax.Array | None = None
    bias: jax.Array | None = None

    @property
    def arrays(self) -> list[jax.Array]:
        """As the kernel takes them."""
        return [array for array in (self.weight, self.scale, self.bias) if array is not None]


def linear(
    x: jax.Array,
    operand: Operand,
    *,
    activation: str | None = None,
    up: Operand | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """`activation(x W^T + b) * (x U^T + c) + residual`, in one call of the kernel `linear`.

    x is rounded to bfloat16 unless W is float32; sums are float32.

    Args:
        x: float32 [..., in].
        operand: W and b.
        activation: a key of decoder.ACTIVATIONS; None: none.
        up: U and c, of W's dtype; None: no such factor.
        residual: float32 [..., out]; None: 0.
    """
    arrays = [x, *operand.arrays, *([] if up is None else up.arrays)]
    if residual is not None:
        arrays.append(residual)
    return _call(
        "linear",
        jax.ShapeDtypeStruct((*x.shape[:-1], operand.weight.shape[0]), jnp.float32),
        *arrays,
        bias=np.int32(operand.bias is not None),
        gated=np.int32(up is not None),
        residual=np.int32(residual is not None),
        activation=np.int32(_ACTIVATIONS[activation]),
    )


def attention(
    query: jax.Array,
    new: tuple[jax.Array, jax.Array],
    start: jax.Array,
    length: jax.Array,
    query_start: jax.Array,
    layer: tuple[jax.Array, jax.Array],
    *,
    scale: float,
    cap: float | None,
    window: int | None,
    heads: int | None = None,
    key_head: int = 0,
    value_head: int = 0,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Writes new keys and values into the cache, in place, and attends to it.

    Args:
        query: float32 [B, Q, N, H], of the positions from query_start on.
        new: keys and values, float32 [B, T, K, H].
        start: int32 [B], the position of the first of them.
        length: int32 [B], how many are valid.
        query_start: int32 [B].
        layer: the cache, [B, K, S, H].
        scale: of the scores.
        cap: soft bound of the scores.
        window: how many tokens each one sees.
        heads: N, where query has others behind its own; None: it has none.
        key_head: the first of the keys among those of new[0], which may have others.
        value_head: likewise of new[1].

    Returns:
        float32 [B, Q, N, H]; the cache.
    """
    arguments = (query, *new, start, length, query_start, *layer)
    shape = (*query.shape[:2], heads or query.shape[2], query.shape[3])
    results = (jax.ShapeDtypeStruct(shape, jnp.float32), *map(_shape, layer))
    mixed, keys, values = _call(
        "attention",
        results,
        *arguments,
        aliases={len(arguments) - 2: 1, len(arguments) - 1: 2},
        scale=np.float32(scale),
        softcap=np.float32(cap or 0),
        window=np.int32(window or 0),
        key_head=np.int32(key_head),
        value_head=np.int32(value_head),
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
    """Layer norm, where centred, or RMS norm of x [..., D], with `weight + offset` [D] and a bias [D]."""
    arrays = [x, weight, *([] if bias is None else [bias])]
    normed: jax.Array = _call(
        "norm",
        _shape(x),
        *arrays,
        centred=np.int32(centred),
        epsilon=np.float32(epsilon),
        offset=np.float32(offset),
    )
    return normed


def encoder_attention(
    query: jax.Array, keys: jax.Array, values: jax.Array, length: jax.Array, scale: float
) -> jax.Array:
    """Attention of every token to the valid ones of its row: float32 [B, T, N, H] and int32 [B]."""
    mixed: jax.Array = _call(
        "encoder_attention", _shape(query), query, keys, values, length, scale=np.float32(scale)
    )
    return mixed


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
