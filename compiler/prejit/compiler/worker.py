"""A worker process: compiles for one target what it is told on stdin.

    python -m prejit.compiler.worker CACHE PLATFORM

One JSON line asks, one JSON line answers; the end of stdin, for whatever reason, ends the worker:

    {"portable": digest, "machine": fields of CompileFor, "key": ...}
    {"result": ...} | {"error": {"code": ..., "message": ..., "hint": ...}} | {"exit": code or -signal}

Every program is compiled in a fork of its own. So a program that crashes XLA or runs out of memory takes
nothing else with it, memory is given back, and what is made does not depend on what was made before
(XLA numbers the modules of a process). The fork costs 10 ms; importing jaxlib is paid once.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from prejit.compiler.cache import Cache
from prejit.compiler.cache_key import Key
from prejit.compiler.compilation import Compiled
from prejit.compiler.disassembly import narrowed, used_features
from prejit.runtime import bundle, executable
from prejit.runtime.bundle import Memory
from prejit.runtime.errors import BuildError, PrejitError
from prejit.runtime.executable import CompileFor

ZSTD_LEVEL = 9
"""Of a GPT-2 program of 776 kB, which compiles in 1.3 s: level 3 makes 91 kB in 2 ms, 9 makes 80 kB in
13 ms, 15 the same in 37 ms, 19 makes 71 kB in 256 ms. All decompress in 0.4 ms."""

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a compiler gave.

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
    program = executable.compile_portable(portable, machine)
    if machine.platform != "cpu":
        return Output(program.serialized, (), program.memory)
    features = used_features(program.serialized)
    return Output(narrowed(program.serialized, features), features, program.memory)


def serve(cache: Cache, compile_program: Compile, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers requests until there are no more.

    Args:
        cache: where portable programs come from and executables go.
        compile_program: what compiles.
        requests: JSON lines, unbuffered.
        answers: JSON lines.
    """
    for line in iter(requests.readline, b""):
        parent = os.getpid()
        process = os.fork()
        if process == 0:
            _die_with(parent)
            _answer_and_exit(cache, compile_program, json.loads(line), answers)
        code = _wait(process, requests)
        if code is None:
            return
        if code != 0:
            _send(answers, {"exit": code})


def compress(content: bytes) -> bytes:
    """One zstd frame with its content's size and checksum; the same bytes for the same content."""
    compressor = zstandard.ZstdCompressor(
        level=ZSTD_LEVEL, write_checksum=True, write_content_size=True, threads=0
    )
    return compressor.compress(content)


def _die_with(parent: int) -> None:
    """Makes this process end when its parent does, even by SIGKILL: nobody would take its answer."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _answer_and_exit(
    cache: Cache, compile_program: Compile, request: dict[str, Any], answers: BinaryIO
) -> None:
    """The forked child. It never returns into the parent's code."""
    code = 1
    try:
        try:
            result = _compile(cache, compile_program, request)
            _send(answers, {"result": result})
        except PrejitError as error:
            told = {"code": error.code, "message": str(error), "hint": error.hint}
            _send(answers, {"error": told})
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _compile(cache: Cache, compile_program: Compile, request: dict[str, Any]) -> dict[str, Any]:
    portable = cache.read_blob(request["portable"])
    if portable is None:
        raise BuildError(
            f"expected the portable program {request['portable']} in the build cache, found none",
            hint="build again: it was damaged or deleted, and is made anew",
        )
    told: dict[str, Any] = request["machine"]
    told = {name: tuple(v) if isinstance(v, list) else v for name, v in told.items()}
    machine = CompileFor(**told)
    start = time.perf_counter()
    output = compile_program(portable, machine)
    seconds = time.perf_counter() - start
    frame = compress(output.serialized)
    segment = bundle.Segment(
        offset=0,
        size=len(frame),
        digest=cache.put_blob(frame),
        raw_size=len(output.serialized),
        raw_digest=bundle.digest_of(output.serialized),
    )
    compiled = Compiled(segment, output.cpu_features, output.memory, round(seconds * 1000))
    result = compiled.to_plain()
    key = request["key"]
    pairs = tuple((name, value) for name, value in key["ingredients"])
    # Stored here and not by the parent, which may be gone by now.
    cache.store(Key(key["kind"], key["name"], pairs), result, blobs=[segment.digest])
    return result


def _wait(process: int, requests: BinaryIO) -> int | None:
    """The child's exit code, or minus its signal; None if the requests ended, and with them the child."""
    descriptor = os.pidfd_open(process)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(requests, 0)  # 0: nothing but its end
        ready = {ready for ready, _ in poll.poll()}
    finally:
        os.close(descriptor)
    if descriptor not in ready:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status) if descriptor in ready else None


def _send(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def main(compile_program: Compile = compile_program) -> None:
    """`python -m prejit.compiler.worker CACHE PLATFORM`."""
    answers = open(os.dup(1), "wb")  # noqa: SIM115 (open until the process ends)
    os.dup2(2, 1)  # what XLA or a plugin prints must not come between the answers
    executable.import_compiler(sys.argv[2])  # once for all forks
    requests = open(0, "rb", buffering=0)  # noqa: SIM115
    serve(Cache(Path(sys.argv[1])), compile_program, requests, answers)


if __name__ == "__main__":
    main()
