"""Stored values of matrices in fewer bits than float32, in which everything else is stored and computed.

    float32     as published
    bfloat16    rounded to nearest, ties to even
    int8        symmetric, one float32 scale for each output (Dettmers et al. 2022, arXiv 2208.07339, section
                2.1, row-wise): w = q * scale, scale = max|w| / 127 over the inputs of an output

The table of dtypes is base/stored_dtypes.py. Only the matrices of Linear and Embedding are stored so; norms
and biases stay float32. An embedding, and a head that is tied to it, has a scale for each token.
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

from prejit.compiler.base.stored_dtypes import STORED_DTYPES, StoredDtype
from prejit.compiler.models.layers.linear import Embedding, Linear
from prejit.runtime.errors import CheckpointError

Values = np.ndarray[Any, Any]

_SCALE = "_scale"


def store(module: nnx.Module, dtype: str) -> None:
    """Change the matrices of an abstract module from float32 to a stored dtype.

    Args:
        module: the module; its matrices are float32.
        dtype: a name in STORED_DTYPES. With int8 each `weight` gets a `weight_scale`, float32 [out].
    """
    stored = STORED_DTYPES[dtype]
    if not stored.is_narrow:
        return
    for _, part in nnx.iter_modules(module):
        if not isinstance(part, Linear | Embedding):
            continue
        shape = part.weight.shape
        part.weight = nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))
        if stored.has_scales:
            outputs = (shape[1 - part.contracted],)
            scale = nnx.Param(jax.ShapeDtypeStruct(outputs, jnp.float32))
            part.weight_scale = nnx.data(scale)  # it was None, which flax holds as a constant


def readers(module: nnx.Module, read: Callable[[str], Values]) -> dict[str, Callable[[], Values]]:
    """Return functions that give the stored values of each matrix that is not float32, by parameter name.

    Args:
        module: an abstract module, from `store`.
        read: returns the values of a parameter of the float32 module, finite float32.

    Returns:
        Functions that raise CheckpointError if the dtype cannot hold a value.
    """
    found: dict[str, Callable[[], Values]] = {}
    for path, part in nnx.iter_modules(module):
        if not isinstance(part, Linear | Embedding):
            continue
        stored = STORED_DTYPES[str(part.weight.dtype)]
        if not stored.is_narrow:
            continue
        name = ".".join(map(str, (*path, "weight")))
        if stored.has_scales:
            found[name] = partial(_integers, read, name, part.contracted, stored)
            found[name + _SCALE] = partial(_scales, read, name, part.contracted, stored)
        else:
            found[name] = partial(_rounded, read, name)
    return found


def quantized(
    values: Values,
    contracted: int | tuple[int, ...],
    stored: StoredDtype = STORED_DTYPES["int8"],
) -> tuple[Values, Values]:
    """Return a matrix as integers and scales.

    Args:
        values: float32 [a, b], finite; or of more axes.
        contracted: the axis of the inputs, or the axes.
        stored: an integer dtype.

    Returns:
        Integers of the same shape, from -stored.largest to stored.largest, and float32 of the shape without
        the contracted axes: [out]. Their product differs from the values by at most half a scale (and
        rounding).
    """
    scale = _factors(values, contracted, stored)
    integers = np.rint(values / np.expand_dims(scale, contracted))
    return np.clip(integers, -_largest(stored), _largest(stored)).astype(stored.name), scale


def _largest(stored: StoredDtype) -> int:
    assert stored.largest is not None, stored
    return stored.largest


def _factors(values: Values, contracted: int | tuple[int, ...], stored: StoredDtype) -> Values:
    peak = np.maximum(
        values.max(axis=contracted, initial=0), -values.min(axis=contracted, initial=0)
    )
    # The minimum prevents a division by zero for an output whose weights are all zero or nearly zero.
    scale = peak / np.float32(_largest(stored))
    return np.maximum(scale, np.finfo(np.float32).tiny, dtype=np.float32)


def _integers(
    read: Callable[[str], Values], name: str, contracted: int, stored: StoredDtype
) -> Values:
    return quantized(read(name), contracted, stored)[0]


def _scales(
    read: Callable[[str], Values], name: str, contracted: int, stored: StoredDtype
) -> Values:
    return _factors(read(name), contracted, stored)


def _rounded(read: Callable[[str], Values], name: str) -> Values:
    """Return the values as bfloat16, whose largest value is smaller than float32's."""
    with np.errstate(over="ignore"):
        values = read(name).astype(ml_dtypes.bfloat16)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{name}: expected values that bfloat16 can hold, found one that is larger",
            hint='build it with dtype = "float32"',
        )
    return values
