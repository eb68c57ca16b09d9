"""Records what transformers' torch Whisper says of the cases, in float32: the definition of correct.

python -m tests.parity.whisper_record      # needs torch, transformers, safetensors; writes the .npz
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .record import record, torch_model
from .whisper_cases import PROMPT, REFERENCE, STEPS, Case, cases

Logits = np.ndarray[Any, np.dtype[np.float32]]


def torch_logits(case: Case, directory: Path) -> Logits:
    """Float32 [ROWS, STEPS, V]: after the prompts, and after each greedy token; the last is not fed."""
    import torch

    model, source = (
        torch_model(case, directory, "WhisperForConditionalGeneration"),
        torch.from_numpy(case.spectrograms),
    )
    tokens = torch.from_numpy(case.prompts).long()
    steps = []
    with torch.no_grad():
        for _ in range(STEPS):  # all of source and text anew for every token: no cache can be wrong
            steps.append(_logits(model, source, tokens)[:, -1])
            tokens = torch.cat([tokens, steps[-1].argmax(1)[:, None]], 1)
    result: Logits = torch.stack(steps, 1).numpy()
    return result


def rounding(case: Case, logits: Logits, directory: Path) -> float:
    """How far torch's own logits of the whole texts are in float32 from those in float64."""
    import torch

    model, source = (
        torch_model(case, directory, "WhisperForConditionalGeneration"),
        torch.from_numpy(case.spectrograms),
    )
    tokens = torch.from_numpy(np.concatenate([case.prompts, logits[:, :-1].argmax(2)], 1)).long()
    with torch.no_grad():
        single = _logits(model, source, tokens)[:, PROMPT - 1 :]
        double = _logits(model.double(), source.double(), tokens)[:, PROMPT - 1 :]
    return float((single - double).abs().max())


def _logits(model: Any, source: Any, tokens: Any) -> Any:
    return model(input_features=source, decoder_input_ids=tokens, use_cache=False).logits


if __name__ == "__main__":
    record(REFERENCE, cases(), torch_logits, rounding)
