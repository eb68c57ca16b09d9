"""Rows of a KV cache: the vector of a head at a position, in the dtype of the cache.

A row of float32 or bfloat16 has H elements. One of int8 has H integers of -127 to 127 and, behind them, the
four bytes of the float32 by which they are multiplied: the largest magnitude of the vector / 127. So both
arrive in one stream, and whatever moves rows moves their factors. attention_vector.h writes the same bytes.

A vector with an element that is no finite number becomes NaN as a whole: it is not hidden. A vector whose
magnitudes are all below 2^-100 becomes zeros, so that no factor is a number that some processors flush.

Shapes: H head size, W width of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_FACTOR_BYTES = 4
_LEAST = 2.0**-100


def row_width(size: int, dtype: str) -> int:
    """Return W for a head size."""
    return size + _FACTOR_BYTES if dtype == "int8" else size


def stored_rows(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return vectors [..., H] of float32 as rows of a cache: [..., W]."""
    if jnp.dtype(dtype) != jnp.int8:
        return x.astype(dtype)
    most = jnp.abs(x).max(-1)
    factor = jnp.where(most >= _LEAST, most * jnp.float32(1 / 127), 0)
    inverse = jnp.where(factor > 0, 1 / factor, 0)
    factor = jnp.where(jnp.isfinite(x).all(-1), factor, jnp.nan)
    integers = lax.round(x * inverse[..., None], lax.RoundingMethod.TO_NEAREST_EVEN)
    integers = jnp.where(jnp.isfinite(factor)[..., None], integers, 0).astype(jnp.int8)
    tail = lax.bitcast_convert_type(factor, jnp.int8)
    return jnp.concatenate([integers, tail], -1)


def read_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return the elements [..., H] of rows [..., W] in their dtype, and the factors [...] of int8."""
    if rows.dtype != jnp.int8:
        return rows, None
    return rows[..., :-_FACTOR_BYTES], lax.bitcast_convert_type(
        rows[..., -_FACTOR_BYTES:], jnp.float32
    )
