"""The canary: the first executable that a bundle loads must give its golden answer before any result is used.

A machine asks an executable once. What it answered is kept (machine/kept_files.py), so later starts read one
file. An executable with a wrong answer is in quarantine there (quarantine.py).
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal, final

from prejit.runtime.errors import PrejitWarning, RejectError
from prejit.runtime.format.arrays import RECIPE
from prejit.runtime.format.bundle_schema import Config, ProgramEntry
from prejit.runtime.machine.fingerprint import Fingerprint, read_xla_flags
from prejit.runtime.machine.kept_files import KeptAnswer, answer_file, read_answer
from prejit.runtime.verdict import Axis

Checks = Literal["off", "one", "all"]
"""Which executables must give their golden answers when they are loaded for the first time on a machine."""


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

    `weights` is the digest of the weights layer; empty: the bundle has none. The machine is the real one.
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
        config: Config,
        weights: str,
        machine: Fingerprint,
        *,
        checks: Checks,
        compiles: bool,
        on_fallback: Callable[[Axis], object] | None,
    ) -> None:
        """Keep what every question needs.

        Args:
            config: of the target whose executables are loaded.
            weights: digest of its weights layer; empty: it has none.
            machine: the real machine.
            checks: which executables are asked.
            compiles: whether portable programs may take the place of executables.
            on_fallback: called with the axis `canary` when one does.
        """
        self.bundle, self.target, self.weights = config.bundle, config.target, weights
        self.machine = machine
        self._checks = checks
        self.compiles = compiles
        self.on_fallback = on_fallback
        self._asked = False  # and answered right; one is enough
        self._suspicious = False  # one was wrong: then the others are asked, too
        self._lock = threading.Lock()

    def quarantined(self, program: ProgramEntry) -> str | None:
        """Return what an executable in quarantine gave for its golden answer; None: it is in none."""
        kept = self.read(program)
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

    def ask(
        self, program: ProgramEntry, first: Callable[[], KeptAnswer], *earlier: ProgramEntry
    ) -> str | None:
        """Compare an executable with its golden answer, unless that is not needed.

        `first` runs it and keeps what it answers. If a program of `earlier` was right, none need be asked.

        Returns:
            What it returned in place of the golden answer; None: it was right, or was not asked.
        """
        with self._lock:  # programs load in several threads, and one is asked
            if not self.asks(program):
                return None
            kept = self.read(program)
            if kept is None and self._checks == "one" and not self._suspicious:
                known = filter(None, map(self.read, earlier))
                kept = next((each for each in known if each.right), None)
            kept = kept or first()
            if kept.right:
                self._asked = True
                return None
            self._suspicious = True
            return kept.difference

    def read(self, program: ProgramEntry) -> KeptAnswer | None:
        """Return what a program's executable answered on this machine; None: it was not asked yet."""
        if not is_known(program):
            return None
        path = answer_file_of(self.weights, program, self.machine)
        try:
            return read_answer(path)
        except RejectError as error:
            warnings.warn(
                f"{error}. It counts as none: {program.name} is asked again.",
                PrejitWarning,
                stacklevel=2,
            )
            return None
