"""Records what transformers' torch models say of the cases, in float32: the definition of correct.

python -m tests.parity.record          # needs torch, transformers, safetensors; writes .npz files
python -m tests.parity.record sibling_cases         # only those
"""

import json
import sys
import tempfile
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np

from . import cases, sibling_cases, t5_cases, whisper_cases

TIE = 1e-3
"""Tokens of which the logits are nearer than this could change places by rounding alone."""
ROUNDING = 4e-5
"""Logits that float32 does not determine as well as this are no measure of anything but their rounding."""


def torch_logits(case, directory):
    """Float32 [(ROWS,) STEPS, V]: after the prompt and each greedy token; the last token is not fed."""
    import torch

    model, of_rows = torch_model(case, directory), case.prompt.ndim == 2
    tokens = torch.from_numpy(np.atleast_2d(case.prompt)).long()
    steps = []
    with torch.no_grad():
        # All of source and text anew for every token: no cache can be wrong.
        for _ in range(_of(case).STEPS):
            steps.append(_logits(model, case, tokens)[:, -1])
            tokens = torch.cat([tokens, steps[-1].argmax(1)[:, None]], 1)
    result = torch.stack(steps, 1).numpy()
    return result if of_rows else result[0]


def rounding(case, logits, directory):
    """How far torch's own logits of the whole text are in float32 from those with float64 products."""
    import torch

    model = torch_model(case, directory)
    text = np.concatenate([case.prompt, logits[..., :-1, :].argmax(-1)], -1)
    tokens, first = torch.from_numpy(np.atleast_2d(text)).long(), _of(case).PROMPT - 1
    with torch.no_grad():
        single = _logits(model, case, tokens)[:, first:]
        for module in model.double().modules():
            if hasattr(module, "reorder_and_upcast_attn"):
                module.reorder_and_upcast_attn = False  # to float32 it would be
        double = _logits(model, case, tokens)[:, first:]
    return float((single - double).abs().max())


def _of(case):
    if isinstance(case, sibling_cases.Sibling):
        return sibling_cases
    return {"t5": t5_cases, "whisper": whisper_cases}.get(case.config["model_type"], cases)


def _logits(model, case, tokens):
    import torch

    inputs = {"input_ids": tokens}
    if case.config["model_type"] == "t5":
        mask = np.arange(t5_cases.SOURCE) < case.lengths[:, None]
        inputs = {
            "input_ids": torch.from_numpy(case.source).long(),
            "attention_mask": torch.from_numpy(mask).long(),
            "decoder_input_ids": tokens,
        }
    elif case.config["model_type"] == "whisper":
        source = torch.from_numpy(case.source).to(model.dtype)
        inputs = {"input_features": source, "decoder_input_ids": tokens}
    return model(**inputs, use_cache=False).logits


def torch_model(case, directory):
    import torch

    torch.set_num_threads(1)  # more of them take longer over matrices as small as these
    case.write(directory)
    kind = _class_of(case)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if any("experts" in key for key in case.config):
        options["experts_implementation"] = "eager"  # the other wants strides of 16 bytes
    model, loading = kind.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(loading.values()), (case.name, loading)
    return model.eval()


def _class_of(case):
    """transformers' class of a case; where it has none of that name, that of the family it builds instead."""
    import transformers

    name = case.config["architectures"][0]
    return getattr(transformers, name, transformers.AutoModelForCausalLM)


def published_shapes(case, directory):
    """The names and shapes that save_pretrained gives the tensors of a new model of this configuration."""
    import transformers
    from safetensors import safe_open

    # transformers writes into the dictionaries that it is given, and cases share some
    config = transformers.AutoConfig.for_model(**deepcopy(case.config))
    kind = _class_of(case)
    auto = kind is transformers.AutoModelForCausalLM
    (kind.from_config(config) if auto else kind(config)).save_pretrained(directory)
    with safe_open(directory / "model.safetensors", "np") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def nearest_tokens(logits):
    """The smallest distance between the two best tokens of any step of [..., STEPS, V]."""
    best = np.sort(logits, -1)
    return float((best[..., -1] - best[..., -2]).min())


def record(reference, cases):
    """Writes a reference. A case whose text or logits hang on the rounding of float32 needs another seed."""
    recorded = {}
    with tempfile.TemporaryDirectory() as directory:
        for case in cases:
            if isinstance(case, sibling_cases.Sibling):
                shapes = published_shapes(case, Path(directory, "made"))
                recorded[sibling_cases.shapes_key(case)] = np.array(json.dumps(shapes))
                case = replace(case, shapes=shapes)
            logits = torch_logits(case, Path(directory, case.name))
            if (distance := nearest_tokens(logits)) < TIE:
                print(f"{case.name}: two tokens are {distance:.1e} from each other")
            if (error := rounding(case, logits, Path(directory, case.name))) > ROUNDING:
                print(f"{case.name}: torch itself is {error:.1e} from float64")
            recorded[case.name] = logits
    np.savez_compressed(reference, **recorded)  # type: ignore[arg-type]
    found = [values for values in recorded.values() if values.ndim]
    largest = max(float(np.abs(logits).max()) for logits in found)
    print(
        f"{reference}: {len(found)} cases, {reference.stat().st_size} bytes, |logit| <= {largest:.1f}"
    )


if __name__ == "__main__":
    for each in (cases, sibling_cases, t5_cases, whisper_cases):
        if each.__name__.rpartition(".")[2] in (sys.argv[1:] or each.__name__):
            record(each.REFERENCE, each.cases())
