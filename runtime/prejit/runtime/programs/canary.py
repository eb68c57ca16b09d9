"""The canary: the first executable that a bundle loads must give its golden answer before any result is used.

A machine asks an executable once. What it answered is kept (store/known_answers.py), so later starts read one
file. An executable with a wrong answer is in quarantine on this machine: its portable program takes its
place, if `load` may compile, and must give the golden answer in its stead.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, final

from prejit.runtime.errors import AnswerError, FallbackWarning, PrejitWarning, RejectError
from prejit.runtime.fallback import count_axis
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.golden_format import RECIPE
from prejit.runtime.machine.environment import read_xla_flags
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.store.known_answers import KeptAnswer, answer_file, read_answer, write_answer
from prejit.runtime.verdict import Axis

if TYPE_CHECKING:
    from prejit.runtime.device.executable import Executable
    from prejit.runtime.programs.golden_check import Deviation

AXIS = "canary"
"""The name in `fallback_counts` of an executable that gives a wrong answer."""

Checks = Literal["off", "one", "all"]
"""Which executables must give their golden answers when they are loaded for the first time on a machine."""

Answer = Callable[[ProgramEntry, "Executable"], "Deviation"]
"""Runs a program and compares its answer."""


class CheckedAnswer(NamedTuple):  # a dataclass takes 0.5 ms to make, which every start would pay
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


def is_known(program: ProgramEntry) -> bool:
    """Return whether a program has a golden answer of a recipe that this version has."""
    return program.golden is not None and program.golden.recipe == RECIPE


def _what_computes(machine: Fingerprint) -> dict[str, object]:
    """Return the properties of a machine that decide what an executable computes on it."""
    unnamed = {"cpu_count", "memory_bytes", "device_memory_bytes", "device_count"}
    names = (name for name in machine.__slots__ if name not in unnamed)
    return {name: value for name in names if (value := getattr(machine, name)) is not None}


def answer_file_of(weights: str, program: ProgramEntry, machine: Fingerprint) -> Path:
    """Return the file of what a program's executable answered on a machine.

    Args:
        weights: digest of the weights layer; empty: the bundle has none.
        program: the program, with a golden answer.
        machine: the real machine.
    """
    return answer_file(
        executable=program.executable.raw_digest,
        weights=weights,
        golden=program.golden,
        machine=_what_computes(machine),
        max_isa=[
            flag
            for flag in read_xla_flags(os.environ).split()
            if flag.startswith("--xla_cpu_max_isa")
        ],
    )


@final
class Canary:
    """Asks the executables of one bundle for their golden answers. Safe to use from many threads."""

    def __init__(
        self,
        bundle: str,
        target: str,
        weights: str,
        machine: Fingerprint,
        *,
        checks: Checks,
        compiles: bool,
        on_fallback: Callable[[Axis], object] | None,
    ) -> None:
        """Keep what every question needs.

        Args:
            bundle: name of the bundle.
            target: the target whose executables are loaded.
            weights: digest of its weights layer; empty: it has none.
            machine: the real machine.
            checks: which executables are asked.
            compiles: whether portable programs may take the place of executables.
            on_fallback: called with the axis `canary` when one does.
        """
        self._bundle, self._target, self._weights = bundle, target, weights
        self._machine = machine
        self._checks = checks
        self._compiles = compiles
        self._on_fallback = on_fallback
        self._asked = False  # and answered right; one is enough
        self._suspicious = False  # one was wrong: then the others are asked, too
        self._lock = threading.Lock()

    def quarantined(self, program: ProgramEntry) -> str | None:
        """Return what an executable in quarantine gave for its golden answer; None: it is in none."""
        kept = self._read(program)
        if kept is None:
            return None
        if kept.right:
            self._asked = True
            return None
        self._suspicious = True
        return kept.difference

    def asks(self, program: ProgramEntry) -> bool:
        """Return whether an executable has to give its golden answer, if none of it is kept."""
        if not is_known(program) or self._checks == "off":
            return False
        return self._checks == "all" or self._suspicious or not self._asked

    def ask(self, program: ProgramEntry, executable: Executable, answer: Answer) -> str | None:
        """Compare an executable with its golden answer, unless that is not needed.

        Args:
            program: the program, which is in no quarantine.
            executable: what was loaded.
            answer: runs it.

        Returns:
            What it returned in place of the golden answer; None: it was right, or was not asked.
        """
        with self._lock:  # programs load in several threads, and one is asked
            if not self.asks(program):
                return None
            kept = self._read(program)
            if kept is None:
                found = answer(program, executable)
                if found.share > 1 and answer(program, executable).share <= 1:
                    # Once is no proof: this process does not use it, and the next one asks again.
                    self._suspicious = True
                    return f"{found.described()}, and the right answer when it was asked again"
                kept = self.keep(program, found)
            if kept.right:
                self._asked = True
                return None
            self._suspicious = True
            return kept.difference

    def keep(self, program: ProgramEntry, difference: Deviation) -> KeptAnswer:
        """Keep whether an executable gave its golden answer, and return that."""
        right = difference.share <= 1
        found = "" if right else difference.described()[:2000]
        digest = program.executable.raw_digest
        kept = KeptAnswer(right, self._bundle, self._target, program.name, digest, found)
        path = answer_file_of(self._weights, program, self._machine)
        if not write_answer(path, kept) and not right:
            warnings.warn(
                f"{path}: cannot keep that {self._bundle}: {program.name} gives a wrong answer on this "
                "machine, so the next start finds out again. Set PREJIT_RUNTIME_CACHE to a directory that "
                "can be written.",
                PrejitWarning,
                stacklevel=2,
            )
        return kept

    def _read(self, program: ProgramEntry) -> KeptAnswer | None:
        if not is_known(program):
            return None
        path = answer_file_of(self._weights, program, self._machine)
        try:
            return read_answer(path)
        except RejectError as error:
            warnings.warn(
                f"{error}. It counts as none: {program.name} is asked again.",
                PrejitWarning,
                stacklevel=2,
            )
            return None

    def fall_back(self, program: ProgramEntry, difference: str) -> None:
        """Warn that the portable program takes the place of an executable, and count it.

        Raises:
            AnswerError: this process must not compile.
        """
        wrong = self.error(program, difference)
        axis = Axis(AXIS, "equal", "the golden answer", difference, False)
        count_axis(AXIS)
        if self._on_fallback is not None:
            self._on_fallback(axis)
        if not self._compiles:
            raise wrong
        warnings.warn(
            f"{wrong}. It is in quarantine, and its portable program is compiled here; {wrong.hint}.",
            FallbackWarning,
            stacklevel=2,
        )

    def error(self, program: ProgramEntry, difference: str) -> AnswerError:
        """Return the error that an executable gives a wrong answer."""
        return AnswerError(
            f"{self._bundle}: {program.name}: the executable of {self._target} does not give its golden "
            f"answer on this machine: {difference}",
            hint="look at this machine (memory, CPU, driver) and at the bundle; `prejit verify --run` asks "
            "the executable again, and lifts its quarantine if the answer is right. `prejit verify --forget` "
            f"removes {answer_file_of(self._weights, program, self._machine)}, which keeps it",
        )

    def ask_portable(self, program: ProgramEntry, executable: Executable, answer: Answer) -> None:
        """Compare a portable program, which takes the place of an executable, with the golden answer.

        Raises:
            AnswerError: it is wrong, too.
        """
        difference = answer(program, executable)
        if difference.share > 1:
            raise AnswerError(
                f"{self._bundle}: {program.name}: neither its executable nor its portable program gives its "
                f"golden answer on this machine: {difference.described()}",
                hint="the weights or the golden answer of this bundle are wrong, or this machine is: try it "
                "on another, and build it again",
            )
