"""The recipe of golden answers, version 1: arguments that a seed makes, so that a bundle stores none of them.

Every argument repeats a pattern of 4,093 pseudorandom words (a prime, so that no axis falls into step with
it). Arguments whose meaning is fixed get values that real calls have: tokens of the vocabulary, lengths that
fill the bucket, positions inside of the context.

A choice among nearly equal numbers may differ between two correct machines. So a bias makes the token that
a decoder chooses the same everywhere. Its log-probability, which no bias changes, shows what was computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from prejit.runtime.device.transfer import dtype_of
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.names import ADAPTED, DRAFT

_PERIOD = 4093
_BIAS = 2.0**20
"""Added to one logit of each row: no model's logits come near it."""
_START = 2
"""The position of the first new token, where the context has room before it."""

Values = np.ndarray[Any, np.dtype[Any]]


def words(seed: int, place: int, count: int = _PERIOD) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return pseudorandom words, uint32 [count].

    It is the finalizer of MurmurHash3 (https://github.com/aappleby/smhasher, fmix32), of a counter. `place`
    is the number of the argument: each has words of its own.
    """
    with np.errstate(over="ignore"):
        mixed = np.arange(count, dtype=np.uint32)
        mixed += np.uint32((seed * 0x9E3779B1 + place * 0x85EBCA77) & 0xFFFFFFFF)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            mixed ^= mixed >> np.uint32(shift)
            mixed *= np.uint32(factor)
    return mixed


def plain_kind(program: ProgramEntry) -> str:
    """Return the kind of a program without what may stand before it: `decode` of `draft-decode`."""
    kind = program.kind
    for beginning in (ADAPTED, "image-", DRAFT):
        kind = kind.removeprefix(beginning)
    return kind


def golden_inputs(
    program: ProgramEntry, arguments: tuple[Array, ...], vocabulary: int, seed: int
) -> Iterator[Values]:
    """Yield the arguments of a golden answer, in the order of the program table, without the weights.

    One at a time: those of a long context take as much memory as its cache.

    `vocabulary` is how many tokens the bundle's model has; 0: it has no model.
    """
    if program.kind == "call":
        mask = program.mask or ""
        yield from (call_input(array, seed, at, mask) for at, array in enumerate(arguments))
        return
    known = _known(program, vocabulary, seed)
    for place, array in enumerate(arguments):
        value = known.get(str(array.path[0])) if len(array.path) == 1 else None
        if value is None:
            value = _pattern(array, seed, place, vocabulary)
            if program.kind.startswith(ADAPTED) and str(array.path[0]).endswith((".A", ".B")):
                # Stacks of adapters, as small as those that are trained.
                value = value / np.float32(64)
        yield _shaped(value, array)


def _known(program: ProgramEntry, vocabulary: int, seed: int) -> Mapping[str, Values]:
    """Return the values of arguments whose meaning is fixed, by name; each repeats to the argument's size."""
    sizes = program.bucket
    rows = np.arange(sizes["batch"])
    length = sizes.get("length") or sizes.get("source") or 0
    kind = plain_kind(program)
    if kind in ("prefill", "verify"):
        length = sizes["prompt"] if kind == "prefill" else sizes["draft"] + 1
    context = sizes.get("context", 0)
    lengths = length >> np.arange(int("sentences" in sizes), 1 + sizes.get("sentences", 0))
    lengths[0] += length - lengths.sum()  # what no sentence has is computed as it comes
    start = max(0, min(_START, context - length))
    chosen = words(seed, -1, sizes["batch"]).astype(np.int64) % max(1, vocabulary)
    bias = np.zeros((sizes["batch"], vocabulary), np.float32)
    if vocabulary:
        bias[rows, chosen] = _BIAS
    known: dict[str, Values] = {
        "length": lengths,  # of sentences in one row each is half of what is left
        "start": np.array([start]),
        "position": np.array([context // 2]),
        "live": np.array([1]),
        "steps": np.array([1]),
        "temperature": np.array([0.0]),
        "top_k": np.array([0]),
        "top_p": np.array([1.0]),
        "min_p": np.array([0.0]),
        "repetition_penalty": np.array([1.0]),
        "presence_penalty": np.array([0.0]),
        "frequency_penalty": np.array([0.0]),
        "seed": np.array([0]),
        "bias": bias,
        "logprobs": np.array([1]),
        "history": np.array([0]),
        "adapter": (rows + 1) % 2,
        "ends": np.array([-1, start + length - 1]),  # of text and of an image, in turns
        "pixels": words(seed, 0) & np.uint32(255),
        "rows": rows % sizes.get("source_batch", 1),
    }
    if kind == "verify":  # drafts that the bias lets pass
        known["tokens"] = np.repeat(chosen, length)
    return known


def _pattern(array: Array, seed: int, place: int, vocabulary: int) -> Values:
    """Return the pattern of an argument of a model: tokens where it has whole numbers."""
    pattern = words(seed, place)
    if array.dtype == "int8":  # rows of a cache: each ends with its factor, a float32
        rows = np.resize(pattern.astype(np.int8), array.shape).clip(-127)
        rows[..., -4:] = np.frombuffer(np.float32(1 / 127).tobytes(), np.int8)
        return rows
    if array.dtype.startswith(("int", "uint")):
        return pattern % np.uint32(max(1, vocabulary))
    return _numbers(pattern)


def call_input(array: Array, seed: int, place: int, mask: str) -> Values:
    """Return an argument of a user's program: numbers between -1 and 1, and 0 to 2 of whole numbers.

    `place` is its number, `mask` the name or position of the argument that masks padding; empty: there is
    none.
    """
    if mask and tuple(map(str, array.path)) == (mask,):
        return _shaped(np.array([True]), array)  # a caller that fills the bucket
    pattern = words(seed, place)
    if array.dtype == "bool" or array.dtype.endswith(("int2", "int4")):
        return _shaped(pattern & np.uint32(1), array)
    if array.dtype.startswith(("int", "uint")):
        return _shaped(pattern % np.uint32(3), array)
    numbers = _numbers(pattern)
    if array.dtype == "float8_e8m0fnu":  # it has no sign
        numbers = np.abs(numbers)
    if array.dtype.startswith("complex"):
        return _shaped(numbers + 1j * numbers[::-1], array)
    return _shaped(numbers, array)


def _numbers(pattern: np.ndarray[Any, np.dtype[np.uint32]]) -> Values:
    """Return float32 numbers from -1 up to 1, exact in 24 bits."""
    return (pattern >> np.uint32(8)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)


def _shaped(values: Values, array: Array) -> Values:
    """Return values in the dtype and shape of an argument, repeated from the start."""
    return np.resize(values.astype(dtype_of(array.dtype)), array.shape)
