"""Records what transformers' torch models that read images, alone or in prompts, say in float32.

python -m tests.parity.image_record      # needs torch, transformers, Pillow; writes .npz files

Pixels are those of the processors that use Pillow. DINOv3 has none: ViT's, with its settings, stands in.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from . import image_cases, sight_cases
from .sight_cases import MESSAGES, PROMPTS, STEPS


def torch_model(case):
    """The directory of a case, the names and shapes of its tensors, and the model."""
    import transformers
    from safetensors.numpy import load_file

    directory = Path(tempfile.mkdtemp())
    kind = getattr(transformers, case.config["architectures"][0])
    config = transformers.CONFIG_MAPPING[case.config["model_type"]].from_dict(case.config)
    kind(config).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    shapes = {name: value.shape for name, value in tensors.items()}
    case.write(directory, shapes)
    model = kind.from_pretrained(directory, attn_implementation="eager").float().eval()
    return directory, shapes, model


def image_results(case):
    """Names and shapes of tensors, as JSON; pixels [R, 3, H, W]; results; and of texts, logits too."""
    import torch
    import transformers
    from transformers.image_utils import load_image

    directory, shapes, model = torch_model(case)
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


def sight_results(case):
    """Tensors, as JSON; of each prompt its ids, logits of its last token and the greedy tokens after it."""
    import torch
    import transformers
    from transformers.image_utils import load_image

    directory, shapes, model = torch_model(case)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    settings = {k: v for k, v in case.processor.items() if k != "image_processor_type"}
    processor = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessorPil(**settings),
        tokenizer,
        (directory / "chat_template.jinja").read_text(),
        case.config["mm_tokens_per_image"],
    )
    pictures = [load_image(str(file)) for file in case.write_pictures(directory)]
    found = {f"{case.name} tensors": json.dumps(shapes)}
    given = [
        processor(text=text, images=[pictures[n] for n in chosen] or None, return_tensors="pt")
        for text, chosen in PROMPTS
    ]
    text = processor.apply_chat_template(MESSAGES, add_generation_prompt=True)
    given.append(
        processor(
            text=text,
            images=[pictures[2], pictures[0]],
            add_special_tokens=False,
            return_tensors="pt",
        )
    )
    for number, inputs in enumerate(given):
        count = inputs["input_ids"].shape[1]
        with torch.no_grad():
            made = model.generate(
                **{name: value for name, value in inputs.items() if name != "num_crops"},
                do_sample=False,
                max_new_tokens=STEPS,
                eos_token_id=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
        found[f"{case.name} ids {number}"] = inputs["input_ids"][0].numpy()
        found[f"{case.name} tokens {number}"] = made.sequences[0, count:].numpy()
        found[f"{case.name} logits {number}"] = torch.stack(made.logits)[:, 0].numpy()
    return found


def main():
    made = {image_cases.REFERENCE: map(image_results, image_cases.image_cases())}
    made[sight_cases.REFERENCE] = map(sight_results, sight_cases.sight_cases())
    for reference, results in made.items():
        recorded = {name: value for each in results for name, value in each.items()}
        np.savez_compressed(reference, **recorded)
        print(f"{reference}: {len(recorded)} arrays, {reference.stat().st_size} bytes")
    for name, value in recorded.items():
        if " logits " in name:  # rounding must not decide a token
            best = np.sort(value, -1)
            print(name, "least lead", (best[:, -1] - best[:, -2]).min())


if __name__ == "__main__":
    main()
