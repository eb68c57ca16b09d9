"""Rotary positions: pairs of a head's components turn with the position, each pair at its frequency.

The frequencies must equal those of transformers 5, modeling_rope_utils.py, which needs torch; each function
here names the one that it follows. They are computed in float32 as there; only powers are computed in
float64 and rounded, which gives torch's result.

Sources: Su et al. 2021 (RoFormer), arXiv 2104.09864; for longer contexts Chen et al. 2023 (linear),
arXiv 2306.15595; Peng et al. 2023 (YaRN), arXiv 2309.00071; Ding et al. 2024 (LongRoPE),
arXiv 2402.13753; Grattafiori et al. 2024 (Llama 3), arXiv 2407.21783.

LongRoPE has two lists of factors: for texts up to the context of pretraining and for longer ones.
transformers chooses by the length of the text. When the text grows beyond that context, it computes the cache
again, because the cache holds turned keys. Here the longest context of the bundle's programs decides for all
of them, as in llama.cpp and vLLM the context that they start with: the result of a token then depends on no
bucket, chunk or neighbour, and no step is slow. Logits equal those of transformers for texts
up to the context of pretraining if programs end there, and for longer texts if they do not. A short text in
programs for long contexts is turned by the long factors, in transformers by the short ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from prejit.compiler.base.suggestions import shown
from prejit.compiler.models.layers.config_checks import ALPHA, GROWTH, check_rope
from prejit.compiler.models.layers.layer_config import require, unsupported

Frequencies = np.ndarray[Any, np.dtype[Any]]
"""Float32 [P], for the P pairs of a head that turn: H / 2 pairs, or fewer if a part of the head stays."""

Extra = Literal["", "alpha", "growth"]
"""A key of `rope_parameters` that only some families read: `alpha` makes the base of `dynamic` larger; with
`llama_4_scaling_beta` queries grow by the logarithm of their position."""


@dataclass(frozen=True)
class Rotary:
    """How the heads of a layer turn with the position.

    Attributes:
        frequencies: radians per position, for each of the P pairs.
        scale: factor of the turned vectors; it differs from 1 only for YaRN and LongRoPE.
        is_interleaved: whether component 2i pairs with 2i + 1, rather than i with i + P.
        growth: queries grow by 1 + growth * log(1 + (growth_start + position) // growth_positions).
        growth_positions: the context of pretraining, for the growth of queries.
        growth_start: the number of the first position, for the growth of queries.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    is_interleaved: bool = False
    growth: float = 0.0
    growth_positions: int = 1
    growth_start: int = 0


@dataclass(frozen=True)
class Turns:
    """How heads turn at new positions.

    Attributes:
        cos: cosines of the angles, float32 [B, T, 1, P].
        sin: sines of the angles, of the same shape.
        is_interleaved: as in Rotary.
        growth: factor of queries, float32 [B, T, 1, 1]; None for 1.
    """

    cos: jax.Array
    sin: jax.Array
    is_interleaved: bool
    growth: jax.Array | None


def frequencies(
    config: Any,
    size: int,
    *,
    context: int | None = None,
    layer_type: str | None = None,
    partial: bool = False,
    interleaved: bool = False,
    extra: Extra = "",
    theta: float | None = None,
) -> Rotary:
    """Return how the heads of a model turn.

    Args:
        config: transformers' configuration, with `rope_parameters`.
        size: H.
        context: the longest context of the programs; None for the longest that the model was made for.
        layer_type: the part of `rope_parameters` to read, for models that turn differently by layer.
        partial: whether the family uses `partial_rotary_factor`.
        interleaved: whether neighbouring components pair.
        extra: what else the family reads.
        theta: takes the place of `rope_theta`.

    Raises:
        CheckpointError: the kind of scaling is not supported, or its numbers give no frequencies.
    """
    key, parameters = "rope_parameters", config.rope_parameters
    if layer_type is not None:
        key, parameters = f"{key}.{layer_type}", parameters.get(layer_type)
    file = Path(config.name_or_path, "config.json")
    check_rope(file, key, parameters)
    parameters = _with_outer_keys(config, parameters, layer_type)
    if theta is not None:
        parameters = {**parameters, "rope_theta": theta}
    kind = parameters.get("rope_type")
    require(config, f"{key}.rope_type", kind, ["default", "dynamic", *_SCALED])
    share = parameters.get("partial_rotary_factor")
    # Its share does not turn, but the angles are those of whole heads.
    is_whole = kind == "proportional"
    if not partial and not is_whole:
        require(config, f"{key}.partial_rotary_factor", share, [None, 1.0])
    turned = size if is_whole or share is None else int(size * share)
    if turned % 2 or not 0 < turned <= size:
        name = f"head_dim x {key}.partial_rotary_factor" if partial else "head_dim"
        raise unsupported(config, f"{name}: expected an even number, found {turned}")
    check_rope(file, key, parameters, kind)
    base, others = parameters["rope_theta"], Rotary((), is_interleaved=interleaved)
    if extra == "alpha" and kind == "dynamic" and parameters.get("alpha"):
        check_rope(file, key, parameters, ALPHA)
        base *= parameters["alpha"] ** (size / (size - 2)) if size > 2 else 1
    if extra == "growth":
        check_rope(file, key, parameters, GROWTH)
        growth, positions = (parameters[name] for name in GROWTH)
        others = replace(others, growth=float(growth), growth_positions=positions)
    periods = _powers(base, turned)
    if kind not in _SCALED:
        # `dynamic` scales only contexts beyond max_position_embeddings, where a bundle ends: beyond it the
        # frequencies, and so the keys in the cache, would change with every token.
        return replace(others, frequencies=_rotary(1 / periods).frequencies)
    longest = config.max_position_embeddings
    context = longest if context is None else context
    try:
        with np.errstate(all="ignore"):
            rotary = _SCALED[kind](periods, parameters, longest, context)
        finite = all(map(math.isfinite, (*rotary.frequencies, rotary.scale)))
    except (ArithmeticError, ValueError):
        # Each number is valid but not together: log(rope_theta) is 0.
        finite = False
    if not finite:
        raise unsupported(
            config,
            f"{key}: expected numbers that give finite frequencies, found {shown(parameters)}",
        )
    if len(rotary.frequencies) != turned // 2:
        raise unsupported(
            config,
            f"{key}: expected {turned // 2} factors, one for each pair, in short_factor and long_factor, "
            f"found {len(rotary.frequencies)}",
        )
    return replace(others, frequencies=rotary.frequencies, scale=rotary.scale)


def first_components(config: Any, size: int, turned: int) -> Rotary:
    """Return how the first `turned` components of a head of this size turn, neighbours together.

    Raises:
        CheckpointError: `rotary_dim`, which says how many turn, does not fit.
    """
    if not isinstance(turned, int) or turned % 2 or not 0 < turned <= size:
        raise unsupported(
            config,
            f"rotary_dim: expected an even number up to {size}, the size of a head, found {turned!r}",
        )
    return replace(_rotary(1 / _powers(10000.0, turned)), is_interleaved=True)


def _with_outer_keys(
    config: Any, parameters: Mapping[str, Any], layer_type: str | None
) -> Mapping[str, Any]:
    """Return parameters with the keys that transformers reads outside of them."""
    if layer_type is not None:
        # _compute_yarn_parameters reads it beside the parts, never in them.
        return {**parameters, "truncate": config.rope_parameters.get("truncate", True)}
    if parameters.get("rope_type") not in _PRETRAINED or not hasattr(config, _POSITIONS):
        return parameters
    # standardize_rope_params prefers the key of the model when it makes the model
    positions = getattr(config, _POSITIONS)
    if positions is None:
        raise unsupported(config, f"{_POSITIONS}: expected an integer or no such key, found null")
    return {**parameters, _POSITIONS: positions}


def turns(rotary: Rotary, positions: jax.Array) -> Turns:
    """Return how heads turn at positions, int32 [B, T]."""
    positions = positions[:, :, None, None]
    angles = positions * jnp.asarray(rotary.frequencies, jnp.float32)
    growth = None
    if rotary.growth:
        counted = positions + rotary.growth_start
        periods = (counted // rotary.growth_positions).astype(jnp.float32)
        growth = 1 + rotary.growth * jnp.log(1 + periods)
    cos, sin = jnp.cos(angles) * rotary.scale, jnp.sin(angles) * rotary.scale
    return Turns(cos, sin, rotary.is_interleaved, growth)


def turn(x: jax.Array, turns: Turns) -> jax.Array:
    """Return heads [B, T, N, H] turned: component i pairs with i + P, and those from 2P on stay.

    This is rotate_half in transformers. If the heads are interleaved, component 2i pairs with 2i + 1.
    """
    cos, sin = turns.cos, turns.sin
    pairs = cos.shape[-1]
    if not pairs:
        return x
    kept = x[..., 2 * pairs :]
    if turns.is_interleaved:
        first, second = x[..., : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        both = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        turned = [both.reshape(*x.shape[:-1], 2 * pairs)]
    else:
        first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
        turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, kept] if kept.size else turned, axis=-1)


def _powers(base: float, size: int) -> Frequencies:
    """Return the positions in which each pair turns by one radian: base ** (i / P)."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return np.power(float(base), exponents.astype(np.float64)).astype(np.float32)


def _rotary(frequencies: Frequencies, scale: float = 1.0) -> Rotary:
    return Rotary(tuple(frequencies.tolist()), scale)


def _linear(
    periods: Frequencies, parameters: Mapping[str, Any], longest: int, context: int
) -> Rotary:
    """Follow _compute_linear_scaling_rope_parameters: all pairs turn slower by a factor."""
    return _rotary(1 / periods / parameters["factor"])


def _proportional(
    periods: Frequencies, parameters: Mapping[str, Any], longest: int, context: int
) -> Rotary:
    """Follow _compute_proportional_rope_parameters: the slowest pairs do not turn."""
    share = parameters.get("partial_rotary_factor")
    turned = int((1.0 if share is None else share) * 2 * len(periods) // 2)
    found = 1 / periods / (parameters.get("factor") or 1.0)
    return _rotary(np.where(np.arange(len(periods)) < turned, found, 0).astype(np.float32))


def _llama3(
    periods: Frequencies, parameters: Mapping[str, Any], longest: int, context: int
) -> Rotary:
    """Follow _compute_llama3_parameters: slow pairs turn slower by a factor, fast pairs as before."""
    factor, pretrained = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = 1 / periods
    wavelength = 2 * math.pi / original
    # Where low == high nothing lies between, and this is unused.
    smooth = (pretrained / wavelength - low) / (high - low)
    between = (1 - smooth) * original / factor + smooth * original
    fast, slow = wavelength < pretrained / high, wavelength > pretrained / low
    # Where high < low a pair may be both, and is slow there.
    return _rotary(np.where(slow, original / factor, np.where(fast, original, between)))


def _yarn(
    periods: Frequencies, parameters: Mapping[str, Any], longest: int, context: int
) -> Rotary:
    """Follow _compute_yarn_parameters: a ramp over the pairs, from as before to slower by a factor."""
    size, base = 2 * len(periods), parameters["rope_theta"]
    pretrained = parameters["original_max_position_embeddings"]
    factor = parameters["factor"] or longest / pretrained

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    scale = parameters.get("attention_factor")
    if scale is None:
        above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scale = magnitude(above) / magnitude(below) if above and below else magnitude(1)

    def pair(rotations: float) -> float:
        """Return the pair that turns this often within the context of pretraining."""
        return size * math.log(pretrained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(parameters.get("beta_fast") or 32), pair(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(size // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return _rotary(1 / (factor * periods) * (1 - kept) + 1 / periods * kept, scale)


def _longrope(
    periods: Frequencies, parameters: Mapping[str, Any], longest: int, context: int
) -> Rotary:
    """Follow _compute_longrope_parameters: a factor for each pair, from the list for this context."""
    pretrained = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or longest / pretrained
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(pretrained)) if factor > 1 else 1.0
    factors = parameters["long_factor" if context > pretrained else "short_factor"]
    if len(factors) != len(periods):
        return Rotary(tuple(factors))
    return _rotary(1 / (np.array(factors, np.float32) * periods), scale)


_POSITIONS = "original_max_position_embeddings"
_PRETRAINED = ("llama3", "yarn", "longrope")
_SCALED = {
    **{"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope},
    "proportional": _proportional,
}
