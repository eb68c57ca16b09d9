"""PyTorch: transformers' model with its static cache, whose decode step torch.compile compiles.

    peers/torch_child.py generate MODEL DTYPE BATCH TOKENS     64 tokens out

The prompt runs uncompiled, as in transformers' own generate: another graph would delay the first token.
Compiled code is kept in TORCHINDUCTOR_CACHE_DIR.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, StaticCache

from benchmarks.harness import workload


def generate(path: str, dtype: str, batch: int, length: int) -> Iterator[int]:
    """Yield greedy tokens of the first row."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    step = torch.compile(model, dynamic=False, fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=workload.CONTEXT)
    run, tokens = model, torch.tensor(workload.prompts(length, batch))
    for end in range(length, length + workload.NEW_TOKENS):
        places = torch.arange(end - tokens.shape[1], end)[None]
        logits = run(tokens, position_ids=places, cache=cache, logits_to_keep=1).logits
        tokens = logits[:, -1].argmax(-1, keepdim=True)
        yield int(tokens[0])
        run = step


if __name__ == "__main__":
    _, path, dtype, *size = sys.argv[1:]
    batch, length = map(int, size)
    torch.set_num_threads(workload.threads())
    with torch.inference_mode():
        workload.say_last(**workload.stream(generate(path, dtype, batch, length), batch))
