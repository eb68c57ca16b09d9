"""Golden answers on this machine: ask for them, keep what was answered, and what follows from a wrong one.

An executable with a wrong answer is in quarantine on this machine: its portable program takes its place, if
`load` may compile, and must give the golden answer in its stead.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

from prejit.runtime.device.device import Executable
from prejit.runtime.errors import AnswerError, FallbackWarning, PrejitWarning
from prejit.runtime.fallback_reporting import count_axis
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.machine.kept_files import KeptAnswer, write_answer
from prejit.runtime.programs import golden_check
from prejit.runtime.programs.canary import Canary, answer_file_of, is_known
from prejit.runtime.programs.golden_check import Asked, Deviation
from prejit.runtime.records import dataclass
from prejit.runtime.verdict import Axis

AXIS = "canary"
"""The name in `fallback_counts` of an executable that gives a wrong answer."""


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """The outcome of asking a program for its golden answer.

    Attributes:
        program: its name.
        source: where the golden answer came from; empty: there is none, or of a newer recipe.
        ran: `executable`, or `portable`: this machine matches no target.
        share: the largest difference, as a share of the tolerance.
        difference: what it returned in place of the golden answer; empty: it was right.
        lifted: whether it was in quarantine until now.
    """

    program: str
    source: str
    ran: str
    share: float
    difference: str = ""
    lifted: bool = False


def compare(programs: Asked, program: ProgramEntry, executable: Executable) -> Deviation:
    """Return the largest difference between the golden answer of a program and what it returns here.

    It has a golden answer of our recipe. A program that fails gives no answer, unless memory was missing:
    that says nothing about the program.

    Raises:
        RejectError: the bundle is damaged.
        JaxRuntimeError: the device has not enough memory.
    """
    golden = program.golden
    assert golden is not None
    try:
        values = golden_check.golden_values(programs, program, executable, golden.seed)
    except RuntimeError as error:
        from jax.errors import JaxRuntimeError  # rare

        if not isinstance(error, JaxRuntimeError) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        found = f"an error: {str(error).partition(chr(10))[0]}"
        return Deviation("its results", math.inf, "values", found)
    results = programs.results(program.name)
    samples = golden_check.samples_of(programs, program, values, golden.seed)
    return golden_check.compare(golden, results, values, samples)


def check_answers(programs: Asked) -> Iterator[CheckedAnswer]:
    """Run every program that has a golden answer, one after the other, and yield what was found.

    What it answered is kept: a wrong answer puts the executable into quarantine, a right one lifts that.

    Raises:
        RejectError: the bundle is damaged.
        BuildError: a portable program does not compile here.
    """
    for program in list(programs.table.values()):
        if not is_known(program) or program.golden is None:
            yield CheckedAnswer(program.name, "", "", 0.0)
            continue
        ran, lifted = "portable", False
        if not programs.are_loaded:
            executable, _ = programs.compiler.obtain(program, programs.results(program.name))
            difference = compare(programs, program, executable)
        else:
            ran, executable = "executable", programs.load(program, programs.device)
            difference = compare(programs, program, executable)
            if programs.canary is not None:
                before = programs.canary.quarantined(program)
                lifted = keep(programs.canary, program, difference).right and before is not None
        wrong = "" if difference.share <= 1 else difference.described()
        source = program.golden.source
        yield CheckedAnswer(program.name, source, ran, difference.share, wrong, lifted)


def wrong_answers(programs: Asked) -> Iterator[str]:
    """Yield what programs return in place of their golden answers: the smallest loaded one of each kind.

    Raises:
        RejectError: the bundle is damaged.
    """
    loaded = [programs.table[name] for name in list(programs.obtained())]
    loaded.sort(key=lambda program: math.prod(program.bucket.values()))
    smallest: dict[tuple[str, str, str | None], ProgramEntry] = {}
    for program in filter(is_known, loaded):
        kind = program.function, program.kind, program.weights
        smallest.setdefault(kind, program)
    for program in smallest.values():
        deviation = compare(programs, program, programs[program.name])
        if deviation.share > 1:
            yield f"{program.name}: {deviation.described()}"


def first_answer(
    canary: Canary, programs: Asked, program: ProgramEntry, executable: Executable
) -> KeptAnswer:
    """Run an executable that was never asked on this machine, keep what it answered, and return that."""
    found = compare(programs, program, executable)
    if found.share > 1 and compare(programs, program, executable).share <= 1:
        # Once is no proof: this process does not use it, and the next one asks again.
        text = f"{found.described()}, and the right answer when it was asked again"
        return _answered(canary, program, text)
    return keep(canary, program, found)


def _answered(canary: Canary, program: ProgramEntry, difference: str) -> KeptAnswer:
    digest = program.executable.raw_digest
    return KeptAnswer(
        not difference, canary.bundle, canary.target, program.name, digest, difference
    )


def keep(canary: Canary, program: ProgramEntry, difference: Deviation) -> KeptAnswer:
    """Keep whether an executable gave its golden answer, and return that."""
    right = difference.share <= 1
    found = "" if right else difference.described()[:2000]
    kept = _answered(canary, program, found)
    path = answer_file_of(canary.weights, program, canary.machine)
    if not write_answer(path, kept) and not right:
        warnings.warn(
            f"{path}: cannot keep that {canary.bundle}: {program.name} gives a wrong answer on this "
            "machine, so the next start finds out again. Set PREJIT_RUNTIME_CACHE to a directory that "
            "can be written.",
            PrejitWarning,
            stacklevel=2,
        )
    return kept


def fall_back(canary: Canary, program: ProgramEntry, difference: str) -> None:
    """Warn that the portable program takes the place of an executable, and count it.

    Raises:
        AnswerError: this process must not compile.
    """
    wrong = wrong_answer(canary, program, difference)
    axis = Axis(AXIS, "equal", "the golden answer", difference, False)
    count_axis(AXIS)
    if canary.on_fallback is not None:
        canary.on_fallback(axis)
    if not canary.compiles:
        raise wrong
    warnings.warn(
        f"{wrong}. It is in quarantine, and its portable program is compiled here; {wrong.hint}.",
        FallbackWarning,
        stacklevel=2,
    )


def wrong_answer(canary: Canary, program: ProgramEntry, difference: str) -> AnswerError:
    """Return the error that an executable gives a wrong answer."""
    return AnswerError(
        f"{canary.bundle}: {program.name}: the executable of {canary.target} does not give its golden "
        f"answer on this machine: {difference}",
        hint="look at this machine (memory, CPU, driver) and at the bundle; `prejit verify --run` asks "
        "the executable again, and lifts its quarantine if the answer is right. `prejit verify --forget` "
        f"removes {answer_file_of(canary.weights, program, canary.machine)}, which keeps it",
    )


def ask_portable(
    canary: Canary, programs: Asked, program: ProgramEntry, executable: Executable
) -> None:
    """Compare a portable program, which takes the place of an executable, with the golden answer.

    Raises:
        AnswerError: it is wrong, too.
    """
    difference = compare(programs, program, executable)
    if difference.share > 1:
        raise AnswerError(
            f"{canary.bundle}: {program.name}: neither its executable nor its portable program gives its "
            f"golden answer on this machine: {difference.described()}",
            hint="the weights or the golden answer of this bundle are wrong, or this machine is: try it "
            "on another, and build it again",
        )
