"""x as kernels round it to integers, for measurements of accuracy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from prejit.compiler.models.layers.int4_words import GROUP

_STEPS = 253
"""Steps of the range of a row, from its least to its largest number or 0."""
_FEW_STEPS = 16
"""A row whose numbers have a mean size of fewer steps has second digits."""
_DIGIT = 254
"""A second digit is one part in so many of a step."""
_LEAST_RANGE = 1e-35
"""A smaller range counts as this one."""
_LEAST_OF_GROUP = 2.0**-100
"""A group of smaller numbers counts as zeros."""


def rounded(x: jax.Array) -> jax.Array:
    """Return x [..., D] with each row rounded to integers times a scale: kernels/linear_integers.cc."""
    largest, least = x.max(-1, keepdims=True, initial=0), x.min(-1, keepdims=True, initial=0)
    half = jnp.maximum(largest / 2 - least / 2, _LEAST_RANGE / 2)  # the whole may not be finite
    steps = x * (_STEPS / 2 / half)
    whole = jnp.round(steps)
    rest = jnp.round((steps - whole) * _DIGIT) / _DIGIT
    has_enough = jnp.abs(whole).mean(-1, keepdims=True) >= _FEW_STEPS
    return jnp.where(has_enough, whole, whole + rest) * (half / (_STEPS / 2))


def rounded_groups(x: jax.Array) -> jax.Array:
    """Return x [..., D] with each group of 32 rounded so: kernels/linear_int4_round.h."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    most = jnp.abs(groups).max(-1, keepdims=True)
    is_some = most > _LEAST_OF_GROUP
    whole = jnp.round(groups * jnp.where(is_some, 127 / most, 0))
    return (whole * (most / 127)).reshape(x.shape)
