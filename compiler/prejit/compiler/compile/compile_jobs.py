"""The job that a build submits to an executor, and its result. Both are frozen values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prejit.compiler.native.kernel_library import KernelLibrary
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.targets.target_classes import Target
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.format.bundle_schema import Memory, Segment

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

    def to_plain(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return dict[str, Any](json.loads(to_json(self)))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Compiled:
        """Return a result from its JSON: the inverse of `to_plain`."""
        return from_json(cls, to_json(plain), "build cache")
