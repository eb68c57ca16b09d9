"""Vision transformers: one tower, and what differs between ViT, DINO, CLIP and SigLIP as data.

image_table.py names the papers. Parameters have the names of the published tensors. The matrix of the patch
embedding is a convolution's, float32 in every stored dtype.

Shapes: B batch, T tokens (class token, registers, then patches by rows), N heads, H head size, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prejit.compiler.models.families.image_processing import ImageProcessing
from prejit.compiler.models.families.sentence import attention, biased_attention, product
from prejit.compiler.models.layers.linear import LayerNorm, Linear, gated
from prejit.compiler.models.parameters import part_of, place

Values = np.ndarray[Any, Any]


def _inner(config: Any) -> int:
    return int(config.intermediate_size)


@dataclass(frozen=True)
class BlockNames:
    """How a family publishes the parts of a layer, CLIP and SigLIP by default.

    Attributes:
        gate: of a gated MLP; the name of `up` if one matrix holds the gate and then `up`; empty: it has none.
        scales: factors of the results of attention and of the MLP; empty: there are none.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.out_proj"
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    gate: str = ""
    up: str = "mlp.fc1"
    down: str = "mlp.fc2"
    scales: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockFamily:
    """Differences between layers.

    Attributes:
        names: chosen by the configuration.
        inner: returns the width inside the MLP.
        biases: keys that say whether queries, keys, values, the output and the MLP have a bias; empty: they
            have.
        causal: whether a token sees only those before it, and itself.
        rotary: whether queries and keys of patches turn with their places.
    """

    names: Callable[[Any], BlockNames] = lambda config: BlockNames()
    inner: Callable[[Any], int] = _inner
    biases: tuple[str, str, str, str, str] = ("", "", "", "", "")
    causal: bool = False
    rotary: bool = False


@dataclass(frozen=True)
class ImageFamily:
    """Differences between towers.

    Attributes:
        block: its layers.
        layers, norm: names of the list of layers and of the norm behind them.
        patches: name of the patch embedding.
        patch_bias: whether that has a bias.
        leading, registers: names of the class token and of others before the patches; empty: there are none.
        positions: name of the table of positions, which has no rows for registers; empty: there is none.
        flat: whether the tables have no axis of size 1 before them.
        first_norm: name of the norm before the layers; empty: there is none.
        resampling: returns the matrix that maps the rows, or the columns, of the table to others, as
            `bicubic` does; None: pictures have the size of the table.
    """

    block: BlockFamily
    layers: str = "encoder.layer"
    norm: str = "layernorm"
    patches: str = "embeddings.patch_embeddings.projection"
    patch_bias: bool = True
    leading: str = "embeddings.cls_token"
    registers: str = ""
    positions: str = "embeddings.position_embeddings"
    flat: bool = False
    first_norm: str = ""
    resampling: Callable[[int, int], Values] | None = None


