"""How a caller runs the programs of a bundle: for hints, and for those who run any of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.checks.program_interfaces import DECODER_KINDS, ENCODER_KINDS


def usage_of(programs: Collection[ProgramEntry]) -> str:
    """Return how a caller runs programs, for hints: the commands, and the names of functions."""
    kinds = {program.kind for program in programs}
    found = []
    if not kinds.isdisjoint(DECODER_KINDS):
        found.append("generate with `prejit generate` or `Bundle.generate`")
    if not kinds.isdisjoint(ENCODER_KINDS):
        found.append("encode sentences with `prejit encode` or `Bundle.encode`")
    if "image" in kinds:
        found.append("read images with `Bundle.embed_images` or `Bundle.score_images`")
    if functions := functions_of(programs):
        known = ", ".join(sorted(functions))
        found.append(f"call one of its programs with `prejit call` or `Bundle.call`: {known}")
    return "; ".join(found)


def smallest_call(programs: Iterable[ProgramEntry]) -> ProgramEntry:
    """Return the program of the user or of images with the smallest bucket. There must be one."""
    calls = (program for program in programs if program.kind in ("call", "image"))
    return min(calls, key=lambda program: math.prod(program.bucket.values()))


def functions_of(programs: Iterable[ProgramEntry]) -> dict[str, list[ProgramEntry]]:
    """Return the user's programs by the name of their function, each with its buckets."""
    found: dict[str, list[ProgramEntry]] = {}
    for program in programs:
        if program.kind == "call":
            found.setdefault(program.function, []).append(program)
    return found
