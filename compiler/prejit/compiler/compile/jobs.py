"""Compiling many programs for many targets side by side, in worker processes.

The pool has a few threads; each has at most one worker process and talks with it alone. Programs may be
submitted while others are compiled. One that fails takes no other with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prejit.compiler.native.library import KernelLibrary
from prejit.compiler.store.key import Key
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.format.schema import Memory, Segment
from prejit.runtime.machine.targets import Target


@dataclass(frozen=True, slots=True)
class Source:
    """What an executable is compiled from.

    Attributes:
        program: digest of StableHLO, a blob in the cache.
        platforms: that it was lowered for.
        kernels: the library that it calls; None: it calls none.
    """

    program: str
    platforms: tuple[str, ...]
    kernels: KernelLibrary | None = None


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One program to compile for one target.

    Attributes:
        program: its name, unique in the build.
        toolchain: what compiles it, and for which target.
        source: what is compiled.
        key: what the result is stored under.
    """

    program: str
    toolchain: Toolchain
    source: Source
    key: Key

    @property
    def target(self) -> Target:
        """What it is compiled for."""
        return self.toolchain.target


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of a job.

    Attributes:
        executable: the zstd frame, a blob in the cache; its offset is 0.
        cpu_features: the extensions that the code really uses, in LLVM's names.
        memory: what the program needs while it runs.
        milliseconds: that the compiler took.
    """

    executable: Segment
    cpu_features: tuple[str, ...]
    memory: Memory
    milliseconds: int

    def to_plain(self) -> dict[str, Any]:
        """As JSON."""
        plain: dict[str, Any] = json.loads(to_json(self))
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Compiled:
        """The inverse of `to_plain`.

        Raises:
            RejectError: plain has other keys or types.
        """
        return from_json(cls, to_json(plain), "build cache")
