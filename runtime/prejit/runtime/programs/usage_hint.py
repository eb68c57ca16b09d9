"""How a caller runs the programs of a bundle, for hints."""

from __future__ import annotations

from collections.abc import Collection

from prejit.runtime.format.bundle_schema import ProgramEntry, functions_of
from prejit.runtime.format.checks.program_interfaces import DECODER_KINDS, ENCODER_KINDS


def usage_of(programs: Collection[ProgramEntry]) -> str:
    """Return how a caller runs programs, for hints: the commands, and the names of functions."""
    kinds = {program.kind for program in programs}
    found = []
    if not kinds.isdisjoint(DECODER_KINDS):
        found.append("generate with `prejit generate` or `Bundle.generate`")
    if not kinds.isdisjoint(ENCODER_KINDS):
        found.append("encode sentences with `prejit encode` or `Bundle.encode`")
    if functions := functions_of(programs):
        known = ", ".join(sorted(functions))
        found.append(f"call one of its programs with `prejit call` or `Bundle.call`: {known}")
    return "; ".join(found)
