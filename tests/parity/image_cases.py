"""Small random models that read images, and the pictures that they are given. No JAX, no torch.

A case is a configuration and the settings of an image processor. Each tensor's values follow from its
published name and its shape. The reference has the names and shapes of all tensors that torch publishes.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .cases import noise, write_checkpoint

REFERENCE = Path(__file__).parent / "image_reference.npz"
PICTURES = ((40, 30), (21, 57), (9, 11))
"""Height and width of each picture of a case; the last is smaller than what models are given."""


@dataclass(frozen=True)
class ImageCase:
    """Contents of config.json and preprocessor_config.json; a seed for weights, texts and pictures."""

    name: str
    config: dict
    processor: dict = field(default_factory=dict)
    seed: int = 0

    @property
    def texts(self):
        """Token ids, each text with its end; none for a model that reads images alone."""
        if "text_config" not in self.config:
            return []
        random, text = np.random.default_rng([self.seed, 0]), self.config["text_config"]
        most, end = text["max_position_embeddings"], text["vocab_size"] - 1
        return [[*random.integers(3, end, n).tolist(), end] for n in (1, 5, most - 1)]

    def values(self, name, shape):
        """Values of a published tensor, large enough that each part of the model shows in the result."""
        values = noise(self.seed, name, shape)
        if len(shape) == 2 or len(shape) == 4:
            return values * np.float32(0.3)
        is_factor = "norm" in name.lower() or "lambda" in name or "scale" in name
        return values * np.float32(0.2) + np.float32(is_factor and not name.endswith("bias"))

    def write(self, directory, tensors):
        """Write the model as torch's save_pretrained would, with these tensors, and its pictures."""
        values = {name: np.asarray(self.values(name, shape)) for name, shape in tensors.items()}
        write_checkpoint(directory, self.config, values)
        text = json.dumps(self.processor)
        (directory / "preprocessor_config.json").write_text(text)
        self.write_pictures(directory)

    def write_pictures(self, directory):
        """Write PNG files: noise on a ramp, so that filters, edges and channels show."""
        from PIL import Image

        files = []
        for number, (height, width) in enumerate(PICTURES):
            random = np.random.default_rng([self.seed, 1, number])
            ramp = np.linspace(0, 150, width)[:, None] * np.array([1, 0.5, 0.2])
            pixels = ramp + random.integers(0, 100, (height, width, 3))
            files.append(directory / f"picture{number}.png")
            Image.fromarray(pixels.astype(np.uint8)).save(files[-1])
        return files


def image_cases():
    """The cases, whose model_type is the beginning of their names, or stands for it."""
    made = []
    for seed, (name, architecture, config, processor) in enumerate(_CASES, 1):
        kind = name.partition("-")[0]
        whole = {"model_type": _TYPES.get(kind, kind), "architectures": [architecture], **config}
        made.append(ImageCase(name, whole, processor, seed))
    return tuple(made)


_TYPES = {"registers": "dinov2_with_registers", "dinov3": "dinov3_vit"}
_SIZES = {
    **{"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3},
    **{"image_size": 21, "patch_size": 7},
}
_INNER = {**_SIZES, "intermediate_size": 20}
_LABELS = {"id2label": {str(n): f"label {n}" for n in range(5)}}
_TEXT = {
    **{"vocab_size": 61, "hidden_size": 20, "intermediate_size": 23, "num_hidden_layers": 2},
    **{"num_attention_heads": 5, "max_position_embeddings": 13},
    **{"bos_token_id": 1, "eos_token_id": 60, "pad_token_id": 1},
}


def _exact(kind, height, width, **others):
    size = {"height": height, "width": width}
    return {"image_processor_type": kind, "size": size, "do_center_crop": False, **others}


def _middle(kind, shorter, size):
    crop = {"height": size, "width": size}
    return {"image_processor_type": kind, "size": {"shortest_edge": shorter}, "crop_size": crop}


_CASES = (
    (
        *("vit-0", "ViTModel", _INNER),
        {"image_processor_type": "ViTFeatureExtractor", "size": 21, "resample": 2},
    ),
    (
        *("vit-1", "ViTForImageClassification"),
        {**_INNER, **_LABELS, "hidden_act": "gelu_new", "qkv_bias": False},
        _exact("ViTImageProcessorFast", 21, 21, image_mean=[0.4, 0.5, 0.6], image_std=0.25),
    ),
    ("dinov2-0", "Dinov2Model", _SIZES, _middle("BitImageProcessor", 33, 28)),
    (
        *("dinov2-1", "Dinov2ForImageClassification"),
        {**_SIZES, **_LABELS, "use_swiglu_ffn": True, "mlp_ratio": 3},
        _exact("BitImageProcessor", 21, 30),
    ),
    ("registers-0", "Dinov2WithRegistersModel", _SIZES, _middle("BitImageProcessor", 20, 14)),
    (
        *("registers-1", "Dinov2WithRegistersForImageClassification"),
        {**_SIZES, **_LABELS, "num_register_tokens": 2},
        _exact("BitImageProcessor", 35, 28),
    ),
    (
        *("dinov3-0", "DINOv3ViTModel"),
        {**_INNER, "num_attention_heads": 2, "num_register_tokens": 4, "use_gated_mlp": True},
        _exact("DINOv3ViTImageProcessorFast", 30, 22),
    ),
    (
        *("dinov3-1", "DINOv3ViTModel"),
        {**_INNER, "num_attention_heads": 6, "key_bias": True, "rope_theta": 10.0},
        _exact("DINOv3ViTImageProcessorFast", 21, 21, resample=2),
    ),
    (
        *("clip-0", "CLIPModel"),
        {
            **{"text_config": _TEXT, "vision_config": {**_INNER, "hidden_act": "gelu"}},
            "projection_dim": 10,
        },
        _middle("CLIPImageProcessor", 21, 21),
    ),
    (
        *("clip-1", "CLIPModel"),
        {
            "text_config": {**_TEXT, "eos_token_id": 2, "num_attention_heads": 2},
            **{"vision_config": _INNER, "projection_dim": 7},
        },
        _exact("CLIPImageProcessor", 21, 21, do_normalize=False),
    ),
    (
        *("siglip-0", "SiglipModel"),
        {"text_config": {**_TEXT, "projection_size": 24}, "vision_config": _INNER},
        _exact("SiglipImageProcessor", 21, 21),
    ),
    (
        *("siglip-1", "SiglipModel"),
        {
            "text_config": {**_TEXT, "hidden_size": 30, "projection_size": 24, "pad_token_id": 0},
            "vision_config": {**_INNER, "patch_size": 5, "hidden_act": "gelu"},
        },
        _exact("SiglipImageProcessor", 21, 21, rescale_factor=0.01, resample=1),
    ),
)
