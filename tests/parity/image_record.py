"""Records what transformers' torch models say of the cases of models that read images, in float32.

python -m tests.parity.image_record      # needs torch, transformers, Pillow; writes the .npz

Pixels are those of the processors that use Pillow. DINOv3 has none: ViT's, with its settings, stands in.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from .image_cases import REFERENCE, image_cases


def torch_results(case):
    """Names and shapes of tensors, as JSON; pixels [R, 3, H, W]; results; and of texts, logits too."""
    import torch
    import transformers
    from safetensors.numpy import load_file
    from transformers.image_utils import load_image

    directory = Path(tempfile.mkdtemp())
    kind = getattr(transformers, case.config["architectures"][0])
    config = transformers.CONFIG_MAPPING[case.config["model_type"]].from_dict(case.config)
    kind(config).save_pretrained(directory)
    shapes = {
        name: value.shape for name, value in load_file(directory / "model.safetensors").items()
    }
    case.write(directory, shapes)
    model = kind.from_pretrained(directory, attn_implementation="eager").float().eval()
    settings = dict(case.processor)
    name = settings.pop("image_processor_type").removesuffix("Fast")
    name = name.replace("DINOv3ViT", "ViT").replace("FeatureExtractor", "ImageProcessor")
    if case.config["model_type"] == "dinov3_vit":
        settings |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    processor = getattr(transformers, f"{name}Pil")(**settings)
    pictures = [load_image(str(file)) for file in case.write_pictures(directory)]
    pixels = processor(pictures, return_tensors="pt").pixel_values
    found = {f"{case.name} tensors": json.dumps(shapes), f"{case.name} pixels": pixels.numpy()}
    with torch.no_grad():
        if not case.texts:
            given = model(pixel_values=pixels)
            labels = getattr(given, "logits", None)
            result = given.last_hidden_state[:, 0] if labels is None else labels
            return {**found, f"{case.name} images": result.numpy()}
        most = max(map(len, case.texts))
        padding = case.config["text_config"]["pad_token_id"]
        ids = torch.tensor([[*ids, *[padding] * (most - len(ids))] for ids in case.texts])
        mask = torch.tensor([[n < len(ids) for n in range(most)] for ids in case.texts]).long()
        masked = {"attention_mask": mask} if case.config["model_type"] == "clip" else {}
        given = model(input_ids=ids, pixel_values=pixels, **masked)
    return {
        **found,
        f"{case.name} images": given.image_embeds.numpy(),
        f"{case.name} texts": given.text_embeds.numpy(),
        f"{case.name} logits": given.logits_per_image.numpy(),
    }


def main():
    recorded = {}
    for case in image_cases():
        recorded |= torch_results(case)
    np.savez_compressed(REFERENCE, **recorded)
    print(f"{REFERENCE}: {len(recorded)} arrays, {REFERENCE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
