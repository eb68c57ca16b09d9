"""The programs of a bundle, each made ready when it is first wanted: loaded, or compiled as a fallback."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from prejit.runtime import compile_cache, verify
from prejit.runtime.bundle import Array, Config, Program, Segment
from prejit.runtime.errors import RejectError
from prejit.runtime.executable import Device, DeviceArray, Executable
from prejit.runtime.fingerprint import Fingerprint


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a bundle, mapped.

    Attributes:
        content: its bytes.
        path: the file, for errors.
    """

    content: mmap.mmap
    path: str

    def unpack(self, segment: Segment) -> bytes:
        """A frame of a pack, decompressed: what is returned are the bytes that were verified."""
        frame = self.content[
            segment.offset : segment.offset + segment.size
        ]  # a copy: nobody else's
        return verify.unpack(frame, segment, self.path)


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """How a program was obtained.

    Attributes:
        program: its name.
        source: `loaded` (the bundle's executable), `compiled` (here, now), `cached` (compiled here at an
            earlier start) or `unused` (not wanted so far).
        seconds: that it took to get ready; 0 where unused.
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
    ) -> None:
        """Binds the programs to a device.

        Args:
            config: the program table.
            device: where they run.
            executables: None where the machine does not match: programs are compiled from portable.
            portable: StableHLO of the same programs.
            weights: tensors of the weights layer, by name.
        """
        self.table = {program.name: program for program in config.programs}
        self._config = config
        self._device = device
        self._executables = executables
        self._portable = portable
        self._weights = weights
        self._weights_on_device: dict[str, list[DeviceArray]] = {}
        self._ready: dict[str, Executable] = {}
        self._reports: dict[str, ProgramReport] = {}
        self._arguments: dict[str, tuple[Array, ...]] = {}
        self._results: dict[str, tuple[Array, ...]] = {}
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {name: threading.Lock() for name in self.table}

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
                executable, source = self._obtain(self.table[name])
                self._reports[name] = ProgramReport(name, source, time.perf_counter() - started)
                self._ready[name] = executable
            return self._ready[name]

    def _obtain(self, program: Program) -> tuple[Executable, str]:
        if self._executables is not None:
            serialized = self._executables.unpack(program.executable)
            return self._device.load(serialized, self._executables.path), "loaded"
        compiled: list[Executable] = []

        def compile_program() -> bytes:
            compiled.append(self._device.compile(self._portable.unpack(program.portable)))
            return compiled[0].serialize()

        digest, machine = program.portable.raw_digest, Fingerprint.current()
        serialized, now = compile_cache.compiled_here(digest, machine, compile_program)
        if not now:
            try:
                return self._device.load(serialized, self._portable.path), "cached"
            except RejectError:  # kept by another build of jaxlib, say: no fault of the bundle
                compile_cache.compiled_here(digest, machine, compile_program, again=True)
        return compiled[0], "compiled"

    def prepare(self, *names: str) -> None:
        """Begins to make programs ready, in this order, in a thread; errors show when they are wanted."""
        wanted = [name for name in names if name not in self._ready]
        if wanted:
            # No daemon: while the interpreter ends, those are torn out of XLA, which aborts the process.
            threading.Thread(target=self._prepare, args=(wanted,)).start()

    def _prepare(self, names: Sequence[str]) -> None:
        for name in names:
            if not threading.main_thread().is_alive():
                return  # the interpreter waits for this thread to end
            with contextlib.suppress(Exception):  # the caller who wants the program meets it again
                self[name]

    def weights(self, name: str | None) -> list[DeviceArray]:
        """The tensors of a weight set, on the device: the memory of the mapped file on a CPU."""
        if name is None:
            return []
        with self._lock:
            if name not in self._weights_on_device:
                self._weights_on_device[name] = [
                    self._device.put(self._weights[tensor])
                    for tensor in self._config.weight_sets[name]
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
            try:
                known[name] = tuple(map(Array.parse, texts))
            except ValueError as error:
                at = f"{self._config.bundle}: program table of {self._config.target}"
                raise RejectError(at, f"{name}: {error}") from error
        return known[name]

    def report(self) -> tuple[ProgramReport, ...]:
        """How each program was obtained, in the order of the table."""
        return tuple(
            self._reports.get(name) or ProgramReport(name, "unused", 0.0) for name in self.table
        )
