"""Checks of the source that an encoder-decoder reads, and the program that reads it."""

from __future__ import annotations

from typing import Any

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.errors import ContextError, UsageError
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.generation.decoder_programs import DecoderPrograms


def check_source(source: np.ndarray[Any, Any] | None, programs: DecoderPrograms) -> None:
    """Check that a request has a source where the model reads one, of the right shape.

    Raises:
        UsageError: it has none, or one of another shape or kind.
        ContextError: it is longer than the bundle reads.
    """
    if programs.source is None:
        if source is not None:
            raise UsageError(
                "source: expected none, since this model is no encoder-decoder; found one"
            )
        return
    if source is None:
        raise UsageError(
            "source: expected what the model is to read, found none",
            hint='pass it by name: generate(source="...")',
        )
    expected = programs.source
    sizes, axes = expected.shape[1:], expected.variables[1:]
    fits = len(source.shape) == len(sizes) and all(
        axis or size == found for axis, size, found in zip(axes, sizes, source.shape, strict=True)
    )
    kinds = "iu" if expected.dtype.startswith(("int", "uint")) else "iuf"
    if not fits or source.dtype.kind not in kinds:
        shape = ", ".join(
            "N" if axis else str(size) for axis, size in zip(axes, sizes, strict=True)
        )
        raise UsageError(
            f"source: expected {expected.dtype}[{shape}], found {source.dtype}{list(source.shape)}"
        )
    if kinds == "iu":
        arguments.check_vocabulary("source", source.tolist(), programs.decoder.vocab_size)
    encode_for(programs, programs.contexts[0], source.shape[axes.index("source")])


def encode_for(decoder: DecoderPrograms, context: int, size: int) -> ProgramEntry:
    """Return the smallest encode program for a source with this many places.

    Raises:
        ContextError: the source is longer than the longest that the bundle reads.
    """
    kind = ("encode", context)
    own = (p for p in decoder.entries() if (p.kind, p.bucket.get("context")) == kind)
    programs = sorted(own, key=lambda program: program.bucket["source"])
    for program in programs:
        if program.bucket["source"] >= size:
            return program
    raise ContextError(
        f"source: expected at most {programs[-1].bucket['source']} places, found {size}",
        hint="shorten the source, or add a larger one to [generate] source of the manifest",
    )


def as_source(name: str, value: Any) -> Any:
    """Return a source as an array; text is for the bundle, which has the tokenizer."""
    try:
        array = np.asarray(value)
    except Exception:  # a ragged list, a deleted buffer: NumPy raises whatever the object does
        arguments.refuse(name, "an array of numbers, token ids or text", value)
    if array.dtype.kind not in "iuf" or not array.size:
        arguments.refuse(name, "an array of numbers, token ids or text", value)
    return array
