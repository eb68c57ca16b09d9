"""DeBERTa's attention: scores of contents and of distances, with the same matrices (He et al. 2021).

Each layer projects a table of embeddings of distances, which all layers share. Near distances have a row
each, far ones share rows by their logarithm. Only the rows that T tokens can need are projected.

Results agree with models/deberta_v2/modeling_deberta_v2.py of transformers 5. Shapes: B batch, T tokens,
N heads, H head size, D model width, R = 2T - 1 distances.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prejit.compiler.models.families.encoders import EncoderBlock, EncoderFamily
from prejit.compiler.models.families.sentence import biased_attention
from prejit.compiler.models.layers.layer_config import require, unsupported
from prejit.compiler.models.parameters import part_of

_VALUES: dict[str, tuple[Any, ...]] = {
    "relative_attention": (True,),
    "share_att_key": (True,),
    "position_biased_input": (False,),
    "norm_rel_ebd": ("layer_norm",),
    "conv_kernel_size": (0, None),
    "embedding_size": (None,),
    "attention_head_size": (None,),
}
"""The values of DeBERTa v3. The last three are keys that a file may leave out."""


def check(config: Any) -> None:
    """Check that attention is that of DeBERTa v3."""
    for key, values in _VALUES.items():
        found = getattr(config, key, None)
        if key == "embedding_size" and found == config.hidden_size:
            found = None
        require(config, key, found, values)
    kinds = sorted(config.pos_att_type or ())
    if kinds != ["c2p", "p2c"]:
        raise unsupported(
            config, f'pos_att_type: expected "p2c|c2p", found {config.pos_att_type!r}'
        )
    count = getattr(config, "position_buckets", None)
    if type(count) is not int or not 4 <= count < 2 * farthest(config):
        raise unsupported(
            config,
            f"position_buckets: expected an integer from 4 to {2 * farthest(config) - 1}, found {count!r}",
        )


def farthest(config: Any) -> int:
    """Return the distance from which on all share a row."""
    largest: int = config.max_relative_positions
    return largest if largest > 0 else int(config.max_position_embeddings)


def log_buckets(
    distance: np.ndarray[Any, Any], count: int, largest: int
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the bucket of each distance, as make_log_bucket_position of the reference, in its float32."""
    middle = count // 2
    far = np.maximum(np.abs(distance), middle).astype(np.float32) / np.float32(middle)
    logarithm = np.log(far.astype(np.float64)).astype(np.float32)
    steps = np.float32(np.log(np.float64(np.float32((largest - 1) / middle))))
    large = np.ceil(logarithm / steps * np.float32(middle - 1)) + middle
    near = np.abs(distance) <= middle
    return np.where(near, distance, large * np.sign(distance)).astype(np.int32)


class DisentangledBlock(EncoderBlock):
    """Attention and MLP, each with a norm after it."""

    def __init__(self, family: EncoderFamily, config: Any) -> None:
        super().__init__(family, config)
        self.buckets: int = config.position_buckets
        self.farthest = farthest(config)

    def mix(self, x: jax.Array, length: jax.Array, *shared: Any) -> jax.Array:
        """See EncoderBlock; `shared` are the table of distances and its norm."""
        table, norm = shared
        batch, count, _ = x.shape
        index = log_buckets(np.arange(1 - count, count), self.buckets, self.farthest)
        rows = np.clip(index + self.buckets, 0, 2 * self.buckets - 1)
        distances = norm(table(jnp.asarray(rows))[None])
        projections = [part_of(self, name) for name in self.names.qkv]
        query, keys, values = (
            project(x).reshape(batch, count, self.heads, -1) for project in projections
        )
        of_query, of_keys = (
            project(distances).reshape(2 * count - 1, self.heads, -1) for project in projections[:2]
        )
        scale = (3 * query.shape[-1]) ** -0.5
        query = query * scale
        # [T, T]: the place of the distance from the token that is seen to the one that sees it.
        place = jnp.arange(count)[:, None] - jnp.arange(count) + count - 1
        content = jnp.einsum("bqnh,rnh->bnqr", query, of_keys)
        position = jnp.einsum("bknh,rnh->bnkr", keys * scale, of_query)
        bias = _taken(content, place) + _taken(position, place.T).swapaxes(2, 3)
        return biased_attention(query, keys, values, length, bias=bias)


def _taken(scores: jax.Array, place: jax.Array) -> jax.Array:
    """Return for each row of scores [B, N, T, R] the columns [T, T] of that row."""
    shape = (*scores.shape[:2], *place.shape)
    return jnp.take_along_axis(scores, jnp.broadcast_to(place, shape), axis=3, mode="clip")
