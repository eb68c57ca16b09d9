"""ONNX Runtime on graphs that optimum exports; IO binding keeps the cache on its side.

peers/onnxruntime_child.py generate DIRECTORY BATCH TOKENS     64 tokens out
peers/onnxruntime_child.py prefill  DIRECTORY BATCH TOKENS     prompts, one after the other
peers/onnxruntime_child.py encode   DIRECTORY                  embeddings of all shapes
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.harness import workload
from benchmarks.peers.encode_child import measure

THREADS = workload.threads()


def session(path: str) -> Any:
    """Return a session for the graph in a directory."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.inter_op_num_threads = 1
    file = str(Path(path, "model.onnx"))
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


class Decoder:
    """A decoder whose past keys and values are inputs and outputs."""

    def __init__(self, path: str, batch: int) -> None:
        """Load a decoder.

        Args:
            path: path of the directory.
            batch: number of rows that run together.
        """
        self._session = session(path)
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]
        self._past = [
            value.name
            for value in self._session.get_inputs()
            if value.name.startswith("past_key_values")
        ]
        empty = np.zeros((batch, workload.HEADS, 0, workload.HEAD_SIZE), np.float32)
        self.empty = [onnxruntime.OrtValue.ortvalue_from_numpy(empty)] * len(self._past)

    def run(self, tokens: list[list[int]], start: int, cache: list[Any]) -> tuple[list[int], Any]:
        """Append new tokens of each row to the cache; return the next ones and the new cache."""
        ids = np.array(tokens, np.int64)
        batch, count = ids.shape
        given = {
            "input_ids": ids,
            "attention_mask": np.ones((batch, start + count), np.int64),
            "position_ids": np.tile(np.arange(start, start + count, dtype=np.int64), (batch, 1)),
        }
        binding = self._session.io_binding()
        for name, value in given.items():
            if name in self._inputs:
                binding.bind_cpu_input(name, value)
        for name, value in zip(self._past, cache, strict=True):
            binding.bind_ortvalue_input(name, value)
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        logits, *updated = binding.get_outputs()
        return [int(row) for row in logits.numpy()[:, -1].argmax(-1)], updated


def generate(path: str, batch: int, start: int) -> Iterator[int]:
    """Yield greedy tokens of the first row."""
    decoder = Decoder(path, batch)
    tokens, cache = decoder.run(workload.prompts(start, batch), 0, decoder.empty)
    yield tokens[0]
    for step in range(workload.NEW_TOKENS - 1):
        tokens, cache = decoder.run([[token] for token in tokens], start + step, cache)
        yield tokens[0]


def prefill(path: str, length: int) -> dict[str, object]:
    """Measure prompts."""
    decoder = Decoder(path, 1)
    return workload.prefill(lambda prompt: decoder.run([prompt], 0, decoder.empty)[0][0], length)


def encode(path: str) -> None:
    """Measure mean-pooled embeddings of length 1."""
    loaded = session(path)
    names = {value.name for value in loaded.get_inputs()}

    def embed(rows: list[list[int]]) -> Any:
        ids = np.array(rows, np.int64)
        given = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "token_type_ids": np.zeros_like(ids),
        }
        inputs = {name: value for name, value in given.items() if name in names}
        mean = loaded.run(["last_hidden_state"], inputs)[0].mean(1)
        return mean / np.linalg.norm(mean, axis=-1, keepdims=True)

    measure(embed)


if __name__ == "__main__":
    job, path, *size = sys.argv[1:]
    if job == "encode":
        encode(path)
    else:
        batch, length = map(int, size)
        if job == "generate":
            workload.say_last(**workload.stream(generate(path, batch, length), batch))
        else:
            workload.say_last(**prefill(path, length))
