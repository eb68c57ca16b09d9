"""Weights that are stored in fewer bits than float32, in which everything else is stored and summed.

    float32     as published
    bfloat16    rounded to nearest, ties to even
    int8        symmetric, one float32 factor for each output (Dettmers et al. 2022, arXiv 2208.07339, section
                2.1, row-wise): w = q * scale, scale = max|w| / 127 over the inputs of an output

Only the matrices of Linear and Embedding are; norms and biases stay float32. An embedding and a head that is
tied to it have a factor for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from prejit.compiler.models.layers.linear import Embedding, Linear
from prejit.runtime.errors import CheckpointError

Values = np.ndarray[Any, Any]

_MAX = 127
_SCALE = "_scale"


def store(module: nnx.Module, dtype: str) -> None:
    """Gives the matrices of an abstract module the dtype that they are stored in.

    Args:
        module: its matrices are float32.
        dtype: `float32`, `bfloat16` or `int8`; with int8 each `weight` gets a `weight_scale`, float32 [out].
    """
    if dtype == "float32":
        return
    for _, part in nnx.iter_modules(module):
        if not isinstance(part, Linear | Embedding):
            continue
        shape = part.weight.shape
        part.weight = nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))
        if dtype == "int8":
            outputs = (shape[1 - part.contracted],)
            scale = nnx.Param(jax.ShapeDtypeStruct(outputs, jnp.float32))
            part.weight_scale = nnx.data(scale)  # it was None, so flax took it for a constant


def readers(module: nnx.Module, read: Callable[[str], Values]) -> dict[str, Callable[[], Values]]:
    """How to get the stored values of each matrix that is not stored as it was read, by parameter name.

    Args:
        module: abstract, from store.
        read: gives the float32 values of a parameter of the float32 module.

    Returns:
        Functions that raise CheckpointError where a value cannot be stored.
    """
    found: dict[str, Callable[[], Values]] = {}
    for path, part in nnx.iter_modules(module):
        if not isinstance(part, Linear | Embedding) or part.weight.dtype == jnp.float32:
            continue
        name = ".".join(map(str, (*path, "weight")))
        if part.weight_scale is None:
            found[name] = partial(_rounded, read, name)
        else:
            found[name] = partial(_integers, read, name, part.contracted)
            found[name + _SCALE] = partial(_scales, read, name, part.contracted)
    return found


def quantized(values: Values, contracted: int) -> tuple[Values, Values]:
    """A matrix as int8 and its factors.

    Args:
        values: float32 [a, b], finite.
        contracted: the axis of the inputs.

    Returns:
        int8 of the same shape, from -127 to 127, and float32 [out]; their product differs from values by at
        most half a factor (and rounding).
    """
    scale = _factors(values, contracted)
    integers = np.rint(values / np.expand_dims(scale, contracted))
    return np.clip(integers, -_MAX, _MAX).astype(np.int8), scale


def _factors(values: Values, contracted: int) -> Values:
    peak = np.maximum(
        values.max(axis=contracted, initial=0), -values.min(axis=contracted, initial=0)
    )
    # An output whose weights are all zero, or next to it, must not divide by zero.
    return np.maximum(peak / np.float32(_MAX), np.finfo(np.float32).tiny, dtype=np.float32)


def _integers(read: Callable[[str], Values], name: str, contracted: int) -> Values:
    return quantized(_finite(read(name), name, "int8"), contracted)[0]


def _scales(read: Callable[[str], Values], name: str, contracted: int) -> Values:
    return _factors(_finite(read(name), name, "int8"), contracted)


def _rounded(read: Callable[[str], Values], name: str) -> Values:
    with np.errstate(over="ignore"):
        return _finite(read(name).astype(ml_dtypes.bfloat16), name, "bfloat16")


def _finite(values: Values, name: str, dtype: str) -> Values:
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{name}: expected finite values that {dtype} can hold, found infinity or NaN",
            hint='build it with dtype = "float32"',
        )
    return values
