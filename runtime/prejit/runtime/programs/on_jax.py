"""The user's programs of a bundle on jax's own client: their results are arrays of the host program's jax."""

from __future__ import annotations

import threading
from typing import final

from prejit.runtime.base.threads_and_forks import once
from prejit.runtime.device import _jaxlib
from prejit.runtime.device.device import Device, Executable
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.programs.ready_programs import Programs
from prejit.runtime.programs.usage_hint import functions_of


@final
class JaxPrograms:
    """The user's programs of a bundle that matches this machine. Safe to use from many threads.

    Attributes:
        programs: the program table, and what its texts mean.
        platform: `cpu`, `cuda` or `tpu`.
    """

    def __init__(self, programs: Programs) -> None:
        """Keep what loading needs."""
        self.programs = programs
        # Those of the bundle alone: others were compiled here.
        self._buckets = functions_of(programs.config.programs)
        self.platform = programs.device.platform
        self._loaded: dict[str, Executable] = {}
        self._lock = threading.Lock()

    @once
    def device(self) -> Device:
        """The first device of jax's client for the bundle's platform, or as many as its mesh has."""
        return Device(self.platform, self.programs.config.mesh, of_jax=True)

    def buckets(self, name: str) -> list[ProgramEntry]:
        """Return the buckets of a program; none: there is no such program."""
        return self._buckets.get(name, [])

    def names(self) -> list[str]:
        """Return the names of the programs, sorted."""
        return sorted(self._buckets)

    def executable(self, name: str) -> Executable:
        """Return the executable of a bucket, loaded when it is first used.

        Raises:
            RejectError: its bytes are not those in the program table.
            MismatchError: XLA cannot load it on this machine, or it gives a wrong answer here.
        """
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = self._load(name)
            return self._loaded[name]

    def _load(self, name: str) -> Executable:
        """Load a program's executable, unless it gives a wrong answer on this machine."""
        programs = self.programs
        program, canary = programs.table[name], programs.canary
        if canary is not None:
            wrong = canary.quarantined(program)
            if wrong is None and canary.asks(program):
                with _jaxlib.unguarded():
                    wrong = programs.ask_canary(
                        canary, program, programs.load(program, programs.device)
                    )
            if wrong is not None:
                from prejit.runtime.programs.quarantine import wrong_answer

                raise wrong_answer(canary, program, wrong)
        return programs.load(program, self.device)
