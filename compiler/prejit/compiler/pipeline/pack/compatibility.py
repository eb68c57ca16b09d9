"""The requirement of a target's executables, and how long jax promises to read portable programs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date, timedelta

from prejit.compiler.compile.compile_jobs import Compiled
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.native.kernel_library import KernelLibrary, needed_glibc
from prejit.compiler.pipeline.libraries import ReadLibrary, allowed_features
from prejit.compiler.targets.target_classes import CUDA
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.errors import BuildError
from prejit.runtime.machine.fingerprint import (
    Requirement,
    effective_environment,
    effective_xla_flags,
)


def requirement_of(
    manifest: Manifest,
    toolchain: Toolchain,
    programs: Mapping[str, Compiled],
    library: KernelLibrary | None,
    own: Sequence[ReadLibrary] = (),
) -> Requirement:
    """Return what a target's executables need, from what the compiler found in them.

    `library` has the kernels that they call, `own` are the libraries of the user that they call. These may
    use all extensions of the target.

    Raises:
        BuildError: a program needs more memory than a device of the target has.
        StoreError: XLA_FLAGS names a file that cannot be read.
    """
    target = toolchain.target
    accelerated = target.platform != "cpu"
    needs = {name: program.memory.need_bytes for name, program in programs.items()}
    if accelerated and target.memory_bytes is not None:
        too_large = [name for name, need in needs.items() if need > target.memory_bytes]
        if too_large:
            listed = "".join(
                f"\n  {name}: needs {needs[name] / 1e9:.2f} GB: {programs[name].memory.described()}"
                for name in too_large
            )
            raise BuildError(
                f"{manifest.where}: target {target.name}: a device has "
                f"{target.memory_bytes / 1e9:.2f} GB, and {len(too_large)} of {len(programs)} "
                f"programs need more{listed}",
                hint="make [generate] batch or context smaller, split the model over a [mesh], "
                "or build for a larger device",
            )
    features = set[str]().union(*(program.cpu_features for program in programs.values()))
    features |= set(library.cpu_features if library else ())
    features |= set(allowed_features(target) if own else ())
    needed = target.requirement(
        toolchain.jaxlib,
        plugin=toolchain.plugin,
        cuda=CUDA if target.platform == "cuda" else None,
        cpu_features=tuple(sorted(features)),
        device_memory_bytes=max(needs.values()) if accelerated else None,
        xla_flags=effective_xla_flags(toolchain.xla_flags(os.environ)),
        environment=effective_environment(target.platform, os.environ),
    )
    found = (None if library is None else library.glibc, *(each.glibc for each in own))
    return replace(needed, glibc=needed_glibc(*found))


_RELEASED = {
    # version of jax: its release (the dates of the files in its wheels)
    "0.10.2": date(2026, 6, 17),
    "0.11.0": date(2026, 7, 16),
    "0.11.1": date(2026, 8, 17),
    "0.11.2": date(2026, 9, 17),
    "0.12.0": date(2026, 10, 16),
    "0.12.0.1": date(2026, 10, 20),
}
_WINDOW = timedelta(days=180)


def readable_until(jax: str) -> str | None:
    """Return the last day that jax promises to read what it lowered, YYYY-MM-DD; None: not known.

    "Exported artifacts can be compiled and executed by a compiler and a jaxlib up to 6 months newer" (jax,
    docs/export/export.md, "Compatibility guarantees"). It counts from the release, not from the day of
    the build, so that equal builds give equal bytes.
    """
    released = _RELEASED.get(jax)
    return None if released is None else (released + _WINDOW).isoformat()
