"""x as the kernel `linear_integers` rounds it (kernels/linear_integers.cc), for measurements of accuracy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_STEPS = 253
"""Steps of the range of a row, from its least to its largest number or 0."""
_FEW_STEPS = 16
"""A row whose numbers have a mean size of fewer steps has second digits."""
_DIGIT = 254
"""A second digit is one part in so many of a step."""
_LEAST_RANGE = 1e-35
"""A smaller range counts as this one."""


def rounded(x: jax.Array) -> jax.Array:
    """Return x [..., D] with each row rounded to integers times a scale of the row."""
    largest, least = x.max(-1, keepdims=True, initial=0), x.min(-1, keepdims=True, initial=0)
    half = jnp.maximum(largest / 2 - least / 2, _LEAST_RANGE / 2)  # the whole may not be finite
    steps = x * (_STEPS / 2 / half)
    whole = jnp.round(steps)
    rest = jnp.round((steps - whole) * _DIGIT) / _DIGIT
    has_enough = jnp.abs(whole).mean(-1, keepdims=True) >= _FEW_STEPS
    return jnp.where(has_enough, whole, whole + rest) * (half / (_STEPS / 2))
