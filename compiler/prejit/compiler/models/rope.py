"""Rotary positions: pairs of a head's components turn with the position, each pair at its frequency.

The frequencies must equal those of transformers 5, modeling_rope_utils.py, which needs torch; each function
here names the one that it follows. They are computed in float32 as there, except that a power is taken
in float64 and rounded, which is what torch's comes to.

Sources: Su et al. 2021 (RoFormer), arXiv 2104.09864; for longer contexts Chen et al. 2023 (linear),
arXiv 2306.15595; Peng et al. 2023 (YaRN), arXiv 2309.00071; Grattafiori et al. 2024 (Llama 3),
arXiv 2407.21783.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prejit.compiler.models.decoder import require, unsupported

Frequencies = np.ndarray[Any, np.dtype[Any]]
"""Float32 [H / 2]."""

Turns = tuple[jax.Array, jax.Array]
"""Cosines and sines of the angles at new positions, each float32 [B, T, 1, H / 2]."""


@dataclass(frozen=True)
class Rotary:
    """How the heads of a model turn.

    Attributes:
        frequencies: radians a position, of each of the H / 2 pairs.
        scale: factor of the turned vectors; other than 1 only for YaRN.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0


def frequencies(config: Any) -> Rotary:
    """The turning of a model with this configuration.

    Raises:
        CheckpointError: a kind of scaling that is not built here.
    """
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    require(config, "rope_parameters.rope_type", kind, ["default", "dynamic", *_SCALED])
    partial = parameters.get("partial_rotary_factor")
    require(config, "rope_parameters.partial_rotary_factor", partial, [None, 1.0])
    if config.head_dim % 2:
        raise unsupported(config, f"head_dim: expected an even number, found {config.head_dim}")
    periods = _powers(parameters["rope_theta"], config.head_dim)
    if kind not in _SCALED:
        # `dynamic` scales contexts beyond max_position_embeddings alone, and a bundle ends there:
        # beyond it the frequencies, so the keys in the cache, would change with every token.
        return _rotary(1 / periods)
    return _SCALED[kind](periods, config, parameters)


def turns(rotary: Rotary, positions: jax.Array) -> Turns:
    """Cosines and sines for positions, int32 [B, T]."""
    angles = positions[:, :, None, None] * jnp.asarray(rotary.frequencies, jnp.float32)
    return jnp.cos(angles) * rotary.scale, jnp.sin(angles) * rotary.scale


def turn(x: jax.Array, turns: Turns) -> jax.Array:
    """Heads [B, T, N, H], turned: component i pairs with i + H / 2 (rotate_half in transformers)."""
    cos, sin = turns
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _powers(base: float, size: int) -> Frequencies:
    """Positions that a pair takes to turn by one radian: base ** (2i / H)."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return np.power(float(base), exponents.astype(np.float64)).astype(np.float32)


def _rotary(frequencies: Frequencies, scale: float = 1.0) -> Rotary:
    return Rotary(tuple(frequencies.tolist()), scale)


def _linear(periods: Frequencies, config: Any, parameters: Mapping[str, Any]) -> Rotary:
    """_compute_linear_scaling_rope_parameters: all pairs slower by a factor."""
    return _rotary(1 / periods / parameters["factor"])


def _llama3(periods: Frequencies, config: Any, parameters: Mapping[str, Any]) -> Rotary:
    """_compute_llama3_parameters: slow pairs slower by a factor, fast ones as they are."""
    factor, context = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = 1 / periods
    wavelength = 2 * math.pi / original
    with np.errstate(divide="ignore", invalid="ignore"):  # low == high: nothing lies between
        smooth = (context / wavelength - low) / (high - low)
        between = (1 - smooth) * original / factor + smooth * original
    fast, slow = wavelength < context / high, wavelength > context / low
    return _rotary(np.where(fast, original, np.where(slow, original / factor, between)))


def _yarn(periods: Frequencies, config: Any, parameters: Mapping[str, Any]) -> Rotary:
    """_compute_yarn_parameters: a ramp over the pairs from as they are to slower by a factor."""
    size, base = config.head_dim, parameters["rope_theta"]
    context = parameters["original_max_position_embeddings"]
    factor = parameters["factor"] or config.max_position_embeddings / context

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    scale = parameters.get("attention_factor")
    if scale is None:
        above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scale = magnitude(above) / magnitude(below) if above and below else magnitude(1)

    def pair(rotations: float) -> float:
        """The pair that turns so often over the original context."""
        return size * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(parameters.get("beta_fast") or 32), pair(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(size // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return _rotary(1 / (factor * periods) * (1 - kept) + 1 / periods * kept, scale)


_SCALED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