class ImageTower(nnx.Module):
    """A tower, from pixels to hidden states."""

    def __init__(self, family: ImageFamily, config: Any, processing: ImageProcessing) -> None:
        self.family, self.processing = family, processing
        self.patch, width = int(config.patch_size), int(config.hidden_size)
        self.grid = (processing.size[0] // self.patch, processing.size[1] // self.patch)
        self.table = int(config.image_size) // self.patch
        lead = () if family.flat else (1,)
        shape = (width, 3, self.patch, self.patch)
        place(self, f"{family.patches}.weight", nnx.Param(jnp.zeros(shape)))
        if family.patch_bias:
            place(self, f"{family.patches}.bias", nnx.Param(jnp.zeros(width)))
        self.count = 0  # of tokens before the patches
        if family.leading:
            token = nnx.Param(jnp.zeros((*lead, *lead, width)))
            place(self, family.leading, token)
            self.count = 1
        registers = int(config.num_register_tokens) if family.registers else 0
        if family.registers:
            place(self, family.registers, nnx.Param(jnp.zeros((1, registers, width))))
        if family.positions:
            rows = self.table**2 + self.count
            place(self, family.positions, nnx.Param(jnp.zeros((*lead, rows, width))))
        self.count += registers
        if family.first_norm:
            place(self, family.first_norm, LayerNorm(width, config.layer_norm_eps))
        angles = None
        if family.block.rotary:
            size = width // int(config.num_attention_heads)
            angles = patch_angles(self.grid, size, float(config.rope_theta), self.count)
        blocks = [TowerBlock(family.block, config, angles) for _ in range(config.num_hidden_layers)]
        place(self, family.layers, nnx.List(blocks))
        place(self, family.norm, LayerNorm(width, config.layer_norm_eps))

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Map pixels, uint8 [B, H, W, 3], to hidden states, float32 [B, T, D]."""
        x = self.embed(pixels)
        length = jnp.full(len(x), x.shape[1], jnp.int32)
        for block in part_of(self, self.family.layers):
            x = block(x, length)
        return part_of(self, self.family.norm)(x)

    def embed(self, pixels: jax.Array) -> jax.Array:
        """Map pixels to the tokens before the first layer: float32 [B, T, D]."""
        family, x = self.family, self._patches(normalized_pixels(pixels, self.processing))
        width = x.shape[-1]
        before = []
        if family.leading:
            before.append(part_of(self, family.leading)[...].reshape(1, width))
        if family.positions:
            table = part_of(self, family.positions)[...].reshape(-1, width)
            x = x + self._resampled(table[len(before) :])
            before = [token + table[:1] for token in before]
        if family.registers:
            before.append(part_of(self, family.registers)[...].reshape(-1, width))
        if before:
            tokens = jnp.concatenate(before)
            tokens = jnp.broadcast_to(tokens, (len(x), *tokens.shape))
            x = jnp.concatenate([tokens, x], axis=1)
        return part_of(self, family.first_norm)(x) if family.first_norm else x

    def _patches(self, x: jax.Array) -> jax.Array:
        """Map float32 [B, H, W, 3] to patches [B, T, D]; what is left at the edges is not used."""
        (rows, columns), size = self.grid, self.patch
        x = x[:, : rows * size, : columns * size]
        x = x.reshape(len(x), rows, size, columns, size, 3).transpose(0, 1, 3, 5, 2, 4)
        weight = part_of(self, f"{self.family.patches}.weight")[...]
        y = jnp.matmul(x.reshape(len(x), rows * columns, -1), weight.reshape(len(weight), -1).T)
        bias = f"{self.family.patches}.bias"
        return y + part_of(self, bias)[...] if self.family.patch_bias else y

    def _resampled(self, table: jax.Array) -> jax.Array:
        """Return the positions of the patches, float32 [T, D], from the table of another grid."""
        grid, resampling = self.grid, self.family.resampling
        if resampling is None or grid == (self.table, self.table):
            return table
        rows, columns = (resampling(self.table, size) for size in grid)
        square = table.reshape(self.table, self.table, -1)
        return jnp.einsum("ir,jc,rcd->ijd", rows, columns, square).reshape(-1, table.shape[-1])


class TowerBlock(nnx.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(
        self, family: BlockFamily, config: Any, angles: tuple[Values, Values] | None = None
    ) -> None:
        """Build a layer; `angles` are those of `patch_angles`."""
        names, width, inner = family.names(config), config.hidden_size, family.inner(config)
        self.names, self.heads = names, int(config.num_attention_heads)
        self.causal, self.activation = family.causal, str(config.hidden_act)
        self.angles = None if angles is None else tuple(map(_Constant, angles))
        has_bias = [not key or bool(getattr(config, key)) for key in family.biases]
        for name, bias in zip((*names.qkv, names.output), has_bias[:4], strict=True):
            place(self, name, product(width, width, bias=bias))
        joined = names.gate == names.up
        if names.gate and not joined:
            place(self, names.gate, product(width, inner, bias=has_bias[4]))
        place(self, names.up, product(width, inner * (1 + joined), bias=has_bias[4]))
        place(self, names.down, product(inner, width, bias=has_bias[4]))
        for name in names.norms:
            place(self, name, LayerNorm(width, config.layer_norm_eps))
        for name in names.scales:
            place(self, name, nnx.Param(jnp.ones(width)))

    def __call__(self, x: jax.Array, length: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, T, D]; in row b the first length[b] tokens are valid."""
        mixed = self._mix(part_of(self, self.names.norms[0])(x), length)
        x = self._added(x, part_of(self, self.names.output), mixed, 0)
        inner = self._widen(part_of(self, self.names.norms[1])(x))
        return self._added(x, part_of(self, self.names.down), inner, 1)

    def _added(self, x: jax.Array, linear: Linear, y: jax.Array, place_of: int) -> jax.Array:
        if not self.names.scales:
            return linear(y, residual=x)
        return x + linear(y) * part_of(self, self.names.scales[place_of])[...]

    def _widen(self, x: jax.Array) -> jax.Array:
        names = self.names
        up = part_of(self, names.up)
        if not names.gate:
            return up(x, activation=self.activation)
        if names.gate != names.up:
            return gated(part_of(self, names.gate), up, x, self.activation)
        gate, value = jnp.split(up(x), 2, axis=-1)
        return jax.nn.silu(gate) * value

    def _mix(self, x: jax.Array, length: jax.Array) -> jax.Array:
        query, keys, values = (part_of(self, name)(x) for name in self.names.qkv)
        if self.angles is not None:
            query, keys = (self._turned(each) for each in (query, keys))
        if not self.causal:
            rounds = part_of(self, self.names.qkv[0]).is_narrow
            return attention(query, keys, values, length, self.heads, rounds=rounds)
        query, keys, values = (
            each.reshape(*x.shape[:2], self.heads, -1) for each in (query, keys, values)
        )
        seen = np.tri(x.shape[1], dtype=bool)
        query = query * query.shape[-1] ** -0.5
        return biased_attention(query, keys, values, length, visible=jnp.asarray(seen))

    def _turned(self, x: jax.Array) -> jax.Array:
        assert self.angles is not None
        cos, sin = (each.values[:, None] for each in self.angles)
        heads = x.reshape(*x.shape[:2], self.heads, -1)
        first, second = jnp.split(heads, 2, axis=-1)
        turned = heads * cos + jnp.concatenate([-second, first], axis=-1) * sin
        return turned.reshape(x.shape)


class _Constant:
    """An array that is no parameter: flax would take a bare one for data of the module."""

    def __init__(self, values: Values) -> None:
        self.values = values


def normalized_pixels(pixels: jax.Array, processing: ImageProcessing) -> jax.Array:
    """Return pixels, uint8 [..., 3], as the model was trained with them: float32."""
    x = pixels.astype(jnp.float32) * np.float32(processing.factor)
    mean, deviation = (np.array(x, np.float32) for x in (processing.mean, processing.deviation))
    return (x - mean) / deviation


def patch_angles(
    grid: tuple[int, int], size: int, base: float, before: int
) -> tuple[Values, Values]:
    """Return cosines and sines by which the heads of each token turn, float32 [T, H] each.

    The angles are those of the center of a patch, between -1 and 1 in height and in width (Simeoni et al.
    2025, section 3.2, modeling_dinov3_vit.py). The `before` tokens before the patches do not turn.
    """
    frequencies = 1 / np.float32(base) ** (np.arange(size // 4) * (4 / size)).astype(np.float32)
    centers = [2 * ((np.arange(n, dtype=np.float32) + 0.5) / n) - 1 for n in grid]
    places = np.stack(np.meshgrid(*centers, indexing="ij"), -1).reshape(-1, 2)
    angles = np.float32(2 * np.pi) * places[:, :, None] * frequencies
    angles = np.tile(angles.reshape(len(places), -1), 2)
    still = np.zeros((before, size), np.float32)
    angles = np.concatenate([still, angles])
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def bicubic(old: int, new: int) -> Values:
    """Return the matrix of torch's bicubic interpolation, float32 [new, old]: align_corners=False."""
    return _interpolation(old, new, -0.75, 1.0)


def smooth_bicubic(old: int, new: int) -> Values:
    """Return the matrix of torch's bicubic interpolation with antialias=True: float32 [new, old]."""
    return _interpolation(old, new, -0.5, max(1.0, old / new), cut=True)


def _interpolation(old: int, new: int, a: float, stretch: float, *, cut: bool = False) -> Values:
    """Return weights of cubic convolution (Keys 1981). What lies outside is cut, or the edge again."""
    matrix = np.zeros((new, old))
    for row in range(new):
        center = (row + 0.5) * old / new - 0.5
        first, last = int(np.ceil(center - 2 * stretch)), int(np.floor(center + 2 * stretch))
        for at in range(first, last + 1):
            if not cut or 0 <= at < old:
                distance = abs(at - center) / stretch
                near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
                far = a * (distance**3 - 5 * distance**2 + 8 * distance - 4)
                weight = near if distance < 1 else far if distance < 2 else 0.0
                matrix[row, min(max(at, 0), old - 1)] += weight
        matrix[row] /= matrix[row].sum()
    return matrix.astype(np.float32)
