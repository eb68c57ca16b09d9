"""The table of models that read images: for each model_type what it reads of config.json, and its towers.

Results agree with those of transformers 5, models/NAME/modeling_NAME.py. Sources:

    clip                  Radford et al. 2021, arXiv 2103.00020
    dinov2                Oquab et al. 2023, arXiv 2304.07193
    dinov2_with_registers Darcet et al. 2023, arXiv 2309.16588
    dinov3_vit            Simeoni et al. 2025, arXiv 2508.10104
    siglip                Zhai et al. 2023, arXiv 2303.15343; version 2: arXiv 2502.14786
    vit                   Dosovitskiy et al. 2020, arXiv 2010.11929
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prejit.compiler.models.families.image_models import TwoTowerFamily
from prejit.compiler.models.families.image_towers import (
    BlockFamily,
    BlockNames,
    ImageFamily,
    bicubic,
    smooth_bicubic,
)
from prejit.compiler.models.layers.config_checks import Checks, checks_of
from prejit.compiler.models.layers.layer_config import Naming


@dataclass(frozen=True)
class ImageRow:
    """A family of models.

    Attributes:
        towers: its tower, or its two.
        processor: the class of its image processor.
        naming: how published checkpoints name its tensors.
        keys: the keys that the tower of images reads, with the check of each value.
        allowed: other keys, with the values that are supported; the first is that of a missing key.
        text_keys, text_allowed: the same for the tower of texts.
        classifies: whether transformers has a class ...ForImageClassification of it that is built.
        with_mean: whether that reads the mean of the patches too.
    """

    towers: ImageFamily | TwoTowerFamily
    processor: str
    naming: Naming
    keys: Checks
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    text_keys: Checks = field(default_factory=dict)
    text_allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    classifies: bool = False
    with_mean: bool = False


_BLOCK = ("hidden_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps", "hidden_act")
_IMAGE = (*_BLOCK, "image_size", "patch_size")
_RGB = {"num_channels": (3,)}
_ATTENTION = (
    tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
    "attention.output.dense",
)
_QKV_BIASES = ("qkv_bias", "qkv_bias", "qkv_bias", "", "")


def _dino_names(config: Any) -> BlockNames:
    names = BlockNames(
        *_ATTENTION, ("norm1", "norm2"), scales=("layer_scale1.lambda1", "layer_scale2.lambda1")
    )
    if not config.use_swiglu_ffn:
        return names
    joined = "mlp.weights_in"
    return replace(names, gate=joined, up=joined, down="mlp.weights_out")


def _dino_inner(config: Any) -> int:
    inner = int(config.hidden_size * config.mlp_ratio)
    return (int(inner * 2 / 3) + 7) // 8 * 8 if config.use_swiglu_ffn else inner


def _naming(prefix: str, *ignored: str) -> Naming:
    return Naming(
        f"{prefix}.",
        head="",
        embedding="",
        ignored=tuple(f"{start}{name}" for start in ("", f"{prefix}.") for name in ignored),
        beside=("classifier",),
    )


_VIT = ImageRow(
    ImageFamily(
        BlockFamily(
            lambda config: BlockNames(
                *_ATTENTION,
                ("layernorm_before", "layernorm_after"),
                up="intermediate.dense",
                down="output.dense",
            ),
            biases=_QKV_BIASES,
        )
    ),
    "ViTImageProcessor",
    # The reference pools the class token for labels, without the pooler of the base model.
    _naming("vit", "pooler.", "embeddings.mask_token"),
    checks_of(*_IMAGE, "intermediate_size", "qkv_bias"),
    _RGB,
    classifies=True,
)
_DINO = ImageFamily(BlockFamily(_dino_names, _dino_inner, _QKV_BIASES), resampling=bicubic)
_DINOV2 = ImageRow(
    _DINO,
    "BitImageProcessor",
    _naming("dinov2", "embeddings.mask_token"),
    checks_of(*_IMAGE, "mlp_ratio", "use_swiglu_ffn", "qkv_bias"),
    _RGB,
    classifies=True,
    with_mean=True,
)
_DINOV3_NAMES = BlockNames(
    ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attention.o_proj",
    ("norm1", "norm2"),
    up="mlp.up_proj",
    down="mlp.down_proj",
    scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
)
_TOWER = BlockFamily()
_CLIP_IMAGE = ImageFamily(
    _TOWER,
    "encoder.layers",
    "post_layernorm",
    "embeddings.patch_embedding",
    patch_bias=False,
    leading="embeddings.class_embedding",
    positions="embeddings.position_embedding.weight",
    flat=True,
    first_norm="pre_layrnorm",  # as it is published
)
SIGLIP_IMAGE = replace(_CLIP_IMAGE, patch_bias=True, leading="", first_norm="")
"""SigLIP's tower of images."""
_TEXT = (*_BLOCK, "intermediate_size", "vocab_size", "max_position_embeddings")
_PAIRED = Naming(
    prefix="",
    head="",
    embedding="",
    buffers=("embeddings.position_ids",),
    renamed=(
        ("head.attention.in_proj_weight", "head.attention.in_proj.weight"),
        ("head.attention.in_proj_bias", "head.attention.in_proj.bias"),
    ),
)

IMAGE_MODELS: Mapping[str, ImageRow] = {
    "clip": ImageRow(
        TwoTowerFamily(
            _CLIP_IMAGE,
            replace(_TOWER, causal=True),
            ("text_projection", "visual_projection"),
            pads=False,
        ),
        "CLIPImageProcessor",
        _PAIRED,
        checks_of(*_IMAGE, "intermediate_size"),
        _RGB,
        checks_of(*_TEXT),
    ),
    "dinov2": _DINOV2,
    "dinov2_with_registers": replace(
        _DINOV2,
        towers=replace(_DINO, registers="embeddings.register_tokens", resampling=smooth_bicubic),
        naming=_naming("dinov2_with_registers", "embeddings.mask_token"),
        keys={**_DINOV2.keys, **checks_of("num_register_tokens")},
    ),
    "dinov3_vit": ImageRow(
        ImageFamily(
            BlockFamily(
                lambda config: replace(
                    _DINOV3_NAMES, gate="mlp.gate_proj" if config.use_gated_mlp else ""
                ),
                biases=("query_bias", "key_bias", "value_bias", "proj_bias", "mlp_bias"),
                rotary=True,
            ),
            "layer",
            "norm",
            "embeddings.patch_embeddings",
            registers="embeddings.register_tokens",
            positions="",
        ),
        "DINOv3ViTImageProcessor",
        _naming("dinov3_vit", "embeddings.mask_token"),
        checks_of(
            *(*_IMAGE, "intermediate_size", "use_gated_mlp", "num_register_tokens", "rope_theta"),
            *("query_bias", "key_bias", "value_bias", "proj_bias", "mlp_bias"),
        ),
        _RGB,
    ),
    "siglip": ImageRow(
        TwoTowerFamily(SIGLIP_IMAGE, _TOWER, (), pads=True),
        "SiglipImageProcessor",
        _PAIRED,
        checks_of(*_IMAGE, "intermediate_size"),
        {**_RGB, "vision_use_head": (True,)},
        checks_of(*_TEXT, "projection_size", "pad_token_id"),
    ),
    "vit": _VIT,
}
"""The families that read images, by model_type."""
