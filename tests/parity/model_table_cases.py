"""The decoders of the table of models: three of each type in odd sizes, one in wide ones. No JAX.

python -m tests.parity.model_table_cases DIRECTORY      # model_table.py calls it; needs torch, transformers

It writes torch's logits into a file for each, which model_table.py reads.
"""

import json
import math
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from . import cases, sibling_cases
from .record import published_shapes, torch_model
from .sibling_cases import Sibling

SEEDS, STEPS = 3, 64
"""Cases of a model_type, and greedy tokens of each."""
INNER = 96
"""The width inside the MLP of a wide model."""


SPREAD = 2.0
"""Standard deviation of the logits of wide models: with a larger one a single token has all probability."""


@dataclass(frozen=True)
class Scaled(Sibling):
    """A case whose embeddings and head have a factor."""

    factor: float = 1.0

    def values(self, name, shape):
        found = super().values(name, shape)
        is_scaled = len(shape) == 2 and shape[0] == self.config["vocab_size"]
        return found * np.float32(self.factor) if is_scaled else found


def decoder_cases():
    """The first of each model_type, then the second, then the third."""
    found = {}
    for module in (cases, sibling_cases):
        for case in module.cases():
            if "long_factor" not in str(case.config) and case.config["model_type"] not in _SOURCES:
                found.setdefault(case.config["model_type"], []).append(case)
    for number in range(SEEDS):
        for kind in sorted(found):
            case = found[kind][number]
            yield Sibling(case.name, case.config, case.seed)


def first_of_each(cases):
    """The first case of each model_type."""
    found = {}
    for case in cases:
        found.setdefault(case.config["model_type"], case)
    return [*found.values()]


_SOURCES = ("t5", "whisper")
"""Those that read a source."""


def wide(case):
    """A model like it whose matrices are large enough for int4: widths are multiples of 32, at least 64."""
    config = dict(case.config)
    key = "n_embd" if "n_embd" in config else "hidden_size"
    old = config[key]
    times = 32 // math.gcd(old, 32)
    times *= math.ceil(64 / (old * times))
    config[key] = old * times
    heads = config.get("num_attention_heads") or config.get("num_heads") or config["n_head"]
    sizes = (old, 2 * old)  # a state is twice as wide as the model
    if config.get("head_dim") and heads * config["head_dim"] in sizes:
        config["head_dim"] *= times
    if type(size := config.get("mamba_d_head")) is int and config["mamba_n_heads"] * size in sizes:
        config["mamba_d_head"] = size * times
    for key in ("mamba_d_ssm", "word_embed_proj_dim"):
        if config.get(key):
            config[key] *= times
    return Scaled(f"{case.name}-wide", _widened(config), case.seed)


def _widened(config):
    """Widths inside MLPs."""
    inner = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    return {key: INNER if key in inner and value else value for key, value in config.items()}


def recorded(case):
    """Names and shapes of tensors as torch publishes them, and logits [STEPS, V] of greedy tokens."""
    import torch

    with tempfile.TemporaryDirectory() as directory:
        case = replace(case, shapes=published_shapes(case, Path(directory, "made")))
        if isinstance(case, Scaled):
            for _ in range(3):  # embeddings change what later layers make
                spread = _after_prompt(torch_model(case, Path(directory, "model")), case).std()
                case = replace(case, factor=case.factor * SPREAD / float(spread))
        model = torch_model(case, Path(directory, "model"))
    tokens, steps = torch.from_numpy(case.prompt)[None].long(), []
    with torch.no_grad():
        for _ in range(STEPS):  # all of the text anew: no cache can be wrong
            steps.append(model(input_ids=tokens, use_cache=False).logits[:, -1])
            tokens = torch.cat([tokens, steps[-1].argmax(1)[:, None]], 1)
    return {
        "logits": torch.cat(steps).numpy(),
        "shapes": np.array(json.dumps(case.shapes)),
        "factor": np.array(getattr(case, "factor", 1.0)),
    }


def _after_prompt(model, case):
    """Logits of each token of the prompt."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.from_numpy(case.prompt)[None].long(), use_cache=False).logits


def main(directory):
    """Write those that are not there."""
    directory.mkdir(parents=True, exist_ok=True)
    versions = {name: version(name) for name in ("torch", "transformers")}
    (directory / "versions.json").write_text(json.dumps(versions))
    cases = [*decoder_cases()]
    for case in (*cases, *map(wide, first_of_each(cases))):
        file = directory / f"{case.name}.npz"
        if file.exists():
            continue
        try:
            found = recorded(case)
        except Exception as error:
            if not isinstance(case, Scaled):
                raise
            found = {"error": np.array(f"{type(error).__name__}: {error}"[:300])}
        np.savez_compressed(file, **found)
        print(case.name, found.get("error", ""), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
