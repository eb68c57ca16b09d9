"""The process that asks programs for their golden answers: `python -m` this module.

The first line of stdin is a request, `GoldenRequest` as JSON. The bytes of the layers that are in no file
follow. Each line of stdout is one program: `{"program": ..., "tolerance": ..., "results": ...}`, or `"error"`
in place of results.
A process of its own: a program may end it, and XLA takes the number of its threads from the environment.
"""

from __future__ import annotations

import json
import mmap
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from prejit.compiler.base.process_errors import error_text
from prejit.runtime.base.child_process import end_with_parent
from prejit.runtime.base.files import Content
from prejit.runtime.base.typed_json import from_json, from_plain
from prejit.runtime.device import kernels
from prejit.runtime.device.device import Device, Executable
from prejit.runtime.device.kernels import load_library
from prejit.runtime.format.blobs import Layer
from prejit.runtime.format.bundle_schema import Config, ProgramEntry
from prejit.runtime.format.checks.seldom_parts import handler_names
from prejit.runtime.programs.golden_check import (
    GoldenResult,
    format_results,
    golden_values,
    sampled,
    samples_of,
)
from prejit.runtime.programs.mapped_weights import open_weights
from prejit.runtime.programs.ready_programs import Programs

NUDGE = 2.0**-16
"""A user's function is asked twice, the second time with arguments that differ by this share. What differs
then says more about rounding than about the program, and is not compared."""


@dataclass(frozen=True)
class GoldenRequest:
    """The request to this process.

    Attributes:
        config: the program table of the target that answers.
        matched: whether its executables run here; if not, its portable programs are compiled.
        wanted: name of a program, a space, and a tolerance.
        weights: file of the weights; None: there are none.
        layers: executables, portable programs, kernels and libraries: the file of each, or the number of its
            bytes that follow. Without kernels these are 0 bytes.
        call_seconds: CPU time limit of a user's function, which SIGPROF ends with this process.
    """

    config: str
    platform: str
    matched: bool
    seed: int
    wanted: tuple[str, ...]
    weights: str | None
    layers: tuple[str | int, ...]
    call_seconds: float


def main() -> None:
    """Answer the request on stdin."""
    request = from_plain(GoldenRequest, json.loads(sys.stdin.buffer.readline()))
    for answer in _answers(request, open_programs(request, sys.stdin.buffer)):
        print(json.dumps(answer), flush=True)
    signal.setitimer(signal.ITIMER_PROF, 0)


def _mapped(path: str) -> Content:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _answers(request: GoldenRequest, programs: Programs) -> Iterator[dict[str, Any]]:
    for wanted in request.wanted:
        name, _, tolerance = wanted.rpartition(" ")
        answer: dict[str, Any] = {"program": name, "tolerance": int(tolerance)}
        try:
            answer["results"] = _ask(programs, name, int(tolerance), request)
        except Exception as error:
            answer["error"] = error_text(error)
        yield answer


def open_programs(request: GoldenRequest, following: BinaryIO) -> Programs:
    """Return the programs of a request; `following` has the layers that are in no file."""
    config = from_json(Config, request.config.encode(), "config")
    executables, portable, native, *libraries = [
        following.read(each) if isinstance(each, int) else _mapped(each) for each in request.layers
    ]
    called = {}
    if native:
        kernels.register(kernels.load(bytes(native)))
    if libraries:
        for library, content in zip(config.libraries or (), libraries, strict=True):
            symbols = sorted(set(library.handlers.values()))
            kernels.register(load_library(bytes(content), symbols, library.name))
        called = handler_names(*config.libraries or ())
    weights = None
    if request.weights is not None:
        weights = open_weights(Layer.in_file(request.weights))
    return Programs(
        config,
        Device(request.platform, config.mesh),
        Layer(executables, "the executables") if request.matched else None,
        Layer(portable, "the portable programs"),
        weights,
        calls=called,
        no_calls="the build host runs none of its targets",
    )


def _ask(programs: Programs, name: str, tolerance: int, request: GoldenRequest) -> str:
    program, executable, seed = programs.table[name], programs[name], request.seed
    is_call = program.kind == "call"
    signal.setitimer(signal.ITIMER_PROF, request.call_seconds if is_call else 0)
    found = _sampled(programs, program, executable, tolerance, seed, 0.0)
    if is_call:
        again = _sampled(programs, program, executable, tolerance, seed, NUDGE)
        found = tuple(
            one if one is not None and other is not None and _is_near(one, other) else None
            for one, other in zip(found, again, strict=True)
        )
    return format_results(found)


def _sampled(
    programs: Programs,
    program: ProgramEntry,
    executable: Executable,
    tolerance: int,
    seed: int,
    nudge: float,
) -> tuple[GoldenResult | None, ...]:
    values = golden_values(programs, program, executable, seed, nudge=nudge)
    chosen = samples_of(programs, program, values, seed)
    return tuple(
        None if samples is None else sampled(value, samples, tolerance)
        for value, samples in zip(values, chosen, strict=True)
    )


def _is_near(one: GoldenResult, other: GoldenResult) -> bool:
    """Return whether two answers are equal, but for what small changes of the arguments explain."""
    if one.exponent is None or one.exponent != other.exponent:
        return one == other
    if len(one.samples) != len(other.samples):  # rounding decides whether an element is NaN
        return False
    pairs = zip((one.mean, *one.samples), (other.mean, *other.samples), strict=True)
    return all(
        a == b if isinstance(a, str) or isinstance(b, str) else abs(a - b) <= 1 + abs(a) / 1024
        for a, b in pairs
    )


if __name__ == "__main__":
    end_with_parent()
    main()
