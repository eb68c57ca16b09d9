"""PyTorch op by op with transformers' model, which most people run.

peers/torch_child.py generate MODEL [BATCH]     32 tokens in, 64 out
peers/torch_child.py prefill  MODEL             512 tokens in, again and again
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness import workload

THREADS = 2


def step(model: Any, tokens: list[list[int]], cache: Any) -> tuple[list[int], Any]:
    """Puts new tokens of each row behind what is cached; gives the next ones and the cache."""
    with torch.inference_mode():
        # The last position's logits alone, as `generate` asks for.
        result = model(
            torch.tensor(tokens), past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return result.logits[:, -1].argmax(-1).tolist(), result.past_key_values


def generate(model: Any, batch: int) -> Iterator[int]:
    """Yield greedy tokens of the first row."""
    tokens, cache = step(model, workload.prompts(workload.PROMPT_TOKENS, batch), None)
    yield tokens[0]
    for _ in range(workload.NEW_TOKENS - 1):
        tokens, cache = step(model, [[token] for token in tokens], cache)
        yield tokens[0]


if __name__ == "__main__":
    job, path, *size = sys.argv[1:]
    batch = int(size[0]) if size else 1
    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    if job == "generate":
        workload.say_last(**workload.stream(generate(model, batch), batch))
    else:
        workload.say_last(**workload.prefill(lambda prompt: step(model, [prompt], None)[0][0]))
