"""The fallback: compile portable programs on this machine, and keep the results for its next start.

Also those for sizes that no bucket has, made from a program with symbolic sizes in the bundle.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import final

from prejit.runtime.base.files import digest_of
from prejit.runtime.base.threads_and_forks import once
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.device.device import Device, Executable
from prejit.runtime.device.portable import bind_calls, custom_calls, specialize
from prejit.runtime.errors import BuildError, FallbackWarning, MismatchError
from prejit.runtime.fallback_reporting import count_axis
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import ProgramEntry, Segment
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.programs import compile_cache

CheckSignature = Callable[[ProgramEntry, Executable, str], None]
"""Compares an executable with the program table. It takes the program, the executable and the file."""


@final
class LocalCompiler:
    """Compiles the portable programs of a bundle for a device, or reads what an earlier start compiled."""

    def __init__(
        self,
        device: Device,
        path: str,
        portable_of: Callable[[ProgramEntry], bytes],
        calls: Mapping[str, str],
        no_calls: str,
        check: CheckSignature,
    ) -> None:
        """Keep what every compilation needs.

        Args:
            device: what to compile for.
            path: the file of the portable programs, for errors.
            portable_of: returns the StableHLO of a program.
            calls: for each name by which programs call a handler of the user, that by which XLA knows it.
            no_calls: why this process has none of these handlers; empty: it has all of them.
            check: called with every executable before it is returned.
        """
        self._device = device
        self._path = path
        self._portable_of = portable_of
        self._calls, self._no_calls = calls, no_calls
        self._check = check

    def obtain(self, program: ProgramEntry, results: tuple[Array, ...]) -> tuple[Executable, str]:
        """Return the executable of a program and whether it was `compiled` now or `kept`.

        Raises:
            RejectError: the portable program is damaged.
            BuildError: XLA fails to compile it, or it calls a library that this machine cannot load.
        """
        self._check_calls(program)
        if self._device.in_cluster:
            # The processes of a cluster compile together, because XLA shares its autotuning among them. A
            # process with the cache's lock would wait for those that wait for the lock.
            return self._compile(program, results), "compiled"
        compiled: list[Executable] = []

        def compile_program() -> bytes:
            compiled.append(self._compile(program, results))
            return compiled[0].serialize()

        refused = None
        while True:
            serialized, now = compile_cache.compiled_here(
                self._key(program), self._machine, compile_program, refused=refused
            )
            if now:
                return compiled[0], "compiled"
            try:
                executable = self._device.load(serialized, self._path, results)
            except MismatchError:  # kept by another build of jaxlib, for example
                refused = serialized
                continue
            self._check(program, executable, self._path)
            return executable, "kept"

    def is_kept(self, program: ProgramEntry) -> bool:
        """Return whether an earlier start compiled a program and kept it."""
        return compile_cache.is_kept(self._key(program), self._machine)

    def _compile(self, program: ProgramEntry, results: tuple[Array, ...]) -> Executable:
        portable = bind_calls(self._portable_of(program), self._names(program))
        executable = self._device.compile(portable, program.platforms or (), results)
        self._check(program, executable, self._path)
        return executable

    def _key(self, program: ProgramEntry) -> compile_cache.PortableKey:
        # Its own digest does not cover the libraries that it calls.
        digest = program.portable.raw_digest
        if names := self._names(program):
            digest = digest_of(to_json({"program": digest, "calls": names}))
        return compile_cache.PortableKey(
            digest,
            program.platforms or (),
            self._device.platform,
            self._device.mesh,
        )

    def _names(self, program: ProgramEntry) -> dict[str, str]:
        """Return the names by which XLA knows the handlers of the user that a program calls."""
        return {name: self._calls[name] for name in program.calls or () if name in self._calls}

    def _check_calls(self, program: ProgramEntry) -> None:
        """Check that this process has the handlers of the user that a program calls on this platform."""
        if program.calls is None or not (missing := {*program.calls} - self._calls.keys()):
            return
        platform = self._device.platform  # another than the target's may need no handlers
        called = custom_calls(self._portable_of(program), program.platforms or (), platform)
        if names := sorted(missing & called):
            raise BuildError(
                f"{self._path}: {program.name}: it calls {', '.join(names)} of a library of yours, which "
                f"cannot be used on this machine: {self._no_calls}",
                hint="add a [[target]] for this machine and a [[library]] built for it, and build again; or "
                "give the function a form without the library, with jax.lax.platform_dependent",
            )

    @once
    def _machine(self) -> Fingerprint:
        return Fingerprint.current()


SIZE_AXIS = "bucket"
"""The name in `fallback_counts` of a program that is compiled because no bucket has its sizes."""


def specialized(
    program: ProgramEntry,
    symbolic: bytes,
    sizes: Mapping[str, int],
    weights: Sequence[Array],
    takes: Sequence[Array],
    gives: Sequence[Array],
    platform: str,
) -> tuple[ProgramEntry, bytes]:
    """Return the row of the program table and the StableHLO of a program for the sizes of a call.

    `symbolic` is StableHLO of the same program for any size; `takes` are the arguments without the weights.

    Raises:
        BuildError: the program does not work for these sizes.
    """
    arguments = [replace(array, shape=_resized(array, sizes)) for array in takes]
    shapes = [array.shape for array in (*weights, *arguments)]
    portable, found = specialize(symbolic, program.platforms or (), platform, shapes)
    results = [replace(array, shape=shape) for array, shape in zip(gives, found, strict=True)]
    bucket = {**program.bucket, **sizes}
    section, _, rest = program.name.partition("/")
    old = "-".join(f"{name}{size}" for name, size in program.bucket.items())
    new = "-".join(f"{name}{size}" for name, size in bucket.items())
    entry = replace(
        program,
        name=f"{section}/{new}{rest.removeprefix(old)}",
        bucket=bucket,
        arguments=tuple(map(str, arguments)),
        results=tuple(map(str, results)),
        portable=Segment(0, 0, "", len(portable), digest_of(portable)),
        platforms=(platform,),
    )
    return entry, portable


def count_open_size(bundle: str, name: str) -> None:
    """Warn that a program is compiled here because no bucket has its sizes, and count it."""
    count_axis(SIZE_AXIS)
    warnings.warn(
        f"{bundle}: no bucket has the sizes of {name}, so it is compiled here, once; add them to the "
        "manifest's buckets to compile it ahead of time",
        FallbackWarning,
        stacklevel=_callers_level(),
    )


def _callers_level() -> int:
    """Return the stack level, as the function that calls this one sees it, of the code that called prejit."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("prejit."):
        level, frame = level + 1, frame.f_back
    return level


def _resized(array: Array, sizes: Mapping[str, int]) -> tuple[int, ...]:
    if not array.variables:
        return array.shape
    return tuple(
        sizes.get(name, extent) for name, extent in zip(array.variables, array.shape, strict=True)
    )
