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

A program is measured many times and its least time counts: whatever disturbs the machine makes a run slower.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import math
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard

from prejit.compiler.base.process_errors import plain_error
from prejit.compiler.base.stored_dtypes import STORED_DTYPES
from prejit.compiler.compile.compile_jobs import Compiled
from prejit.compiler.compile.worker.worker_compile import (
    Compile,
    compile_program,
    compress,
    with_kernels,
    with_libraries,
)
from prejit.compiler.compile.worker.xla import CompiledProgram, CompileFor, import_compiler
from prejit.compiler.native.products import Product
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.store.store_interface import Store
from prejit.compiler.targets import cpu_count
from prejit.runtime.base.child_process import end_with_parent, take_stdout, write_answer
from prejit.runtime.base.files import digest_of
from prejit.runtime.device import kernels as native_kernels
from prejit.runtime.device.device import Device
from prejit.runtime.device.transfer import to_numpy
from prejit.runtime.errors import BuildError, PrejitError
from prejit.runtime.format.bundle_schema import Segment

_PASSES = 5
"""Number of times that each program is measured in turn."""
_PASS_SECONDS = 0.03
"""Duration of measuring one program in one pass; one run may take longer."""
_FORM_PASSES = 4
"""Number of times that each form of a product is measured in turn."""
_FORM_SECONDS = 0.04
"""Duration of measuring one form in one pass; one run may take longer."""
_SLOW_SECONDS = 1.0
"""A form that takes at least this long runs once before the passes, not three times."""
_COPIED_BYTES = 128 << 20
"""Minimum bytes of all copies of a product's matrix; more where twice the last-level caches is more."""


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


def require_blob(store: Store, digest: str) -> bytes:
    """Return the content of a blob.

    Raises:
        BuildError: the store has none, or it was damaged.
    """
    content = store.read_blob(digest)
    if content is None:
        raise BuildError(
            f"expected {digest} in the build cache, found none",
            hint="build again: the file was damaged or deleted, and is made anew",
        )
    return content


def measure(
    store: Store, weights: str, programs: list[dict[str, Any]], kernels: str | None = None
) -> list[int]:
    """Return the least microseconds of one run of each program.

    Args:
        store: holds the executables.
        weights: path of the packed weights.
        programs: for each its `executable` (a blob), its `weight_sets`, its `arguments` and the `lengths` of
            sentences. A program runs with each set in turn, like the layers of a model, so that no set stays
            in a processor's cache.
        kernels: digest of the library that they call; None: they call none.
    """
    from prejit.runtime.format.blobs import Layer
    from prejit.runtime.programs.mapped_weights import open_weights

    if kernels is not None:
        native_kernels.register(native_kernels.load(require_blob(store, kernels)))
    with open(weights, "rb") as file:
        layer = Layer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), weights)
    values = open_weights(layer).values
    device = Device("cpu")
    placed = {name: device.put(value) for name, value in values.items()}
    runs = [_runner(store, device, placed, program) for program in programs]
    least = [math.inf] * len(programs)
    for run in runs:
        run()  # the first run also builds what XLA makes lazily
    for _ in range(_PASSES):  # a disturbance rarely lasts for all passes
        for place, run in enumerate(runs):
            least[place] = min(least[place], _least_of(run, _PASS_SECONDS))
    sets = (len(program["weight_sets"]) for program in programs)
    return [max(1, round(best * 1e6 / count)) for best, count in zip(least, sets, strict=True)]


