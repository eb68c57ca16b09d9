"""The fallback: compile portable programs on this machine, and keep the results for its next start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

from prejit.runtime.base.files import digest_of
from prejit.runtime.base.threads_and_forks import once
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.device import _jax_parts
from prejit.runtime.device.device import Device, Executable
from prejit.runtime.device.portable import bind_calls, custom_calls, version_of
from prejit.runtime.errors import BuildError, MismatchError
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import ProgramEntry
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
        try:
            executable = self._device.compile(portable, program.platforms or (), results)
        except BuildError as error:
            text = f"{self._path}: {program.name}: {error}"
            raise BuildError(text, hint=error.hint or self._of_later(portable)) from error
        self._check(program, executable, self._path)
        return executable

    def _of_later(self, portable: bytes) -> str | None:
        """Return the hint for a program that a later jax has lowered; None: it is of none."""
        versions = version_of(portable), _jax_parts.stablehlo_version()
        found, here = (tuple(map(int, each.split("."))) for each in versions)
        if found <= here:
            return None
        return (
            "a later jax than this one lowered it: install the one that `prejit inspect` shows, or build the "
            f"bundle for jaxlib {self._machine.jaxlib}"
        )

    def _key(self, program: ProgramEntry) -> compile_cache.PortableKey:
        # Its own digest does not cover the libraries that it calls.
        digest = program.portable.raw_digest
        if names := self._names(program):
            digest = digest_of(to_json({"program": digest, "calls": names}))
        return compile_cache.PortableKey(
            digest, program.platforms or (), self._device.platform, self._device.mesh
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
