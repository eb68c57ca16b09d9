"""A decoder whose prompts may hold images: a tower reads them, and a projector makes tokens of what it finds.

Results agree with those of transformers 5, models/gemma3/modeling_gemma3.py (Gemma Team 2025, arXiv
2503.19786). The model without images is the text model: its programs take none of the parts that read images.

Shapes: B batch, T tokens, D width of the tower, D' width of the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import jax
from flax import nnx

from prejit.compiler.models.families.decoder_family import DecoderFamily
from prejit.compiler.models.families.decoders import TextDecoder
from prejit.compiler.models.families.image_processing import ImageProcessing
from prejit.compiler.models.families.image_table import SIGLIP_IMAGE
from prejit.compiler.models.families.image_towers import ImageTower
from prejit.compiler.models.families.sentence import product
from prejit.compiler.models.layers.linear import RMSNorm
from prejit.compiler.models.parameters import part_of, place


@dataclass(frozen=True)
class Sight:
    """How a decoder reads images in prompts, as its checkpoint says.

    Attributes:
        vision: transformers' configuration of the tower.
        processing: of pictures.
        tokens: the number of tokens of an image.
        token_id: the token that stands for each part of an image in a prompt.
        marks: the texts of the token before an image, of an image's tokens, and of the token behind it.
    """

    vision: Any
    processing: ImageProcessing
    tokens: int
    token_id: int
    marks: tuple[str, str, str]


@final
class SeeingDecoder(TextDecoder):
    """A decoder with the parts that read images; `ImageModel` in image_models.py has their interface."""

    def __init__(self, family: DecoderFamily, config: Any, context: int | None) -> None:
        """Build a model; `config.sight` is its Sight."""
        super().__init__(family, config, context)
        sight: Sight = config.sight
        tower = ImageTower(SIGLIP_IMAGE, sight.vision, sight.processing)
        self._tower, self._projector = (
            f"{family.names.model}.{name}" for name in ("vision_tower", "multi_modal_projector")
        )
        place(self, self._tower, tower)
        place(self, self._projector, Projector(config, sight))

    def image(self, pixels: jax.Array) -> jax.Array:
        """Map pixels, uint8 [B, H, W, 3], to the embeddings of tokens, float32 [B, T * D']."""
        x = part_of(self, self._tower)(pixels)
        found = part_of(self, self._projector)(x)
        return found.reshape(len(found), -1)

    def image_parts(self) -> tuple[str, ...]:
        """Return the names of the attributes whose parameters `image` uses."""
        return (self._tower, self._projector)


class Projector(nnx.Module):
    """The mean of each square of patches, its norm and a product: one token for each square."""

    def __init__(self, config: Any, sight: Sight) -> None:
        width = sight.vision.hidden_size
        self.patches = sight.vision.image_size // sight.vision.patch_size
        self.side = round(sight.tokens**0.5)
        self.mm_soft_emb_norm = RMSNorm(width, sight.vision.layer_norm_eps, offset=1.0)
        self.mm_input_projection = product(width, config.hidden_size, bias=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map patches by rows [B, P, D] to tokens [B, T, D']."""
        step = self.patches // self.side
        squares = x.reshape(len(x), self.side, step, self.side, step, -1)
        pooled = squares.mean((2, 4)).reshape(len(x), self.side**2, -1)
        return self.mm_input_projection(self.mm_soft_emb_norm(pooled))
