"""Compile one program in a worker: StableHLO in, the compressed frame of an executable out.

The digest of this module and of what it imports is in the key of every executable (keys.py). So what decides
an executable belongs here, and what only starts, feeds or watches a compiler does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import zstandard

from prejit.compiler.compile.disassembly import in_order, narrowed, used_features
from prejit.compiler.compile.xla import CompileFor, compile_portable, stand_in_for_kernels
from prejit.compiler.native.calls import with_library
from prejit.runtime.base.digests import digest_of
from prejit.runtime.format.schema import Memory

ZSTD_LEVEL = 9
"""Of a GPT-2 program of 776 kB, which compiles in 1.3 s: level 3 makes 91 kB in 2 ms, 9 makes 80 kB in
13 ms, 15 the same in 37 ms, 19 makes 71 kB in 256 ms. All decompress in 0.4 ms."""


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a compiler.

    Attributes:
        serialized: the executable.
        cpu_features: the extensions that its code really uses, in LLVM's names; none where it is not a CPU's.
        memory: what it needs while it runs.
    """

    serialized: bytes
    cpu_features: tuple[str, ...]
    memory: Memory


Compile = Callable[[bytes, CompileFor], Output]
"""`compile_program`, or a stand-in for it."""


def compile_program(portable: bytes, machine: CompileFor) -> Output:
    """Compiles a portable program; code of a CPU is read again for what it really uses.

    Raises:
        BuildError: XLA does not compile it.
    """
    program = compile_portable(portable, machine)
    if machine.platform != "cpu":
        return Output(program.serialized, (), program.memory)
    features = used_features(program.serialized)
    serialized = in_order(narrowed(program.serialized, features))
    return Output(serialized, features, program.memory)


def with_kernels(program: bytes, library: bytes) -> bytes:
    """A program from lowering, its calls bound to a library of kernels, ready to compile in this process.

    XLA gets to know their names alone: this machine may lack their instructions, or their glibc.
    """
    stand_in_for_kernels(library)
    return with_library(program, digest_of(library))


def compress(content: bytes) -> bytes:
    """One zstd frame with its content's size and checksum; the same bytes for the same content."""
    compressor = zstandard.ZstdCompressor(
        level=ZSTD_LEVEL, write_checksum=True, write_content_size=True, threads=0
    )
    return compressor.compress(content)
