"""Records what transformers' torch models say of the cases whose prompts hold images, in float32.

python -m tests.parity.sight_record      # needs torch, transformers, Pillow; writes the .npz

Pixels are those of the processor that uses Pillow.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from .sight_cases import MESSAGES, PROMPTS, REFERENCE, STEPS, sight_cases


def torch_results(case):
    """Tensors, as JSON; of each prompt its ids, logits of its last token and the greedy tokens after it."""
    import torch
    import transformers
    from safetensors.numpy import load_file
    from transformers.image_utils import load_image

    directory = Path(tempfile.mkdtemp())
    kind = transformers.Gemma3ForConditionalGeneration
    kind(transformers.Gemma3Config.from_dict(case.config)).save_pretrained(directory)
    shapes = {
        name: value.shape for name, value in load_file(directory / "model.safetensors").items()
    }
    case.write(directory, shapes)
    model = kind.from_pretrained(directory, attn_implementation="eager").float().eval()
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
    recorded = {}
    for case in sight_cases():
        recorded |= torch_results(case)
    np.savez_compressed(REFERENCE, **recorded)
    print(f"{REFERENCE}: {len(recorded)} arrays, {REFERENCE.stat().st_size} bytes")
    for name, value in recorded.items():
        if " logits " in name:  # rounding must not decide a token
            best = np.sort(value, -1)
            print(name, "least lead", (best[:, -1] - best[:, -2]).min())


if __name__ == "__main__":
    main()
