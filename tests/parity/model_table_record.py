"""Writes what torch says of the decoders of the table of models. Needs torch and transformers.

python -m tests.parity.model_table_record DIRECTORY      # model_table.py calls it
"""

import json
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from .model_table_cases import SPREAD, STEPS, Scaled, decoder_cases, first_of_each, wide
from .record import published_shapes, torch_model


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
