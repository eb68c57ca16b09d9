"""OpenVINO: decoders by its GenAI pipeline, encoders by its runtime; compiled models cached on disk.

    peers/openvino_child.py generate DIRECTORY PRECISION 1 TOKENS     64 tokens out
    peers/openvino_child.py prefill  DIRECTORY PRECISION 1 TOKENS     prompts, one after the other
    peers/openvino_child.py encode   DIRECTORY PRECISION              embeddings of all shapes

DIRECTORY is an export of optimum-intel; PRECISION is that of the arithmetic: f32 or bf16.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from benchmarks.harness import workload
from benchmarks.peers.encode_child import measure

THREADS = 2


def properties(path: str, precision: str) -> dict[str, Any]:
    """Return the options of the CPU plugin."""
    return {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": THREADS,
        "CACHE_DIR": f"{path}-cache-{precision}",
    }


def pipeline(path: str, precision: str, new_tokens: int) -> tuple[Any, Any]:
    """Return a decoder, and options that generate greedily without end."""
    import openvino_genai

    # In the precision of the arithmetic: prompts of int8 and int4 take a third longer with a narrower one.
    told = {**properties(path, precision), "KV_CACHE_PRECISION": precision}
    config = openvino_genai.GenerationConfig()
    config.do_sample = False
    config.ignore_eos = True
    config.max_new_tokens = new_tokens
    return openvino_genai.LLMPipeline(path, "CPU", **told), config


def generate(path: str, precision: str, length: int) -> dict[str, object]:
    """Yield greedy tokens as they are streamed."""
    import openvino_genai

    times: list[float] = []

    class Times(openvino_genai.StreamerBase):  # type: ignore[misc]
        def write(self, token: int | list[int]) -> Any:
            times.extend([time.perf_counter()] * (len(token) if isinstance(token, list) else 1))
            if len(times) == 1:
                workload.say_first()
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    decoder, config = pipeline(path, precision, workload.NEW_TOKENS)
    prompt = openvino.Tensor(np.array([workload.prompt_ids(length)], np.int64))
    result = decoder.generate(prompt, config, Times())
    return {
        "tokens": [int(token) for token in result.tokens[0]],
        "decode_tokens_per_second": (len(times) - 2) / (times[-1] - times[1]),
        "second_token_seconds": times[1] - times[0],
    }


def prefill(path: str, precision: str, length: int) -> dict[str, object]:
    """Measure prompts."""
    decoder, config = pipeline(path, precision, 1)

    def first_token(prompt: list[int]) -> int:
        given = openvino.Tensor(np.array([prompt], np.int64))
        return int(decoder.generate(given, config).tokens[0][0])

    return workload.prefill(first_token, length)


def encode(path: str, precision: str) -> None:
    """Measure mean-pooled embeddings of length 1."""
    told = {**properties(path, precision), "PERFORMANCE_HINT": "LATENCY"}
    file = str(Path(path, "openvino_model.xml"))
    model = openvino.Core().compile_model(file, "CPU", told)
    names = [value.get_any_name() for value in model.inputs]

    def embed(rows: list[list[int]]) -> Any:
        ids = np.array(rows, np.int64)
        given = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "token_type_ids": np.zeros_like(ids),
        }
        mean = model({name: given[name] for name in names})[0].mean(1)
        return mean / np.linalg.norm(mean, axis=-1, keepdims=True)

    measure(embed)


if __name__ == "__main__":
    job, path, precision, *size = sys.argv[1:]
    if job == "encode":
        encode(path, precision)
    else:
        run = generate if job == "generate" else prefill
        workload.say_last(**run(path, precision, int(size[1])))
