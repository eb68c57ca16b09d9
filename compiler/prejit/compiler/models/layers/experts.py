"""A mixture of experts: a router chooses a few MLPs for each token, and their results are added.

In a program with kernels one call multiplies all pairs of a token and an expert (kernels/experts.h).
Elsewhere two forms compute it. Few tokens read the matrices of their experts where they lie, in a loop that
multiplies and sums: a step reads each matrix once and copies none. Many tokens are sorted by expert, and each
block of tokens of one expert is a product with its matrix. A token meets its own experts in the order of its
router, and no expert is ever full, so its result depends on no other token (decision 0054).

Milliseconds of CPU time for 32 experts of 1024 x 768, 4 of them for each token, float32 and int8, by XLA:CPU:

    tokens      1           2           4             8
    loop        4.1 | 3.1   6.6 | 5.5   18.8 | 13.7   30.3 | 28.6
    blocks      6.0 | 4.8   7.4 | 6.9   15.7 | 9.6    28.1 | 30.3
    a gather    7.7 | 5.6   32 | 11     70 | 31       166 | 88

Sources: Shazeer et al. 2017, arXiv 1701.06538; Jiang et al. 2024 (Mixtral), arXiv 2401.04088; blocks of one
expert as in Gale et al. 2022 (MegaBlocks), arXiv 2211.15841.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from prejit.compiler.base.stored_dtypes import stored_as
from prejit.compiler.models.layers import kernel_calls
from prejit.compiler.models.layers.linear import ACTIVATIONS, RMSNorm, dot_of_words

FEW_PAIRS = 8
"""Maximum pairs of a token and an expert for which matrices are read where they lie."""
_BLOCKS = (8, 64)
"""The fewest and the most tokens of a block of one expert."""
_LAST_AXES = (((1,), (1,)), ((), ()))


@dataclass(frozen=True)
class Routing:
    """How a router chooses.

    Attributes:
        chosen: number of experts for each token.
        is_normalized: whether the shares of the chosen experts are divided by their sum.
        factor: factor of the shares.
        is_corrected: whether scores are sigmoids, to which a correction is added for the choice alone;
            otherwise they are a softmax.
        is_softmax: whether corrected scores are a softmax, too.
        is_sigmoid: whether scores without a correction are sigmoids, too.
        scales_inputs: whether shares are factors of what experts read, and not of their results.
        groups: number of groups of experts. The score of a group is the sum of its two best experts if
            scores are corrected, else that of its best.
        kept: number of groups, those of the best scores, from which a token's experts are chosen.
        added: what is added to the sum that shares are divided by.
        margin: with it the first and the second expert are chosen in turn, and each one's share is a softmax
            over those that are not behind it by more than this part of the larger score (Liu et al. 2024,
            arXiv 2409.12136).
    """

    chosen: int
    is_normalized: bool = True
    factor: float = 1.0
    is_corrected: bool = False
    is_softmax: bool = False
    is_sigmoid: bool = False
    scales_inputs: bool = False
    groups: int = 1
    kept: int = 1
    added: float = 0.0
    margin: float | None = None


class Router(nnx.Module):
    """Scores of E experts. The matrix stays float32: a rounded score may choose another expert."""

    def __init__(
        self,
        width: int,
        experts: int,
        *,
        bias: bool = False,
        correction: tuple[int, ...] | None = None,
    ) -> None:
        """Create a router; `correction` is the shape of the correction, [E] or [1, E]."""
        self.weight = nnx.Param(jnp.zeros((experts, width)))
        self.bias = nnx.Param(jnp.zeros(experts)) if bias else None
        self.e_score_correction_bias = (
            None if correction is None else nnx.Param(jnp.zeros(correction))
        )

    def __call__(self, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        """Choose experts for tokens x [R, D].

        Returns:
            the shares, float32 [R, chosen], largest first; the experts, int32 [R, chosen].
        """
        scores = lax.dot_general(x, self.weight[...], (((1,), (1,)), ((), ())))
        scores = scores if self.bias is None else scores + self.bias[...]
        if routing.margin is not None:
            return _mixed_sparsely(scores, routing.margin)
        correction = self.e_score_correction_bias
        is_softmax = routing.is_softmax or (correction is None and not routing.is_sigmoid)
        scores = jax.nn.softmax(scores) if is_softmax else jax.nn.sigmoid(scores)
        wanted = scores if correction is None else scores + correction[...]
        if routing.kept < routing.groups:
            wanted = jnp.where(_kept(wanted, routing), wanted, -jnp.inf)
        _, experts = lax.top_k(wanted, routing.chosen)
        shares = jnp.take_along_axis(scores, experts, axis=1)
        if routing.is_normalized:
            shares = shares / (shares.sum(-1, keepdims=True) + routing.added)
        return shares * routing.factor, experts


class NormedRouter(Router):
    """A router that reads the norm of a token; the shares of each expert have a factor."""

    def __init__(self, width: int, experts: int, epsilon: float) -> None:
        super().__init__(width, experts)
        self.scale = nnx.Param(jnp.ones(width))
        self.per_expert_scale = nnx.Param(jnp.ones(experts))
        self.norm = RMSNorm(width, epsilon, scale=False)

    def __call__(self, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        """See Router."""
        read = self.norm(x) * self.scale[...] * x.shape[-1] ** -0.5
        shares, experts = super().__call__(read, routing)
        return shares * self.per_expert_scale[...][experts], experts


def _mixed_sparsely(scores: jax.Array, margin: float) -> tuple[jax.Array, jax.Array]:
    """Return shares and experts of tokens with scores [R, E], by `Routing.margin`."""
    left, chosen = scores, list[tuple[jax.Array, jax.Array]]()
    for _ in range(2):
        best, expert = left.max(-1, keepdims=True), left.argmax(-1)[:, None]
        is_behind = (best - scores) / jnp.maximum(jnp.abs(scores), best) > margin
        shares = jax.nn.softmax(jnp.where(is_behind, -jnp.inf, left))
        chosen.append((jnp.take_along_axis(shares, expert, axis=1), expert))
        left = jnp.where(jnp.arange(scores.shape[1]) == expert, -jnp.inf, left)
    (first, one), (second, other) = chosen
    return jnp.concatenate([first, second], 1), jnp.concatenate([one, other], 1).astype(jnp.int32)


def _kept(scores: jax.Array, routing: Routing) -> jax.Array:
    """Return whether each expert is in one of the groups that a token keeps: [R, E]."""
    groups = scores.reshape(len(scores), routing.groups, -1)
    best, _ = lax.top_k(groups, 2 if routing.is_corrected else 1)
    _, kept = lax.top_k(best.sum(-1), routing.kept)
    is_kept = (kept[:, :, None] == jnp.arange(routing.groups)).any(1)
    return jnp.repeat(is_kept, groups.shape[2], axis=1)


class ExpertMatrices(nnx.Module):
    """The matrix of each expert, [E, out, in]; with int8 each output of each expert has a scale.

    In int4 it is the words and scales of each expert (int4_words.py): [E, tiles, in / 8, 16], in MXFP4, as
    published, if `is_mxfp4`.
    """

    contracted = 2

    def __init__(
        self, experts: int, inputs: int, outputs: int, *, bias: bool = False, is_mxfp4: bool = False
    ) -> None:
        self.inputs, self.outputs, self.is_mxfp4 = inputs, outputs, is_mxfp4
        self.weight = nnx.Param(jnp.zeros((experts, outputs, inputs)))
        self.weight_scale: nnx.Param[jax.Array] | None = None
        self.bias = nnx.Param(jnp.zeros((experts, outputs))) if bias else None

    @property
    def operand(self) -> kernel_calls.Operand:
        """The arrays, as the kernel takes them."""
        scale, bias = (
            None if each is None else each[...] for each in (self.weight_scale, self.bias)
        )
        return kernel_calls.Operand(self.weight[...], scale, bias, self.outputs)

    def dot(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """Return the product of x [in] or [R, in] with the matrix of an expert: float32 [out], [R, out]."""
        weight, scale, bias = (
            None if each is None else lax.dynamic_index_in_dim(each[...], expert, keepdims=False)
            for each in (self.weight, self.weight_scale, self.bias)
        )
        assert weight is not None
        if stored_as(weight.dtype).words is not None:
            assert scale is not None
            y = dot_of_words(x, weight, scale, self.outputs)
        else:
            wide = weight.astype(jnp.float32)
            # one loop reads a matrix for one token
            y = (x * wide).sum(-1) if x.ndim == 1 else lax.dot_general(x, wide, _LAST_AXES)
            y = y if scale is None else y * scale
        return y if bias is None else y + bias


@dataclass(frozen=True)
class ExpertGate:
    """How the outputs of the first matrix of an expert become its inner values.

    Attributes:
        activation: a key of ACTIVATIONS.
        alpha: instead of the activation gpt-oss has gate * sigmoid(alpha * gate), times up + 1; None: not so.
        limit: bound of gate from above, and of up from both sides, if alpha is given.
        is_gated: whether the matrix holds gate and up; otherwise the activation is all.
    """

    activation: str
    alpha: float | None = None
    limit: float = math.inf
    is_gated: bool = field(default=True, kw_only=True)

    def __call__(self, outputs: jax.Array) -> jax.Array:
        """Return the inner values of the MLP."""
        if not self.is_gated:
            return ACTIVATIONS[self.activation](outputs)
        gate, up = jnp.split(outputs, 2, axis=-1)
        if self.alpha is None:
            return ACTIVATIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@dataclass(frozen=True)
class Mixture:
    """The parts of a mixture.

    Attributes:
        up: gate and up of each expert, [E, 2 I, D]; [E, I, D] without a gate.
        down: [E, D, I].
        gate: how the outputs of `up` become inner values.
    """

    up: ExpertMatrices
    down: ExpertMatrices
    gate: ExpertGate

    def __call__(self, x: jax.Array, shares: jax.Array, experts: jax.Array) -> jax.Array:
        """Return the sum of the results of each token's experts, times their shares.

        Args:
            x: float32 [R, D].
            shares: float32 [R, chosen].
            experts: int32 [R, chosen].

        Returns:
            float32 [R, D].
        """
        if kernel_calls.has_kernels():
            results = self._by_kernel(x, experts)
        elif len(x) == 1 or experts.size <= FEW_PAIRS:
            results = self._by_pairs(x, experts)
        else:
            results = self._by_blocks(x, experts)
        return (results * shares[..., None]).sum(1)

    def _by_kernel(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        """Return the result of each pair, [R, chosen, D], by two calls for all pairs."""
        gate, up = self.gate, self.up.operand
        if gate.alpha is None and kernel_calls.has_activation(gate.activation):
            inner = kernel_calls.experts(
                x, experts, up, activation=gate.activation, is_gated=gate.is_gated
            )
        else:
            inner = gate(kernel_calls.experts(x, experts, up))
        return kernel_calls.experts(inner, experts, self.down.operand)

    def _by_pairs(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        """Return the result of each pair, [R, chosen, D], one pair after another."""
        chosen, flat = experts.shape[1], experts.reshape(-1)

        def one(pair: jax.Array, results: jax.Array) -> jax.Array:
            inner = self.gate(self.up.dot(x[pair // chosen], flat[pair]))
            return results.at[pair].set(self.down.dot(inner, flat[pair]))

        results = lax.fori_loop(0, len(flat), one, jnp.zeros((len(flat), x.shape[1])))
        return results.reshape(*experts.shape, -1)

    def _by_blocks(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        """Return the result of each pair, [R, chosen, D], a block of tokens of one expert after another."""
        chosen, pairs, count = experts.shape[1], experts.size, self.up.weight.shape[0]
        size = 1 << max(pairs // count - 1, 0).bit_length()
        size = min(max(size, _BLOCKS[0]), _BLOCKS[1])
        order = jnp.argsort(experts.reshape(-1), stable=True)
        tokens = (experts.reshape(-1, 1) == jnp.arange(count)).sum(0)  # of each expert
        blocks = (tokens + size - 1) // size
        first_pair, last_block = jnp.cumsum(tokens) - tokens, jnp.cumsum(blocks)

        def block(number: jax.Array, results: jax.Array) -> jax.Array:
            expert = jnp.searchsorted(last_block, number, side="right").astype(jnp.int32)
            at = (number - last_block[expert] + blocks[expert]) * size + jnp.arange(size)
            pair = order.at[first_pair[expert] + at].get(mode="clip")
            # Rows that fill up a block are zeros.
            pair = jnp.where(at < tokens[expert], pair, pairs)
            rows = x.at[pair // chosen].get(mode="fill", fill_value=0)
            result = self.down.dot(self.gate(self.up.dot(rows, expert)), expert)
            return results.at[pair].set(result, mode="drop")

        results = lax.fori_loop(0, last_block[-1], block, jnp.zeros((pairs, x.shape[1])))
        return results.reshape(*experts.shape, -1)
