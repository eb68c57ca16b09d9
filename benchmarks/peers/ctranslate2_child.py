"""CTranslate2, as its Python users run it.

    peers/ctranslate2_child.py generate MODEL BATCH TOKENS     64 tokens out
    peers/ctranslate2_child.py prefill  MODEL BATCH TOKENS     prompts, one after the other
    peers/ctranslate2_child.py encode   MODEL                  embeddings of all shapes

MODEL is the output of its converter. Its name ends in the type of the arithmetic: `gpt2-ct2-int8`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np

from benchmarks.harness import workload
from benchmarks.peers.encode_child import measure

THREADS = workload.threads()


def load(kind: Callable[..., Any], path: str) -> Any:
    """Return a model of a class of CTranslate2's."""
    compute = path.rpartition("-")[2]
    return kind(path, compute_type=compute, intra_threads=THREADS, inter_threads=1)


def generate(path: str, batch: int, length: int) -> dict[str, object]:
    """Yield greedy tokens. Each step calls back for every row of the batch."""
    generator, names = load(ctranslate2.Generator, path), vocabulary(path)
    prompts = workload.prompts(length, batch)
    tokens: list[int] = []
    times: list[float] = []
    told = 0

    def step(result: Any) -> bool:
        nonlocal told
        told += 1
        if result.batch_id == 0:
            tokens.append(result.token_id)
        if told % batch == 0:
            times.append(time.perf_counter())
            if len(times) == 1:
                workload.say_first()
        return False

    generator.generate_batch(
        [[names[token] for token in prompt] for prompt in prompts],
        max_length=workload.NEW_TOKENS,
        min_length=workload.NEW_TOKENS,
        sampling_topk=1,
        include_prompt_in_result=False,
        callback=step,
    )
    rate = batch * (len(times) - 2) / (times[-1] - times[1])
    return {
        "tokens": tokens,
        "decode_tokens_per_second": rate,
        "second_token_seconds": times[1] - times[0],
    }


def prefill(path: str, length: int) -> dict[str, object]:
    """Measure prompts."""
    generator, names = load(ctranslate2.Generator, path), vocabulary(path)

    def first_token(prompt: list[int]) -> int:
        [result] = generator.generate_batch(
            [[names[token] for token in prompt]],
            max_length=1,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return int(result.sequences_ids[0][0])

    return workload.prefill(first_token, length)


def vocabulary(path: str) -> list[str]:
    """Return the names of tokens: CTranslate2 takes names, not ids."""
    names: list[str] = json.loads(Path(path, "vocabulary.json").read_text())
    return names


def encode(path: str) -> None:
    """Measure mean-pooled embeddings of length 1."""
    encoder = load(ctranslate2.Encoder, path)

    def embed(ids: list[list[int]]) -> Any:
        mean = np.array(encoder.forward_batch(ids).last_hidden_state).mean(1)
        return mean / np.linalg.norm(mean, axis=-1, keepdims=True)

    measure(embed)


if __name__ == "__main__":
    job, path, *size = sys.argv[1:]
    if job == "generate":
        workload.say_last(**generate(path, *map(int, size)))
    elif job == "prefill":
        workload.say_last(**prefill(path, int(size[1])))
    else:
        encode(path)
