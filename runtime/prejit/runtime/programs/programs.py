"""The programs of a bundle, each made ready when it is first wanted: loaded, or compiled as a fallback."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from prejit.runtime.base.once import once
from prejit.runtime.device.executable import Device, DeviceArray, Executable
from prejit.runtime.errors import MismatchError
from prejit.runtime.format.arrays import Array, parse_sharding
from prejit.runtime.format.blobs import Layer
from prejit.runtime.format.config_checks import check_arrays
from prejit.runtime.format.layer_checks import check_signature
from prejit.runtime.format.schema import Config, Program
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.programs import compile_cache


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """How a program was obtained.

    Attributes:
        program: its name.
        source: `loaded` (the bundle's executable), `compiled` (here, now), `kept` (compiled here at an
            earlier start), `compiling` (or waiting for that) or `unused` (not wanted so far).
        seconds: that it took to get ready; 0 until it is.
    """

    program: str
    source: str
    seconds: float


@final
class Programs:
    """The executables of a bundle on one device. Safe for many threads."""

    def __init__(
        self,
        config: Config,
        device: Device,
        executables: Layer | None,
        portable: Layer,
        weights: dict[str, np.ndarray[Any, Any]],
        *,
        serve_smaller: bool = False,
    ) -> None:
        """Binds the programs to a device.

        Args:
            config: the program table.
            device: where they run.
            executables: None where the machine does not match: programs are compiled from portable.
            portable: StableHLO of the same programs.
            weights: tensors of the weights layer, by name.
            serve_smaller: whether a request is served with what is ready while its programs compile.
        """
        self.table = {program.name: program for program in config.programs}
        self._config = config
        self._device = device
        self._executables = executables
        self._portable = portable
        self._weights = weights
        # In a cluster every process must run the same programs, whatever it has ready.
        self._serve_smaller = serve_smaller and executables is None and not device.in_cluster
        self._weights_on_device: dict[str, list[DeviceArray]] = {}
        self._ready: dict[str, Executable] = {}
        self._reports: dict[str, ProgramReport] = {}
        self._arguments: dict[str, tuple[Array, ...]] = {}
        self._results: dict[str, tuple[Array, ...]] = {}
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {name: threading.Lock() for name in self.table}
        # Not ready, but wanted: being made, or in the queue of the thread that makes them.
        self._underway: set[str] = set()
        self._failed: set[str] = set()  # in that thread: whoever wants one meets its error
        self._queue: list[tuple[bool, int, str]] = []
        self._queue_lock = threading.Lock()
        self._working = False
        self._expected: tuple[str, ...] = ()
        self._remember: Callable[[tuple[str, ...]], object] | None = None

    def __getitem__(self, name: str) -> Executable:
        """The executable of a program.

        Raises:
            RejectError: its bytes are not those that the program table names.
            BuildError: it had to be compiled here, and XLA refused.
        """
        if (executable := self._ready.get(name)) is not None:
            return executable
        with self._locks[name]:
            if name not in self._ready:
                started = time.perf_counter()
                self._underway.add(name)
                try:
                    executable, source = self._obtain(self.table[name])
                    self._reports[name] = ProgramReport(name, source, time.perf_counter() - started)
                    self._ready[name] = executable
                finally:
                    self._underway.discard(name)
                self._failed.discard(name)
            return self._ready[name]

    def _obtain(self, program: Program) -> tuple[Executable, str]:
        results = self.results(program.name)
        if self._executables is not None:
            path = self._executables.path
            serialized = self._executables.unpack(program.executable)
            executable = self._device.load(serialized, path, results)
            self._check_signature(program, executable, path)
            return executable, "loaded"

        def compile_here() -> Executable:
            portable = self._portable.unpack(program.portable)
            executable = self._device.compile(portable, program.platforms or (), results)
            self._check_signature(program, executable, self._portable.path)
            return executable

        if self._device.in_cluster:
            # Processes of a cluster compile together: XLA shares out its autotuning among them. Who held
            # the cache's lock would wait for those that wait for the lock.
            return compile_here(), "compiled"
        compiled: list[Executable] = []

        def compile_program() -> bytes:
            compiled.append(compile_here())
            return compiled[0].serialize()

        refused = None
        while True:
            serialized, now = compile_cache.compiled_here(
                self._as_kept(program),
                self._machine,
                compile_program,
                refused=refused,
            )
            if now:
                return compiled[0], "compiled"
            try:
                executable = self._device.load(serialized, self._portable.path, results)
            except MismatchError:  # kept by another build of jaxlib, say
                refused = serialized
                continue
            self._check_signature(program, executable, self._portable.path)
            return executable, "kept"

    def _check_signature(self, program: Program, executable: Executable, path: str) -> None:
        """Compares what a program takes and gives with the program table, before anything is run.

        Raises:
            RejectError: they differ. XLA would refuse the arguments, or results be read as what they are not.
        """
        if (compiled := executable.signature()) is None:
            return
        check_signature(
            compiled.arguments,
            compiled.results,
            compiled.donated,
            takes=[*self._of_weights(program.weights), *self.arguments(program.name)],
            gives=self.results(program.name),
            mesh=self._config.mesh,
            path=f"{path}: {program.name}",
        )

    def _of_weights(self, name: str | None) -> list[Array]:
        """The tensors of a weight set, as arguments."""
        if name is None:
            return []
        shardings = self._config.weight_shardings or {}
        return [
            Array((tensor,), str(value.dtype), value.shape, False, split)
            for tensor in self._config.weight_sets[name]
            for value in (self._weights[tensor],)
            for split in (parse_sharding(shardings.get(tensor, ""), value.ndim),)
        ]

    def _as_kept(self, program: Program) -> compile_cache.Portable:
        """A program as the cache of what is compiled here knows it."""
        return compile_cache.Portable(
            program.portable.raw_digest,
            program.platforms or (),
            self._device.platform,
            self._device.mesh,
        )

    @once
    def _machine(self) -> Fingerprint:
        return Fingerprint.current()

    @property
    def are_loaded(self) -> bool:
        """Whether programs come out of the bundle; else they are compiled here."""
        return self._executables is not None

    def ready(self, name: str) -> bool:
        """Whether a request should take this program rather than another that could serve it.

        Always, unless requests are served with what is ready: then, whether nothing need be compiled.
        """
        if not self._serve_smaller or name in self._ready:
            return True
        return compile_cache.is_kept(self._as_kept(self.table[name]), self._machine)

    def expect(self, names: Sequence[str], remember: Callable[[tuple[str, ...]], object]) -> None:
        """Begins to make ready what the first request will likely run first, before there is one.

        Args:
            names: as they were remembered; those that this bundle has not are ignored.
            remember: is told, in a thread, what the first request prepares, if that is anything else.
        """
        # The first alone: others would compete with the imports for what the first token needs.
        self._enqueue([(False, 0, name) for name in names[:1] if name in self.table])
        self._expected, self._remember = tuple(names), remember

    def prepare(self, *names: str) -> None:
        """Begins to make programs ready, in this order, in a thread; errors show when they are wanted."""
        remember, self._remember = self._remember, None
        if remember is not None and names != self._expected:
            with contextlib.suppress(RuntimeError):  # no more threads
                threading.Thread(target=remember, args=(names,)).start()
        self._enqueue([(False, place, name) for place, name in enumerate(names)])

    def wish(self, *names: str) -> None:
        """Begins to make programs ready that would serve better than those that do now.

        They come after what is waited for, the smallest first, one at a time.

        Raises:
            BuildError, RejectError: one of them failed in the thread, and fails again.
        """
        for name in names:
            if name in self._failed:
                self[name]
        sizes = {name: math.prod(self.table[name].bucket.values()) for name in names}
        self._enqueue([(True, size, name) for name, size in sizes.items()])

    def _enqueue(self, entries: list[tuple[bool, int, str]]) -> None:
        with self._queue_lock:
            for entry in entries:
                name = entry[-1]
                if not (name in self._ready or name in self._failed or entry in self._queue):
                    self._underway.add(name)
                    self._queue.append(entry)
            self._queue.sort()
            if self._working or not self._queue:
                return
            # No daemon: while the interpreter ends, those are torn out of XLA, which aborts the process.
            with contextlib.suppress(
                RuntimeError
            ):  # no more threads, as while the interpreter ends
                threading.Thread(target=self._work).start()
                self._working = True

    def _work(self) -> None:
        while True:
            with self._queue_lock:
                # The interpreter waits for this thread to end.
                if not self._queue or not threading.main_thread().is_alive():
                    self._working = False
                    return
                _, _, name = self._queue.pop(0)
            try:
                self[name]
            except Exception:  # the caller who wants the program meets it again
                self._failed.add(name)

    def weights(self, name: str | None) -> list[DeviceArray]:
        """The tensors of a weight set, on the device: the memory of the mapped file on a CPU."""
        if name is None:
            return []
        with self._lock:
            if name not in self._weights_on_device:
                shardings = self._config.weight_shardings or {}
                self._weights_on_device[name] = [
                    self._device.put(value, parse_sharding(shardings.get(tensor, ""), value.ndim))
                    for tensor in self._config.weight_sets[name]
                    for value in (self._weights[tensor],)
                ]
            return self._weights_on_device[name]

    def arguments(self, name: str) -> tuple[Array, ...]:
        """Those arguments of a program that follow the weights, parsed when they are first wanted.

        Raises:
            RejectError: the program table spells one as the format does not.
        """
        return self._parsed(name, self.table[name].arguments, self._arguments)

    def results(self, name: str) -> tuple[Array, ...]:
        """The results of a program, parsed when they are first wanted. Raises as `arguments`."""
        return self._parsed(name, self.table[name].results, self._results)

    def _parsed(
        self, name: str, texts: tuple[str, ...], known: dict[str, tuple[Array, ...]]
    ) -> tuple[Array, ...]:
        if name not in known:
            at = f"{self._config.bundle}: program table of {self._config.target}: {name}"
            known[name] = check_arrays(texts, self.table[name].kind, self._config.mesh, at)
        return known[name]

    def obtained(self) -> dict[str, ProgramReport]:
        """How each program was obtained that is ready, by name."""
        return dict(self._reports)

    def report(self) -> tuple[ProgramReport, ...]:
        """How each program was obtained, in the order of the table."""
        compiling = self._underway if self._executables is None else ()
        return tuple(
            self._reports.get(name)
            or ProgramReport(name, "compiling" if name in compiling else "unused", 0.0)
            for name in self.table
        )
