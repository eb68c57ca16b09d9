"""Records what transformers' torch models say of the cases, in float32: the definition of correct.

python -m tests.parity.record          # needs torch, transformers, safetensors; writes reference.npz
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .cases import PROMPT, REFERENCE, STEPS, Case, cases

TIE = 1e-3
"""Tokens of which the logits are nearer than this could change places by rounding alone."""
ROUNDING = 4e-5
"""Logits that float32 does not determine as well as this are no measure of anything but their rounding."""

Logits = np.ndarray[Any, np.dtype[np.float32]]


def torch_logits(case: Case, directory: Path) -> Logits:
    """Float32 [STEPS, V]: after the prompt, and after each greedy token; the last token is not fed."""
    import torch

    model = torch_model(case, directory)
    tokens = torch.from_numpy(case.prompt).long()[None]
    steps = []
    with torch.no_grad():
        for _ in range(STEPS):  # all of the text anew for every token: no cache can be wrong
            steps.append(model(tokens, use_cache=False).logits[0, -1])
            tokens = torch.cat([tokens, steps[-1].argmax()[None, None]], 1)
    result: Logits = torch.stack(steps).numpy()
    return result


def rounding(case: Case, logits: Logits, directory: Path) -> float:
    """How far torch's own logits of the whole text are in float32 from those with float64 products."""
    import torch

    model = torch_model(case, directory)
    tokens = torch.from_numpy(np.concatenate([case.prompt, logits[:-1].argmax(1)])).long()[None]
    with torch.no_grad():
        single = model(tokens, use_cache=False).logits[0, PROMPT - 1 :]
        for module in model.double().modules():
            if hasattr(module, "reorder_and_upcast_attn"):
                module.reorder_and_upcast_attn = False  # to float32 it would be
        double = model(tokens, use_cache=False).logits[0, PROMPT - 1 :]
    return float((single - double).abs().max())


def torch_model(case: Any, directory: Path, kind: str = "AutoModelForCausalLM") -> Any:
    """The model of a case, of a class of transformers."""
    import torch
    import transformers

    torch.set_num_threads(1)  # more of them take longer over matrices as small as these
    case.write(directory)
    model, loading = getattr(transformers, kind).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), (case.name, loading)
    return model.eval()


def nearest_tokens(logits: Logits) -> float:
    """The smallest distance between the two best tokens of any step of [..., STEPS, V]."""
    best = np.sort(logits, -1)
    return float((best[..., -1] - best[..., -2]).min())


def record(
    reference: Path,
    cases: Iterable[Any],
    torch_logits: Callable[[Any, Path], Logits],
    rounding: Callable[[Any, Logits, Path], float],
) -> None:
    """Writes a reference. A case whose text or logits hang on the rounding of float32 needs another seed."""
    recorded = {}
    with tempfile.TemporaryDirectory() as directory:
        for case in cases:
            logits = torch_logits(case, Path(directory, case.name))
            if (distance := nearest_tokens(logits)) < TIE:
                print(f"{case.name}: two tokens are {distance:.1e} from each other")
            if (error := rounding(case, logits, Path(directory, case.name))) > ROUNDING:
                print(f"{case.name}: torch itself is {error:.1e} from float64")
            recorded[case.name] = logits
    np.savez_compressed(reference, **recorded)  # type: ignore[arg-type]
    largest = max(float(np.abs(logits).max()) for logits in recorded.values())
    print(
        f"{reference}: {len(recorded)} cases, {reference.stat().st_size} bytes, |logit| <= {largest:.1f}"
    )


if __name__ == "__main__":
    record(REFERENCE, cases(), torch_logits, rounding)
