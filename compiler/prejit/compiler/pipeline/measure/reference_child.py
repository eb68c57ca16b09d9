"""The process that compares programs with reference results: `python -m` this module.

The first line of stdin is a `ReferenceRequest` as JSON; the bytes of layers follow, as for `golden_child`.
Each line of stdout is a `ReferenceComparison` as JSON, for each reference in its order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from prejit.compiler.base.process_errors import error_text
from prejit.compiler.pipeline.measure.golden_child import GoldenRequest, open_programs
from prejit.runtime.base.child_process import end_with_parent
from prejit.runtime.base.typed_json import from_plain
from prejit.runtime.device.transfer import dtype_of, is_whole, to_numpy
from prejit.runtime.errors import BuildError
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.programs.golden_check import format_results, parse_results, sampled, samples_of
from prejit.runtime.programs.golden_inputs import Values
from prejit.runtime.programs.pytree import dotted, spell
from prejit.runtime.programs.ready_programs import Programs

ARGUMENTS, RESULTS = "args.", "results."
"""How the names of arrays in a file of reference results begin."""


@dataclass(frozen=True)
class ReferenceResults:
    """Arguments and results that a program must reproduce.

    Attributes:
        program: its name.
        file: a .npz file with both.
        tolerance: results may differ by this share of their size, and of the mean size of all of a result.
        golden: exponent of one half, the tolerance of a golden answer that these results are to give; None:
            the arguments are not those of the recipe, and they give none.
    """

    program: str
    file: str
    tolerance: float
    golden: int | None


@dataclass(frozen=True)
class ReferenceComparison:
    """A program's results compared with those of its reference.

    Attributes:
        result: the result that differs most; empty: none does by more than the tolerance.
        index: of the element of it.
        expected, found: the values there.
        difference: between them.
        golden: the reference results as a golden answer.
        error: why the program was not compared; empty: it was.
    """

    program: str
    file: str
    result: str = ""
    index: tuple[int, ...] = ()
    expected: str = ""
    found: str = ""
    difference: str = ""
    golden: str | None = None
    error: str = ""


@dataclass(frozen=True)
class ReferenceRequest:
    """The request to this process: the programs, as for golden answers, and what they must reproduce."""

    programs: GoldenRequest
    references: tuple[ReferenceResults, ...]


def main() -> None:
    """Answer the request on stdin."""
    request = from_plain(ReferenceRequest, json.loads(sys.stdin.buffer.readline()))
    programs = open_programs(request.programs, sys.stdin.buffer)
    for reference in request.references:
        about = ReferenceComparison(reference.program, reference.file)
        try:
            found = _compare(programs, reference, about)
        except Exception as error:
            found = replace(about, error=error_text(error))
        print(json.dumps(asdict(found)), flush=True)


def _compare(
    programs: Programs, reference: ReferenceResults, about: ReferenceComparison
) -> ReferenceComparison:
    program, device = programs.table[reference.program], programs.device
    with np.load(reference.file, allow_pickle=False) as file:
        given = _arrays(file, ARGUMENTS, programs.arguments(program.name))
        expected = _arrays(file, RESULTS, programs.results(program.name))
    placed = [
        (device.copy if array.donated else device.put)(np.ascontiguousarray(value), array.sharding)
        for array, value in zip(programs.arguments(program.name), given, strict=True)
    ]
    weights = programs.weights(program.weights)
    results = programs[program.name].run([*weights, *placed])
    share = 1.0
    for array, wanted, result in zip(
        programs.results(program.name), expected, results, strict=True
    ):
        shares, differences, found = _differences(wanted, to_numpy(result), reference.tolerance)
        if shares.size and shares.max() > share:
            index = np.unravel_index(int(shares.argmax()), shares.shape)
            share = float(shares[index])
            about = replace(
                about,
                result=spell(array.path),
                index=tuple(map(int, index)),
                expected=f"{wanted[index]:.6g}",
                found=f"{found[index]:.6g}",
                difference=f"{differences[index]:.3g}",
            )
    if reference.golden is None or about.result:
        return about
    return replace(about, golden=_golden(programs, program, expected, reference.golden))


def _arrays(file: Mapping[str, Any], prefix: str, arrays: Sequence[Array]) -> list[Values]:
    """Return arrays of a file in the dtypes of a program; those of ml_dtypes are raw bytes in the file."""
    found = []
    for array in arrays:
        name = prefix + (dotted(array.path) or "result")
        if name not in file:
            raise BuildError(f"expected an array {name!r}, found none; there are {', '.join(file)}")
        value, dtype = file[name], dtype_of(array.dtype)
        if value.shape != array.shape:
            raise BuildError(
                f"{name}: expected the shape {list(array.shape)}, found {list(value.shape)}"
            )
        lost = "fc" if is_whole(dtype) else "" if dtype.kind == "c" else "c"
        if value.dtype.kind in lost:
            raise BuildError(f"{name}: expected {array.dtype}, found {value.dtype}")
        found.append(value.view(dtype) if value.dtype.kind == "V" else value.astype(dtype))
    return found


def _differences(expected: Values, found: Values, tolerance: float) -> tuple[Any, Any, Values]:
    """Return of each element its difference as a share of what is allowed, and the difference.

    Whole numbers must be equal; a NaN or an infinity must be the same.
    """
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    one, other = expected.astype(wide), found.astype(wide)
    with np.errstate(all="ignore"):
        distance = np.abs(other - one)
        size = np.abs(one)
        finite = size[np.isfinite(size)]
        allowed = tolerance * (size + (finite.mean() if finite.size else 0.0))
        if is_whole(expected.dtype):
            allowed = np.zeros_like(size)
        shares = np.where(distance > allowed, distance / allowed, 0.0)
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        odd = ~(np.isfinite(one) & np.isfinite(other))
    return np.where(odd, np.where(same, 0.0, np.inf), shares), np.where(same, 0.0, distance), found


def _golden(
    programs: Programs, program: ProgramEntry, values: Sequence[Values], tolerance: int
) -> str:
    """Return reference results as a golden answer, without results that the own answer does not compare."""
    assert program.golden is not None
    own = parse_results(program.golden.results)
    samples = samples_of(programs, program, values, program.golden.seed)
    return format_results(
        tuple(
            None if known is None or some is None else sampled(value, some, tolerance)
            for known, value, some in zip(own, values, samples, strict=True)
        )
    )


if __name__ == "__main__":
    end_with_parent()
    main()
