"""The programs of a bundle, each made ready when it is first used: loaded, or compiled as a fallback."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from prejit.runtime.base.process_facts import Span, span
from prejit.runtime.base.threads_and_forks import once, start_thread
from prejit.runtime.device import _jaxlib
from prejit.runtime.device.device import Device, Executable
from prejit.runtime.device.transfer import DeviceArray
from prejit.runtime.errors import ClosedError
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.blobs import Layer
from prejit.runtime.format.bundle_schema import Config, ProgramEntry
from prejit.runtime.format.checks.layers import check_signature
from prejit.runtime.format.checks.program_table import check_array
from prejit.runtime.records import dataclass

if TYPE_CHECKING:
    from prejit.runtime.format.constants import Constant
    from prejit.runtime.format.trees import Tree
    from prejit.runtime.machine.kept_files import KeptAnswer
    from prejit.runtime.programs.canary import Canary
    from prejit.runtime.programs.local_compiler import LocalCompiler
    from prejit.runtime.programs.mapped_weights import Weights

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """How a program was obtained.

    Attributes:
        program: its name.
        source: `loaded` (the bundle's executable), `compiled` (here, now), `kept` (compiled here at an
            earlier start), `compiling` (or waiting for that) or `unused` (so far).
        seconds: how long it took to become ready for the first time; 0 until it is.
    """

    program: str
    source: str
    seconds: float


@final
class Programs:
    """The executables of a bundle on one device. Safe to use from many threads.

    Attributes:
        bundle: name of the bundle.
        config: the program table.
        device: where they run.
        canary: asks executables for their golden answers; None: nothing does.
        table: the rows of the program table by name.
        verification: of all files of the target; no request ends before it has finished.
        waits: when threads waited for a program or placed weights.
        asked: when the first request began, in which thread; None: there was none.
        answered: when its first result was there, in which thread.
        compiled: how many programs were compiled here.
    """

    def __init__(
        self,
        config: Config,
        device: Device,
        executables: Layer | None,
        portable: Layer,
        weights: Weights | None,
        *,
        serve_smaller: bool = False,
        calls: Mapping[str, str] | None = None,
        no_calls: str = "",
        canary: Canary | None = None,
    ) -> None:
        """Bind the programs to a device.

        On a machine that does not match, `executables` is None, and `portable`, StableHLO, is compiled.
        `serve_smaller`: requests may use other programs while theirs compile. `calls`: XLA's name of each
        handler of the user, by its name in programs; `no_calls`: why this process has no handlers.
        """
        self.bundle = config.bundle
        self.table = {program.name: program for program in config.programs}
        self.config, self.device = config, device
        self._executables, self._weights = executables, weights
        self._portable, self.verification = portable, portable.verification
        # The processes of a cluster run the same programs together, whichever are ready, and no others.
        self._serve_smaller = serve_smaller and executables is None and not device.in_cluster
        self.canary = None if device.in_cluster else canary
        self._calls, self._no_calls = calls or {}, no_calls
        self._weights_on_device: dict[str, list[DeviceArray]] = {}
        self.waits: list[Span] = []
        self.asked: tuple[float, int] | None = None
        self.answered: tuple[float, int] | None = None
        self.compiled = 0
        self._ready: dict[str, Executable] = {}
        self._reports: dict[str, ProgramReport] = {}
        self._arguments: dict[str, tuple[Array, ...]] = {}
        self._results: dict[str, tuple[Array, ...]] = {}
        self._trees: dict[tuple[str, str], Tree] = {}
        self._static: dict[str, dict[str, Constant]] = {}
        self._specialized: dict[str, bytes] = {}  # portable programs for sizes that no bucket has
        self._lock, self._queue_lock = threading.Lock(), threading.Lock()
        self._locks: dict[str, threading.Lock] = {name: threading.Lock() for name in self.table}
        # Needed but not ready: being made, or in the queue of the background thread.
        self._underway: set[str] = set()
        self._failed: set[str] = set()  # in that thread; the caller who needs one gets its error
        self._queue: list[tuple[bool, int, str]] = []
        self._working = False
        self._thread: threading.Thread | None = None
        self._closed: ClosedError | None = None
        self._expected: tuple[str, ...] = ()
        self._remember: Callable[[tuple[str, ...]], object] | None = None

    def close(self, reason: ClosedError) -> None:
        """Drop all executables and weights, and wait for the thread that makes programs ready.

        A request that still runs gets the reason when it needs the next program.
        """
        with self._queue_lock:
            self._closed = reason
            self._queue.clear()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.release()
        with self._lock:
            self._weights = self._executables = None
            self._portable = self._portable._replace(content=b"")
            vars(self).pop("compiler", None)

    def release(self) -> None:
        """Drop executables and weights on the device; the next use of one makes it ready again."""
        with self._lock:
            while self._ready:
                self._ready.popitem()  # one by one, as no other thread runs Python while XLA frees it
            self._weights_on_device.clear()

    def refuse(self, reason: ClosedError) -> object:
        """Give no program any more, without taking a lock; return what was ready."""
        self._closed = reason
        ready, self._ready = self._ready, {}
        return ready

    def _check_open(self) -> None:
        if (reason := self._closed) is not None:
            raise ClosedError(str(reason), hint=reason.hint)

    def ask(self) -> None:
        """Record that a request begins. Only the first one counts."""
        if self.asked is None:
            self.asked = time.perf_counter(), threading.get_ident()

    def answer(self) -> None:
        """Record that a request has a result. Only the first one counts."""
        if self.answered is None:
            self.answered = time.perf_counter(), threading.get_ident()

    def __getitem__(self, name: str) -> Executable:
        """Return the executable of a program, making it ready first if necessary.

        Raises:
            RejectError: its bytes are not those in the program table.
            BuildError: it had to be compiled here, and XLA failed, or this machine cannot load a library that
                it calls.
            ClosedError: the bundle is closed.
        """
        if (executable := self._ready.get(name)) is not None:
            return executable
        self._check_open()  # a fork may never get the lock
        waiting = time.perf_counter()
        with self._locks[name]:
            if (executable := self._ready.get(name)) is None:
                executable = self._make_ready(name)
            self.waits.append(span("loading", waiting))
            return executable

    def _make_ready(self, name: str) -> Executable:
        """Obtain a program and keep it. Raises as `__getitem__`."""
        self._check_open()
        started = time.perf_counter()
        self._underway.add(name)
        try:
            with _jaxlib.unguarded():
                executable, source = self._obtain(self.table[name])
        except Exception:
            self._check_open()  # `close` may have taken what it needs
            raise
        finally:
            self._underway.discard(name)
        self.compiled += source == "compiled"
        seconds = time.perf_counter() - started
        self._reports.setdefault(name, ProgramReport(name, source, seconds))
        _log.info("%s: %s: %s in %.3f s", self.bundle, name, source, seconds)
        self._ready[name] = executable
        if self._closed is not None:  # `close` may have dropped the others before
            self._ready.pop(name, None)
            self._check_open()
        self._failed.discard(name)
        return executable

    def _obtain(self, program: ProgramEntry) -> tuple[Executable, str]:
        """Return the executable of a program and its source: loaded, compiled or kept."""
        if self._executables is None or program.name in self._specialized:
            return self.compiler.obtain(program, self.results(program.name))
        if (canary := self.canary) is None:
            return self.load(program, self.device), "loaded"
        if (wrong := canary.quarantined(program)) is None:
            executable = self.load(program, self.device)
            if (wrong := self.ask_canary(canary, program, executable)) is None:
                return executable, "loaded"
        _log.info("%s: %s: golden answer is wrong: %s", self.bundle, program.name, wrong)
        from prejit.runtime.programs import quarantine

        quarantine.fall_back(canary, program, wrong)
        executable, source = self.compiler.obtain(program, self.results(program.name))
        quarantine.ask_portable(canary, self, program, executable)
        return executable, source

    def ask_canary(
        self, canary: Canary, program: ProgramEntry, executable: Executable
    ) -> str | None:
        """Return what an executable gives in place of its golden answer; None: it is right, or not asked."""

        def first() -> KeptAnswer:
            from prejit.runtime.programs.quarantine import first_answer  # once a machine

            return first_answer(canary, self, program, executable)

        return canary.ask(program, first, *filter(None, map(self.table.get, self._expected)))

    def load(self, program: ProgramEntry, device: Device) -> Executable:
        """Load a program's executable, whether or not it is in quarantine.

        Raises:
            RejectError: its bytes are not those in the program table.
            ExecutableError: XLA cannot load it on this machine.
            ClosedError: the bundle is closed.
        """
        self._check_open()
        assert self._executables is not None
        path = self._executables.path
        serialized = self._executables.unpack(program.executable)
        executable = device.load(serialized, path, self.results(program.name))
        self._check_signature(program, executable, path)
        return executable

    @once
    def compiler(self) -> LocalCompiler:
        """What compiles portable programs on this machine."""
        from prejit.runtime.programs.local_compiler import LocalCompiler  # only a fallback needs it

        return LocalCompiler(
            self.device,
            self._portable.path,
            self._portable_of,
            self._calls,
            self._no_calls,
            self._check_signature,
        )

    def _portable_of(self, program: ProgramEntry) -> bytes:
        """Return the StableHLO of a program: of the bundle, or specialized here."""
        own = self._specialized.get(program.name)
        return self._portable.unpack(program.portable) if own is None else own

    def _check_signature(self, program: ProgramEntry, executable: Executable, path: str) -> None:
        """Compare the arguments and results of an executable with the program table, before it is run."""
        if (compiled := executable.signature()) is not None:
            check_signature(
                *(compiled.arguments, compiled.results, compiled.donated),
                takes=[*self._weight_arguments(program.weights), *self.arguments(program.name)],
                gives=self.results(program.name),
                mesh=self.config.mesh,
                path=f"{path}: {program.name}",
            )

    def _weight_arguments(self, name: str | None) -> list[Array]:
        """Return the tensors of a weight set as arguments of a program."""
        return [
            Array((tensor,), str(value.dtype), value.shape, False, split)
            for tensor, value, split in self._weight_set(name)
        ]

    def _weight_set(self, name: str | None) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
        """Yield name, values and sharding of the tensors of a weight set; nothing for None."""
        if shardings := self.config.weight_shardings or {}:
            from prejit.runtime.format.mesh_splits import parse_sharding
        for tensor in () if name is None else self.config.weight_sets[name]:
            assert self._weights is not None
            value = self._weights.values[tensor]
            text = shardings.get(tensor, "")
            yield tensor, value, parse_sharding(text, value.ndim) if text else ()

    @property
    def are_loaded(self) -> bool:
        """True if programs come out of the bundle; if not, they are compiled here."""
        return self._executables is not None

    def is_here(self, name: str) -> bool:
        """Return whether a program runs at once."""
        return name in self._ready

    def ready(self, name: str) -> bool:
        """Return whether a request should take this program; with `serve_smaller` if it is compiled."""
        is_taken = not self._serve_smaller or name in self._ready
        return is_taken or self.compiler.is_kept(self.table[name])

    def expect(self, names: Sequence[str], remember: Callable[[tuple[str, ...]], object]) -> None:
        """Begin to make the program ready that the first request will probably run first.

        `names`: what an earlier process prepared for its first request, where this bundle has them;
        `remember`: is called in a thread with what the first request prepares, if it differs.
        """
        self._expected, self._remember = tuple(names), remember
        # Only the first one: more would compete with the imports that the first token needs.
        self._enqueue([(False, 0, name) for name in names[:1] if name in self.table])

    def prepare(self, *names: str) -> None:
        """Begin to make programs ready in a thread, in this order. Errors are raised when one is used."""
        remember, self._remember = self._remember, None
        if remember is not None and names != self._expected:
            start_thread(lambda: remember(names), "prejit-remember")
        self._enqueue([(False, place, name) for place, name in enumerate(names)])

    def prepare_later(self, *names: str) -> None:
        """Begin to make programs ready that would serve better than those that are ready now.

        They come after programs that somebody waits for, the smallest first, one at a time.

        Raises:
            BuildError, RejectError: one of them failed in the thread before, and fails again.
        """
        for name in names:
            if name in self._failed:
                self[name]
        sizes = {name: math.prod(self.table[name].bucket.values()) for name in names}
        self._enqueue([(True, size, name) for name, size in sizes.items()])

    def _enqueue(self, entries: list[tuple[bool, int, str]]) -> None:
        with self._queue_lock:
            if self._closed is not None:
                return
            for entry in entries:
                name = entry[-1]
                if not (name in self._ready or name in self._failed or entry in self._queue):
                    self._underway.add(name)
                    self._queue.append(entry)
            self._queue.sort()
            begins = self._queue and not self._working
            if begins and (thread := start_thread(self._work, "prejit-prepare")) is not None:
                self._thread, self._working = thread, True

    def _work(self) -> None:
        while True:
            with self._queue_lock:
                # At exit the interpreter waits for this thread.
                if not self._queue or not threading.main_thread().is_alive():
                    self._working = False
                    return
                _, _, name = self._queue.pop(0)
            try:
                self[name]
            except Exception:  # the caller who uses the program gets it again
                self._failed.add(name)

    def weights(self, name: str | None) -> list[DeviceArray]:
        """Return the tensors of a weight set on the device. On a CPU they are the mapped file itself.

        Raises:
            RejectError: the bundle is damaged.
            StoreError: the disk does not give its bytes.
            ClosedError: the bundle is closed.
        """
        if name is None:
            return []
        if (placed := self._weights_on_device.get(name)) is not None:
            return placed
        started = time.perf_counter()
        with self._lock:
            self._check_open()
            if name not in self._weights_on_device:
                if self._weights is not None:
                    self._weights.wait(self.config.weight_sets[name])
                with _jaxlib.unguarded():
                    self._weights_on_device[name] = [
                        self.device.put(value, split) for _, value, split in self._weight_set(name)
                    ]
            self.waits.append(span("loading", started))
            return self._weights_on_device[name]

    def arguments(self, name: str) -> tuple[Array, ...]:
        """Return the arguments of a program that follow the weights; a damaged one is a RejectError."""
        return self._parsed(name, self.table[name].arguments, self._arguments)

    def results(self, name: str) -> tuple[Array, ...]:
        """Return the results of a program. Raises as `arguments`."""
        return self._parsed(name, self.table[name].results, self._results)

    def _parsed(
        self, name: str, texts: tuple[str, ...], known: dict[str, tuple[Array, ...]]
    ) -> tuple[Array, ...]:
        if name not in known:
            if self.table[name].kind == "call":
                from prejit.runtime.format.checks.call_programs import check_arrays

                known[name] = check_arrays(texts, "call", self.config.mesh, self._place(name))
            else:  # check_config has compared these texts with the signature
                at, mesh = self._place(name), self.config.mesh
                known[name] = tuple(check_array(text, mesh, at) for text in texts)
        return known[name]

    def arguments_tree(self, name: str) -> Tree:
        """Return how the arguments of a program of the user are nested. Raises as `arguments`."""
        return self._tree(name, self.table[name].arguments_tree, self.arguments(name), "arguments")

    def results_tree(self, name: str) -> Tree:
        """Return how the results of a program of the user are nested. Raises as `arguments`."""
        return self._tree(name, self.table[name].results_tree, self.results(name), "results")

    def _tree(self, name: str, text: str | None, arrays: tuple[Array, ...], side: str) -> Tree:
        if (name, side) not in self._trees:
            from prejit.runtime.format.checks.call_programs import check_tree

            self._trees[name, side] = check_tree(text, arrays, f"{self._place(name)}: {side}")
        return self._trees[name, side]

    def static(self, name: str) -> dict[str, Constant]:
        """Return the values of the static arguments of a program. Raises as `arguments`."""
        if name not in self._static:
            from prejit.runtime.format.checks.call_programs import check_static

            self._static[name] = check_static(self.table[name], self._place(name))
        return self._static[name]

    def _place(self, name: str) -> str:
        """Return where a program's texts are, for errors."""
        return f"{self.config.bundle}: program table of {self.config.target}: {name}"

    @property
    def usage(self) -> str:
        """How a caller runs them, for hints: the commands, and the names of functions."""
        from prejit.runtime.programs.usage_hint import usage_of  # errors need it

        return usage_of(self.table.values())

    def obtained(self) -> dict[str, ProgramReport]:
        """Return how each ready program was obtained, by name."""
        return dict(self._reports)

    def report(self) -> tuple[ProgramReport, ...]:
        """Return how each program was obtained, in the order of the table."""
        compiling = self._underway if self._executables is None else ()
        return tuple(
            self._reports.get(name)
            or ProgramReport(name, "compiling" if name in compiling else "unused", 0.0)
            for name in self.table
        )
