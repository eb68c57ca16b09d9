"""Models that read images: a tower with a head, or a tower of images beside one of texts in one space.

Shapes: B batch, T tokens, D width, D' width of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.models.families.image_processing import ImageProcessing
from prejit.compiler.models.families.image_towers import (
    BlockFamily,
    ImageFamily,
    ImageTower,
    TowerBlock,
)
from prejit.compiler.models.families.sentence import (
    POOLING,
    Parts,
    WholeEncoder,
    normalized,
    product,
)
from prejit.compiler.models.families.sentence_layout import SentenceLayout
from prejit.compiler.models.layers.linear import Embedding, LayerNorm
from prejit.compiler.models.parameters import part_of, place


@dataclass(frozen=True)
class ImageSource:
    """A published model that reads images.

    Attributes:
        config: transformers' configuration.
        processing: of pictures.
        labels: names of the classes of images; empty: the model embeds.
        scores: activation of the labels, `softmax` or `sigmoid`.
        layout: the files of its tokenizer.
    """

    config: Any
    processing: ImageProcessing
    labels: tuple[str, ...]
    scores: str
    layout: SentenceLayout


class ImageModel(nnx.Module):
    """The interface of models that read images."""

    def image(self, pixels: jax.Array) -> jax.Array:
        """Map pixels, uint8 [B, H, W, 3], to embeddings or logits of labels, float32 [B, D']."""
        raise NotImplementedError

    def image_parts(self) -> tuple[str, ...]:
        """Return the names of the attributes whose parameters `image` uses."""
        raise NotImplementedError


@final
class SingleTower(ImageModel):
    """A tower of images alone: it embeds, or it names what an image shows."""

    def __init__(
        self, family: ImageFamily, source: ImageSource, prefix: str, *, with_mean: bool
    ) -> None:
        """Build a model.

        Args:
            family: of the tower.
            source: the model.
            prefix: name of the tower in a checkpoint with a head.
            with_mean: whether the head reads the mean of the patches behind the class token.
        """
        self.tower, self.with_mean = prefix, with_mean
        setattr(self, prefix, ImageTower(family, source.config, source.processing))
        self.labels = len(source.labels)
        if source.labels:
            width = source.config.hidden_size * (1 + with_mean)
            self.classifier = product(width, self.labels)

    def image(self, pixels: jax.Array) -> jax.Array:
        """See ImageModel."""
        tower: ImageTower = getattr(self, self.tower)
        x = tower(pixels)
        pooled = x[:, 0]
        if not self.labels:
            return pooled
        if self.with_mean:
            pooled = jnp.concatenate([pooled, x[:, tower.count :].mean(1)], axis=-1)
        return self.classifier(pooled)

    def image_parts(self) -> tuple[str, ...]:
        """See ImageModel."""
        return (self.tower, *(["classifier"] if self.labels else []))


class TextTower(nnx.Module):
    """The transformer of texts (see sentence.Transformer)."""

    shared: tuple[nnx.Module, ...] = ()

    def __init__(self, family: BlockFamily, config: Any) -> None:
        self.embeddings = TextEmbeddings(config)
        blocks = [TowerBlock(family, config) for _ in range(config.num_hidden_layers)]
        place(self, "encoder.layers", nnx.List(blocks))
        self.final_layer_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    @property
    def embedding(self) -> tuple[nnx.Module, ...]:
        """See Transformer."""
        return (self.embeddings,)

    @property
    def blocks(self) -> nnx.List[TowerBlock]:
        """See Transformer."""
        return part_of(self, "encoder.layers")

    @property
    def final(self) -> tuple[nnx.Module, ...]:
        """See Transformer."""
        return (self.final_layer_norm,)


class TextEmbeddings(nnx.Module):
    """Tokens and positions, summed."""

    def __init__(self, config: Any) -> None:
        self.token_embedding = Embedding(config.vocab_size, config.hidden_size)
        rows = config.max_position_embeddings
        self.position_embedding = Embedding(rows, config.hidden_size)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens, int32 [B, T], to [B, T, D]."""
        places = self.position_embedding(jnp.arange(tokens.shape[1]))
        return self.token_embedding(tokens) + places


@dataclass(frozen=True)
class TwoTowerFamily:
    """Differences between models of images and texts.

    Attributes:
        image: the tower of images.
        text: the layers of the tower of texts.
        projection: names of the products that end both towers; empty: the tower of texts ends with
            `text_model.head`, and attention pools images.
        pads: whether texts are filled up with a token that counts.
    """

    image: ImageFamily
    text: BlockFamily
    projection: tuple[str, ...]
    pads: bool


@final
class TwoTowers(WholeEncoder, ImageModel):
    """An encoder of texts, and `image`, which embeds images in the same space."""

    def __init__(self, family: TwoTowerFamily, source: ImageSource) -> None:
        text, image = source.config.text_config, source.config.vision_config
        super().__init__("text_model.", TextTower(family.text, text))
        self.family = family
        self.vision_model = ImageTower(family.image, image, source.processing)
        if family.projection:
            width = source.config.projection_dim
            for name, config in zip(family.projection, (text, image), strict=True):
                setattr(self, name, product(config.hidden_size, width, bias=False))
            self.logit_scale = nnx.Param(jnp.zeros(()))
            return
        self.transformer.head = product(text.hidden_size, text.projection_size)
        self.vision_model.head = AttentionPooling(image)
        self.logit_scale, self.logit_bias = (nnx.Param(jnp.zeros(1)) for _ in range(2))

    @property
    def ending(self) -> Parts:
        """See WholeEncoder."""
        names = self.family.projection
        return (getattr(self, names[0]) if names else self.transformer.head,)

    def finish(self, ending: Parts, hidden: jax.Array, length: jax.Array) -> jax.Array:
        """See WholeEncoder."""
        return normalized(ending[0](POOLING["lasttoken"](hidden, length)))

    def image(self, pixels: jax.Array) -> jax.Array:
        """See ImageModel."""
        x = self.vision_model(pixels)
        if not self.family.projection:
            return normalized(self.vision_model.head(x))
        return normalized(getattr(self, self.family.projection[1])(x[:, 0]))

    def image_parts(self) -> tuple[str, ...]:
        """See ImageModel."""
        return ("vision_model", *self.family.projection[1:])


class AttentionPooling(nnx.Module):
    """One learned token that attends to all others, then an MLP (Lee et al. 2019, arXiv 1810.00825)."""

    def __init__(self, config: Any) -> None:
        width, self.heads = config.hidden_size, int(config.num_attention_heads)
        self.activation: str = config.hidden_act
        self.probe = nnx.Param(jnp.zeros((1, 1, width)))
        place(self, "attention.in_proj", product(width, 3 * width))
        place(self, "attention.out_proj", product(width, width))
        self.layernorm = LayerNorm(width, config.layer_norm_eps)
        place(self, "mlp.fc1", product(width, config.intermediate_size))
        place(self, "mlp.fc2", product(config.intermediate_size, width))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [B, T, D] to [B, D]."""
        packed = part_of(self, "attention.in_proj")
        split = (*x.shape[:2], 3, self.heads, -1)
        query = packed(self.probe[...]).reshape(1, 3, self.heads, -1)[:, 0]
        _, keys, values = jnp.moveaxis(packed(x).reshape(split), 2, 0)
        scores = jnp.einsum("qnh,btnh->bnqt", query * query.shape[-1] ** -0.5, keys)
        mixed = jnp.einsum("bnqt,btnh->bqnh", jax.nn.softmax(scores), values)
        y = part_of(self, "attention.out_proj")(mixed.reshape(len(x), 1, -1))
        inner = part_of(self, "mlp.fc1")(self.layernorm(y), activation=self.activation)
        return part_of(self, "mlp.fc2")(inner, residual=y)[:, 0]
