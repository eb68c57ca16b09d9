"""A worker process: compiles programs with one jax for one platform, and measures them.

    python -m prejit.compiler.compile.worker STORE PLATFORM

Each line of stdin is a request, each line of stdout its answer, both JSON. The end of stdin ends the worker:

    {"flags": XLA_FLAGS, "program": digest, "kernels": digest or null, "calls": {name: name for XLA},
     "machine": fields of CompileFor, "cpus": number of CPUs that XLA sees, or null}
    {"flags": XLA_FLAGS, "measure": {"weights": path, "programs": [...], "kernels": digest or null}}
    {"flags": XLA_FLAGS, "measure_forms": {"product": ..., "forms": {form: digest}, "kernels": digest}}
    {"result": ...} | {"error": {"code": ..., "message": ..., "hint": ...}} | {"exit": code or -signal}

Each request runs in a fork of its own. A program that crashes XLA or runs out of memory ends its fork alone,
memory is given back, and an executable does not depend on those compiled before it (XLA numbers the modules
of a process). A fork costs 10 ms; jaxlib is imported once, before the forks. It reads XLA_FLAGS when it is
first used, which is in the fork: so one process serves targets with different flags.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from prejit.compiler.base.process_errors import plain_error
from prejit.compiler.compile.compile_jobs import Compiled
from prejit.compiler.compile.worker.worker_compile import (
    Compile,
    compile_program,
    compress,
    with_kernels,
    with_libraries,
)
from prejit.compiler.compile.worker.worker_timing import measure, measure_forms, require_blob
from prejit.compiler.compile.worker.xla import CompiledProgram, CompileFor, import_compiler
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.targets import cpu_count
from prejit.runtime.base.child_process import end_with_parent, take_stdout, write_answer
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import PrejitError
from prejit.runtime.format.bundle_schema import Segment


def serve(
    store: DirectoryStore, compile_program: Compile, requests: BinaryIO, answers: BinaryIO
) -> None:
    """Answer requests until there are no more."""
    for line in iter(requests.readline, b""):
        parent = os.getpid()
        ours, its = socket.socketpair()
        process = os.fork()
        request = json.loads(line)
        if process == 0:
            _die_with(parent)
            _answer_and_exit(store, compile_program, request, answers, its)
        its.close()
        with ours:
            code = _wait(process, requests, ours, request.get("cpus"))
        if code is None:
            return
        if code != 0:
            write_answer(answers, {"exit": code})


def _die_with(parent: int) -> None:
    """End this process when its parent ends, even by SIGKILL: nobody would read its answer."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _answer_and_exit(
    store: DirectoryStore,
    compile_program: Compile,
    request: dict[str, Any],
    answers: BinaryIO,
    to_parent: socket.socket,
) -> None:
    """Answer a request in the forked child. Never return into the parent's code."""
    code = 1
    try:
        try:
            os.environ["XLA_FLAGS"] = request["flags"]
            if "measure" in request:
                write_answer(answers, {"result": measure(store, **request["measure"])})
            elif "measure_forms" in request:
                write_answer(answers, {"result": measure_forms(store, **request["measure_forms"])})
            else:
                if request["cpus"] is not None:
                    cpu_count.show(request["cpus"], to_parent)
                write_answer(answers, {"result": _compile(store, compile_program, request)})
        except PrejitError as error:
            write_answer(answers, {"error": plain_error(error)})
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _compile(
    store: DirectoryStore, compile_program: Compile, request: dict[str, Any]
) -> dict[str, Any]:
    program, library = require_blob(store, request["program"]), request["kernels"]
    if library is not None:
        program = with_kernels(program, require_blob(store, library))
    program = with_libraries(program, request["calls"])
    fields: dict[str, Any] = request["machine"]
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    machine = CompileFor(**fields)
    start, before = time.perf_counter(), time.process_time()
    output = _in_a_new_thread(compile_program, program, machine)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - before
    frame = compress(output.serialized)
    segment = Segment(
        offset=0,
        size=len(frame),
        digest=store.put_blob(frame),
        raw_size=len(output.serialized),
        raw_digest=digest_of(output.serialized),
    )
    compiled = Compiled(
        segment,
        output.cpu_features,
        output.memory,
        round(seconds * 1000),
        round(cpu_seconds * 1000),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    return asdict(compiled)


def _in_a_new_thread(
    compile_program: Compile, program: bytes, machine: CompileFor
) -> CompiledProgram:
    """Compile in a thread that has done nothing before, so that equal programs become equal executables.

    The order of some kernels' arguments follows a hash table, whose seed (Abseil's `NextSeed`) in jaxlib 0.12
    is the address of a variable of the thread. A new thread has memory of its own, in which this variable
    is always in the same place, if glibc gives the thread no pieces that others had (`Toolchain.environment`
    turns its caches off). In the first thread of a process the place depends on all that came before, even
    on the length of the program's path. Of jaxlib 0.10 the order varies all the same.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(compile_program, program, machine).result()


def _wait(
    process: int, requests: BinaryIO, from_child: socket.socket, cpus: int | None
) -> int | None:
    """Wait for the child to end, and meanwhile answer its system calls for its CPUs (cpu_count.py).

    Returns:
        Its exit code, or minus its signal; None: the requests ended, and with them the child.
    """
    descriptor, listeners = os.pidfd_open(process), list[int]()
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(requests, 0)  # 0: nothing but its end
        poll.register(from_child, select.POLLIN)
        while not (ready := dict(poll.poll())).keys() & {descriptor, requests.fileno()}:
            if from_child.fileno() in ready:
                poll.unregister(from_child)
                _, listeners, _, _ = socket.recv_fds(from_child, 1, 1)
                for listener in listeners:
                    poll.register(listener, select.POLLIN)
            for listener in listeners:
                if ready.get(listener, 0) & select.POLLIN and cpus is not None:
                    cpu_count.answer(listener, cpus)
                elif listener in ready:  # its process has ended
                    poll.unregister(listener)
    finally:
        for each in (descriptor, *listeners):
            os.close(each)
    if descriptor not in ready:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status) if descriptor in ready else None


def main(compile_program: Compile = compile_program) -> None:
    """Run `python -m prejit.compiler.compile.worker STORE PLATFORM`."""
    answers = take_stdout()  # what XLA or a plugin prints must not mix with the answers
    faulthandler.enable(all_threads=False)  # XLA that crashes shows where: the error quotes it
    import_compiler(sys.argv[2])  # once for all forks
    requests = open(0, "rb", buffering=0)  # noqa: SIM115
    serve(DirectoryStore(Path(sys.argv[1])), compile_program, requests, answers)
