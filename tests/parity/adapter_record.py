"""Records what transformers' models say after PEFT merged adapters into them, in float32.

python -m tests.parity.adapter_record          # needs torch, transformers, peft; writes an .npz file
"""

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors import safe_open

from .adapter_cases import CASES, REFERENCE, STEPS
from .record import torch_model


def merged_logits(case, directory, adapters):
    """Float32 [STEPS, V]: after the prompt and each token that follows it."""
    import torch
    from peft import PeftModel

    model = torch_model(case.base, directory / "base")
    for adapter in adapters:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    tokens = torch.from_numpy(np.concatenate([case.base.prompt, case.following])).long()
    with torch.no_grad():
        return model(tokens[None], use_cache=False).logits[0, -STEPS:].numpy()


def published(case, place, directory):
    """What PEFT writes for an adapter: its configuration, and the names and shapes of its tensors."""
    from peft import LoraConfig, get_peft_model

    model = torch_model(case.base, directory / "base")
    get_peft_model(model, LoraConfig(**case.adapters[place])).save_pretrained(directory / "made")
    config = json.loads((directory / "made/adapter_config.json").read_text())
    config["base_model_name_or_path"] = None
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    with safe_open(directory / "made/adapter_model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
    return {"config": config, "shapes": shapes}


if __name__ == "__main__":
    recorded = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary)
            made = {place: published(case, place, directory) for place in range(len(case.adapters))}
            for place, each in made.items():
                recorded[f"{case.name}/{place}"] = np.array(json.dumps(each))
            recorded[case.name] = merged_logits(case, directory, case.write(directory, made))
    np.savez_compressed(REFERENCE, **recorded)
    print(f"{REFERENCE}: {len(CASES)} cases, {REFERENCE.stat().st_size} bytes")
