"""The job that a build submits to an executor, the key that decides its result, and results in the store.

`find_compiled` decides whether an earlier build's result is used again. `prejit plan` asks for the same keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from prejit.compiler.native.kernel_library import KernelLibrary
from prejit.compiler.progress import Progress
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.prejit_code import COMPILING, code_digest
from prejit.compiler.store.store_interface import Store
from prejit.compiler.targets.build_host import host_cpu, host_features
from prejit.compiler.targets.target_classes import Target
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.base.typed_json import from_plain
from prejit.runtime.format.bundle_schema import Memory, Segment
from prejit.runtime.machine.fingerprint import effective_environment

CANNOT_COMPILE = "XLA cannot compile this program"
"""Begins the error of a program that XLA refuses. Other errors are of its process, its time, or the disk."""


@dataclass(frozen=True, slots=True)
class Source:
    """The program that an executable is compiled from.

    Attributes:
        program: digest of its StableHLO, a blob of the store.
        platforms: platforms that it was lowered for, in order.
        kernels: library of kernels that it calls; None: it calls none.
        calls: handlers of the user's libraries that it calls: the name in the program, and XLA's name, which
            has the library's digest.
    """

    program: str
    platforms: tuple[str, ...]
    kernels: KernelLibrary | None = None
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One program to compile for one target."""

    program: str
    toolchain: Toolchain
    source: Source
    key: Key

    @property
    def target(self) -> Target:
        """The target that the program is compiled for."""
        return self.toolchain.target


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of a job.

    Attributes:
        executable: zstd frame of the executable, a blob of the store. Its offset is 0.
        cpu_features: CPU extensions that its instructions use, in LLVM's names.
        memory: memory that the program needs while it runs.
        milliseconds: time that the compiler took.
        cpu_milliseconds: CPU time that it took.
        peak_bytes: memory of the process that compiled it, at its peak.
    """

    executable: Segment
    cpu_features: tuple[str, ...]
    memory: Memory
    milliseconds: int
    cpu_milliseconds: int
    peak_bytes: int


_FLAGS_THAT_PRINT = ("--xla_dump", "--xla_backtrace", "--xla_vlog", "--xla_gpu_dump_autotune")
"""Prefixes of flags with which XLA writes files or logs beside the same executable."""


def executable_key(name: str, toolchain: Toolchain, source: Source) -> Key:
    """Return the key of compiling a program with a toolchain.

    The target's name is no ingredient: two targets for the same machine share their executables. Nor is jax
    where jaxlib alone compiles, which it does for CPUs: a worker imports nothing else.
    """
    target = toolchain.target
    # Ingredients of their own: the program's platforms, and the digest of the tuning file.
    untuned = replace(toolchain, tuned=None)
    machine = untuned.machine(()) | {"described": None, "platforms": None}
    if target.platform == "cpu":
        if not toolchain.is_exact:
            # The host's features get into the code; --xla_cpu_max_isa only removes some of them.
            machine |= {"cpu": host_cpu(), "cpu_features": host_features()}
        machine["cpus"] = toolchain.cpus
    ingredients = [
        ("stablehlo", source.program),
        ("platforms", " ".join(source.platforms)),
        *((("kernels", source.kernels.digest),) if source.kernels is not None else ()),
        *((f"library call {name}", target) for name, target in source.calls),
        ("our code", code_digest(*COMPILING)),
        *(each for each in toolchain.versions if each[0] != "jax" or target.platform != "cpu"),
        ("architecture", target.architecture),
        *((key, _text(value)) for key, value in machine.items() if value is not None),
        # Without the tuning: its content counts, and not its path.
        ("xla_flags", _deciding(untuned.xla_flags(os.environ))),
        ("environment", " ".join(effective_environment(target.platform, os.environ))),
    ]
    if toolchain.tuned is not None:
        ingredients.append(("tuning", toolchain.tuned.digest))
    return Key("compile", name, tuple(ingredients))


def _deciding(flags: str) -> str:
    """Return the flags of XLA that may decide an executable, by name. The order of equal names stays."""
    deciding = (flag for flag in flags.split() if not flag.startswith(_FLAGS_THAT_PRINT))
    return " ".join(sorted(deciding, key=lambda flag: flag.partition("=")[0]))


def _text(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def find_compiled(store: Store, key: Key) -> Compiled | None:
    """Return the undamaged result of a compile key; None: it has to be compiled."""
    return as_compiled(store.get(key, verify=True))


def as_compiled(stored: Mapping[str, Any] | None) -> Compiled | None:
    """Return a result of a store; None: there is none, or another version of prejit wrote other fields."""
    with suppress(ValueError):
        return None if stored is None else from_plain(Compiled, stored)
    return None


def compile_once(
    store: Store,
    job: CompileJob,
    compile_job: Callable[[CompileJob], Compiled | None],
    *,
    progress: Progress,
    give_up: Callable[[], bool],
) -> tuple[Compiled | None, bool]:
    """Return the result of a job, from the store or compiled now and put into the store.

    Builds that share a store compile a job once: the others wait for the one that compiles it.

    `compile_job` returns None if it was ended, and `give_up` ends the wait for another build.

    Returns:
        The result, or None where the job was ended; and whether it was compiled now.
    """
    label = f"waiting for another build, which compiles {job.program} for {job.target.name}"
    with ExitStack() as stack:
        with progress.phase(label):
            held = stack.enter_context(store.making(job.key, give_up=give_up))
        if not held:
            return None, False
        # Another build may have compiled it since it was submitted.
        if (stored := find_compiled(store, job.key)) is not None:
            return stored, False
        compiled = compile_job(job)
        if compiled is not None:
            store.put(job.key, asdict(compiled), blobs=[compiled.executable.digest])
        return compiled, True
