"""Records what transformers' torch T5 says of the cases, in float32: the definition of correct.

python -m tests.parity.t5_record          # needs torch, transformers, safetensors; writes t5_reference.npz
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .record import record, torch_model
from .t5_cases import PROMPT, REFERENCE, SOURCE, STEPS, Case, cases

Logits = np.ndarray[Any, np.dtype[np.float32]]


def torch_logits(case: Case, directory: Path) -> Logits:
    """Float32 [ROWS, STEPS, V]: after the prompt, and after each greedy token; the last one is not fed."""
    import torch

    model = torch_model(case, directory, "T5ForConditionalGeneration")
    tokens, steps = torch.from_numpy(case.prompt).long(), []
    with torch.no_grad():
        for _ in range(STEPS):  # all of the text anew for every token: no cache can be wrong
            steps.append(_logits(model, case, tokens)[:, -1])
            tokens = torch.cat([tokens, steps[-1].argmax(1)[:, None]], 1)
    result: Logits = torch.stack(steps, 1).numpy()
    return result


def rounding(case: Case, logits: Logits, directory: Path) -> float:
    """How far torch's own logits of the whole text are in float32 from those with float64 products."""
    import torch

    model = torch_model(case, directory, "T5ForConditionalGeneration")
    text = np.concatenate([case.prompt, logits[:, :-1].argmax(2)], 1)
    tokens = torch.from_numpy(text).long()
    with torch.no_grad():
        single = _logits(model, case, tokens)[:, PROMPT - 1 :]
        double = _logits(model.double(), case, tokens)[:, PROMPT - 1 :]
    return float((single - double).abs().max())


def _logits(model: Any, case: Case, tokens: Any) -> Any:
    import torch

    return model(
        torch.from_numpy(case.source).long(),
        attention_mask=torch.from_numpy(np.arange(SOURCE) < case.lengths[:, None]).long(),
        decoder_input_ids=tokens,
        use_cache=False,
    ).logits


if __name__ == "__main__":
    record(REFERENCE, cases(), torch_logits, rounding)