def measure_forms(
    store: Store, product: str, forms: dict[str, str], kernels: str
) -> dict[str, int]:
    """Return the least nanoseconds of a product by each form. The forms run in turns."""
    from prejit.runtime.device.transfer import aligned_zeros, dtype_of

    native_kernels.register(native_kernels.load(require_blob(store, kernels)))
    found = Product.parse(product)
    device = Device("cpu")
    x = device.put(np.full((1, found.rows, found.inputs), 1e-3, np.float32))
    has_scales = STORED_DTYPES[found.dtype].has_scales
    scale = [device.put(np.ones(found.outputs, np.float32))] if has_scales else []
    shape = (found.outputs, found.inputs)
    shape = shape[::-1] if found.in_out else shape
    copied_bytes = max(_COPIED_BYTES, 2 * _last_cache_bytes())
    copies = max(1, copied_bytes // found.matrix_bytes)
    values = [aligned_zeros(shape, dtype_of(found.dtype)) for _ in range(copies)]  # put copies none
    for each in values:
        each.fill(1)
    matrices = itertools.cycle([device.put(each) for each in values])

    def runner(digest: str) -> Callable[[], float]:
        serialized = zstandard.ZstdDecompressor().decompress(require_blob(store, digest))
        loaded = device.load(serialized, digest)

        def run() -> float:
            started = time.perf_counter()
            results = loaded.run([x, next(matrices), *scale])
            to_numpy(results[0])
            return time.perf_counter() - started

        return run

    runs = {form: runner(digest) for form, digest in forms.items()}
    # The first run builds what XLA makes lazily, and any may be disturbed.
    least = {form: run() for form, run in runs.items()}
    for form, run in runs.items():
        if least[form] < _SLOW_SECONDS:
            least[form] = min(least[form], run(), run())
    for _ in range(_FORM_PASSES):
        fastest = min(least.values())
        for form, run in runs.items():
            if least[form] <= max(_FORM_SECONDS, 4 * fastest):  # others cannot become the fastest
                least[form] = min(least[form], _least_of(run, _FORM_SECONDS))
    return {form: max(1, round(seconds * 1e9)) for form, seconds in least.items()}


def _least_of(run: Callable[[], float], seconds: float) -> float:
    """Return the least time of as many runs as so many seconds allow, one at least.

    What a run does outside of its time counts too: it is most of the work beside a program of microseconds.
    """
    until = time.perf_counter() + seconds
    least = run()
    while time.perf_counter() < until:
        least = min(least, run())
    return least


def _last_cache_bytes() -> int:
    """Return the bytes of all last-level caches of the CPUs that this process may use; 0: unknown.

    Linux lists them (Documentation/ABI/testing/sysfs-devices-system-cpu).
    """
    cpus = Path("/sys/devices/system/cpu")
    sizes: dict[tuple[int, str], int] = {}
    for cpu in os.sched_getaffinity(0):
        for index in cpus.glob(f"cpu{cpu}/cache/index*"):
            with suppress(OSError, ValueError, KeyError):
                level = int((index / "level").read_text())
                shared = (index / "shared_cpu_list").read_text().strip()
                size = (index / "size").read_text().strip()
                sizes[level, shared] = int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]]
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


def _runner(
    store: Store, device: Device, weights: dict[str, Any], program: dict[str, Any]
) -> Callable[[], float]:
    """Return a function that runs a program with each of its weight sets and returns the seconds it took."""
    from prejit.runtime.device.transfer import dtype_of
    from prejit.runtime.format.checks.program_table import check_array

    serialized = zstandard.ZstdDecompressor().decompress(require_blob(store, program["executable"]))
    loaded = device.load(serialized, program["executable"])
    arguments = [check_array(text, None, "argument") for text in program["arguments"]]
    # Ones are tokens that exist.
    inputs = [
        np.array(program["lengths"], dtype_of(array.dtype))
        if array.path == ("length",)
        else np.ones(array.shape, dtype_of(array.dtype))
        for array in arguments
    ]
    sets = [[weights[name] for name in names] for names in program["weight_sets"]]

    def run() -> float:
        given = [device.put(value) for value in inputs]
        started = time.perf_counter()
        for members in sets:
            results = loaded.run([*members, *given])
            if arguments[-1].donated:
                given = [*given[:-1], results[0]]
        to_numpy(results[0])
        return time.perf_counter() - started

    return run
