"""Compile one program in a worker: StableHLO in, the compressed frame of an executable out.

The digest of this module and of all that it imports is in the key of every executable
(compile_jobs.py). Code that decides an executable belongs here; code that starts, feeds or watches a
compiler does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import zstandard

from prejit.compiler.compile.recorded_lowering import RecordedLowering
from prejit.compiler.compile.worker.disassembly import narrowed, used_features
from prejit.compiler.compile.worker.lean_executable import with_kept_hlo
from prejit.compiler.compile.worker.xla import (
    CompiledProgram,
    CompileFor,
    compile_portable,
    register_stand_ins,
)
from prejit.compiler.native.products import with_library
from prejit.runtime.base.files import digest_of
from prejit.runtime.device import kernels
from prejit.runtime.device.portable import bind_calls
from prejit.runtime.format.names import kernel_target

ZSTD_LEVEL = 9
"""Compression level of executables. A GPT-2 program of 776 kB, which compiles in 1.3 s, shrinks to 91 kB
in 2 ms at level 3, to 80 kB in 13 ms at 9 and in 37 ms at 15, and to 71 kB in 256 ms at 19."""


Compile = Callable[[bytes, CompileFor], CompiledProgram]
"""The type of `compile_program`, which tests replace."""


def compile_program(portable: bytes, machine: CompileFor) -> CompiledProgram:
    """Compile a portable program. A CPU executable records the extensions that its instructions use."""
    program = compile_portable(portable, machine)
    if machine.platform != "cpu":
        return program
    features = used_features(program.serialized)
    serialized = narrowed(program.serialized, features)
    if not RecordedLowering.is_in(portable):  # jax's own functions may show the HLO of those
        serialized = with_kept_hlo(serialized)
    return CompiledProgram(serialized, program.memory, features)


def with_kernels(program: bytes, library: bytes) -> bytes:
    """Return a lowered program whose calls are bound to a library of kernels, ready to compile here.

    XLA learns the names of the kernels alone: this machine may lack their instructions or their glibc.
    """
    digest = digest_of(library)
    register_stand_ins(kernel_target(name, digest) for name in kernels.kernels_of(library))
    return with_library(program, digest)


def with_libraries(program: bytes, calls: Mapping[str, str]) -> bytes:
    """Return a lowered program whose calls are bound to libraries of the user, ready to compile here.

    XLA learns the names of the handlers alone: no code of the libraries runs in a build.
    """
    register_stand_ins(calls.values())
    return bind_calls(program, calls)


def compress(content: bytes) -> bytes:
    """Return one zstd frame with size and checksum of its content: the same bytes for the same content."""
    compressor = zstandard.ZstdCompressor(
        level=ZSTD_LEVEL, write_checksum=True, write_content_size=True, threads=0
    )
    return compressor.compress(content)
