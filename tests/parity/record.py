"""Records what transformers' torch models say of the cases, in float32: the definition of correct.

python -m tests.parity.record          # needs torch, transformers, safetensors; writes reference.npz
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .cases import PROMPT, REFERENCE, Case, cases


def torch_logits(case: Case, directory: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Float32 [TOTAL - PROMPT + 1, V]: after the prompt, and after each token that follows it."""
    import torch
    from transformers import AutoModelForCausalLM

    case.write(directory)
    model, loading = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(case.tokens).long()[None]).logits
    result: np.ndarray[Any, np.dtype[np.float32]] = logits[0, PROMPT - 1 :].numpy()
    return result


def main() -> None:
    """Writes REFERENCE."""
    with tempfile.TemporaryDirectory() as directory:
        recorded = {case.name: torch_logits(case, Path(directory, case.name)) for case in cases()}
    np.savez_compressed(REFERENCE, **recorded)  # type: ignore[arg-type]
    largest = max(float(np.abs(logits).max()) for logits in recorded.values())
    print(
        f"{REFERENCE}: {len(recorded)} cases, {REFERENCE.stat().st_size} bytes, |logit| <= {largest:.1f}"
    )


if __name__ == "__main__":
    main()
