"""Methods of a loaded bundle for those who operate it: golden answers, reports, times of its start, sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prejit.runtime.format.names import EXECUTABLES_MEDIA_TYPE, PORTABLE_MEDIA_TYPE
from prejit.runtime.loaded_bundle import LoadedBundle
from prejit.runtime.programs.ready_programs import ProgramReport

if TYPE_CHECKING:
    from prejit.runtime.errors import NumbersError
    from prejit.runtime.programs.quarantine import CheckedAnswer
    from prejit.runtime.programs.watched_runs import Wrap
    from prejit.runtime.start_report import StartReport


class BundleUpkeep(LoadedBundle):
    """The methods of `Bundle` that report, and sleep."""

    def check_answers(self) -> Iterator[CheckedAnswer]:
        """Run every program that has a golden answer, one after the other, and yield what it found.

        What they answer is kept on this machine: an executable with a wrong answer is in quarantine, and one
        with a right answer in none. If this machine matches no target, the portable programs are compiled and
        run.

        Raises:
            RejectError: the bundle is damaged.
            BuildError: a portable program does not compile here.
        """
        from prejit.runtime.programs.quarantine import check_answers

        return check_answers(self._programs)

    def wrong_answers(self) -> Iterator[str]:
        """Yield what loaded programs return in place of their golden answers: the smallest of each kind runs.

        They run on arrays of their own, beside whatever else runs. Unlike `check_answers`, this keeps
        nothing: the memory of this process or a file may be wrong, and not the executable.

        Raises:
            RejectError: the bundle is damaged.
        """
        from prejit.runtime.programs.quarantine import wrong_answers

        return wrong_answers(self._programs)

    def timed_runner(self, program: str) -> Callable[[], float]:
        """Return a function that runs a program with the arguments of its golden answer and times it."""
        from prejit.runtime.programs.watched_runs import timed_runner

        return timed_runner(self._programs, program)

    def watch_runs(self, wrap: Wrap | None) -> Wrap | None:
        """Let programs run through what `wrap` returns for their name and their own run; None: as they are.

        Return the `wrap` before.
        """
        from prejit.runtime.programs.watched_runs import watch

        return watch(self._programs, wrap)

    def check_finite(self, report: Callable[[str, NumbersError], object] | None = None) -> None:
        """Look for NaN and infinity in what programs return from now on; it waits for each run.

        The first program that returns one raises NumbersError, which names it, the result and the index.
        Calls of programs of the user that jaxlib dispatches by itself do not come by.

        Args:
            report: takes the program and the error of each such run, which goes on; None: it raises.
        """
        from prejit.runtime.programs.watched_runs import check_finite

        check_finite(self._programs, report)

    def hlo_modules(self, program: str) -> list[Any]:
        """Return XLA's modules of a program as it was compiled."""
        loaded = self._programs[program].loaded
        if self._programs.are_loaded:
            from prejit.runtime.device._jax_parts import kept_hlo

            entry = self._programs.table[program].executable
            kept = kept_hlo(self._open.layers[EXECUTABLES_MEDIA_TYPE].unpack(entry))
            if kept is not None:
                return [kept]
        return list(loaded.hlo_modules())

    def report(self) -> tuple[ProgramReport, ...]:
        """Return how each program was obtained: loaded, compiled here, kept, compiling, or unused so far."""
        return self._programs.report()

    def start_report(self) -> StartReport:
        """Return where the time went from the start of this process to the first result, with hints.

        Call it soon after the first request, because hints look at what the process has done so far. Before
        the first result, a start ends with `load`.
        """
        from prejit.runtime.start_report import hints, split

        programs = self._programs
        verification = programs.verification
        spans = (*verification.waits, *programs.waits, *self.text.reads)
        report = split(
            self.times,
            self.loaded,
            programs.asked,
            programs.answered,
            spans,
            verification.read_share,
        )
        blob = self._open.layers[PORTABLE_MEDIA_TYPE].path
        return replace(report, hints=hints(report, blob, programs.report()))

    def device_memory_bytes(self) -> int | None:
        """Return the peak memory in use on an accelerator; None on a CPU."""
        return self._programs.device.memory_bytes()

    def sleep(self) -> None:
        """Drop executables, and weights on an accelerator, and give their memory back to the system.

        Weights stay mapped files, and what is verified stays verified. A call that runs keeps what it uses,
        and later calls make ready again what they need. Sessions, batches and bound programs keep their own.
        """
        from prejit.runtime.base.process_memory import give_back
        from prejit.runtime.device._jax_parts import collect_garbage

        known = vars(self)
        if (encoder := known.get("encoder")) is not None:
            encoder.release()
        getattr(known.get("decoder"), "spares", {}).clear()
        self._programs.release()
        if (dispatched := known.get("dispatched")) is not None:
            dispatched.close()
        known.pop("on_jax", None)
        collect_garbage()
        give_back()

    def wake(self) -> None:
        """Make the programs ready that were used so far. Without it, the first calls do.

        Raises:
            ClosedError: the bundle is closed.
            ExecutableError: XLA cannot load one on this machine any more.
        """
        if names := self._programs.obtained():
            self.prepare(*names)
