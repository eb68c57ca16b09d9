"""Normalisation layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from prejit.compiler.models.layers import kernel_calls, product_forms


class LayerNorm(nnx.Module):
    """Layer norm (Ba et al. 2016)."""

    def __init__(self, width: int, epsilon: float) -> None:
        self.weight = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x [B, T, D] with mean 0 and variance 1 along D, then scaled and shifted."""
        if product_forms.has_kernels():
            weight, bias = self.weight[...], self.bias[...]
            return kernel_calls.norm(x, weight, bias, epsilon=self.epsilon, centred=True)
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        return centred * lax.rsqrt(variance + self.epsilon) * self.weight[...] + self.bias[...]


class RMSNorm(nnx.Module):
    """Division by the root mean square along the last axis, then a scale.

    `offset` is added to the scale: Gemma publishes scales minus 1.
    """

    def __init__(self, width: int, epsilon: float, *, offset: float = 0.0) -> None:
        self.weight = nnx.Param(jnp.full(width, 1 - offset))
        self.epsilon = epsilon
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the norm of x [..., width]."""
        if product_forms.has_kernels():
            return kernel_calls.norm(x, self.weight[...], epsilon=self.epsilon, offset=self.offset)
        mean_square = jnp.square(x).mean(-1, keepdims=True)
        scale = self.weight[...] + self.offset if self.offset else self.weight[...]
        return x * lax.rsqrt(mean_square + self.epsilon) * scale
