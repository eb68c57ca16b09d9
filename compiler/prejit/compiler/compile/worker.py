"""A worker process: compiles for one target what it is told on stdin.

    python -m prejit.compiler.worker CACHE PLATFORM

One JSON line asks, one JSON line answers; the end of stdin, for whatever reason, ends the worker:

    {"program": digest, "kernels": digest or null, "machine": fields of CompileFor}
    {"measure": {"weights": path, "programs": [...], "kernels": digest or null}}
    {"measure_forms": {"product": ..., "forms": {form: digest}, "kernels": digest}}
    {"result": ...} | {"error": {"code": ..., "message": ..., "hint": ...}} | {"exit": code or -signal}

Every program is compiled in a fork of its own. So a program that crashes XLA or runs out of memory takes
nothing else with it, memory is given back, and what is made does not depend on what was made before
(XLA numbers the modules of a process). The fork costs 10 ms; importing jaxlib is paid once.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import mmap
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard

from prejit.compiler.compile.compiling import Compile, compile_program, compress, with_kernels
from prejit.compiler.compile.jobs import Compiled
from prejit.compiler.compile.xla import CompileFor, import_compiler
from prejit.compiler.native.products import Product
from prejit.compiler.store.directory import DirectoryStore
from prejit.compiler.targets import cpu_count
from prejit.runtime.base.digests import digest_of
from prejit.runtime.device import kernels as native_kernels
from prejit.runtime.device.device import Device
from prejit.runtime.device.transfer import to_numpy
from prejit.runtime.errors import BuildError, PrejitError
from prejit.runtime.format.schema import Segment

_PASSES = 2
_PASS_SECONDS = 0.1
"""Of measuring one program."""
_FORM_PASSES = 4
_FORM_SECONDS = 0.04
"""Of measuring one form of a product."""
_SLOW_SECONDS = 1.0
"""A form that takes so long is run once."""
_COPIED_BYTES = 128 << 20
"""Least bytes of the matrices that one product is measured with; twice what the last caches hold, if more."""

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def serve(
    cache: DirectoryStore, compile_program: Compile, requests: BinaryIO, answers: BinaryIO
) -> None:
    """Answers requests until there are no more.

    Args:
        cache: where portable programs come from and executables go.
        compile_program: what compiles.
        requests: JSON lines, unbuffered.
        answers: JSON lines.
    """
    for line in iter(requests.readline, b""):
        parent = os.getpid()
        ours, its = socket.socketpair()
        process = os.fork()
        if process == 0:
            _die_with(parent)
            request = json.loads(line)
            if request.get("machine", {}).get("platform") == "cpu":
                cpu_count.install(its)
            _answer_and_exit(cache, compile_program, request, answers)
        its.close()
        with ours:
            code = _wait(process, requests, ours)
        if code is None:
            return
        if code != 0:
            _send(answers, {"exit": code})


def _die_with(parent: int) -> None:
    """Makes this process end when its parent does, even by SIGKILL: nobody would take its answer."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _answer_and_exit(
    cache: DirectoryStore, compile_program: Compile, request: dict[str, Any], answers: BinaryIO
) -> None:
    """The forked child. It never returns into the parent's code."""
    code = 1
    try:
        try:
            if "measure" in request:
                _send(answers, {"result": measure(cache, **request["measure"])})
            elif "measure_forms" in request:
                _send(answers, {"result": measure_forms(cache, **request["measure_forms"])})
            else:
                _send(answers, {"result": _compile(cache, compile_program, request)})
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


def _compile(
    cache: DirectoryStore, compile_program: Compile, request: dict[str, Any]
) -> dict[str, Any]:
    program, library = _read(cache, request["program"]), request["kernels"]
    if library is not None:
        program = with_kernels(program, _read(cache, library))
    told: dict[str, Any] = request["machine"]
    told = {name: tuple(v) if isinstance(v, list) else v for name, v in told.items()}
    machine = CompileFor(**told)
    start = time.perf_counter()
    output = compile_program(program, machine)
    seconds = time.perf_counter() - start
    frame = compress(output.serialized)
    segment = Segment(
        offset=0,
        size=len(frame),
        digest=cache.put_blob(frame),
        raw_size=len(output.serialized),
        raw_digest=digest_of(output.serialized),
    )
    compiled = Compiled(segment, output.cpu_features, output.memory, round(seconds * 1000))
    return compiled.to_plain()


def _read(cache: DirectoryStore, digest: str) -> bytes:
    content = cache.read_blob(digest)
    if content is None:
        raise BuildError(
            f"expected {digest} in the build cache, found none",
            hint="build again: it was damaged or deleted, and is made anew",
        )
    return content


def measure(
    cache: DirectoryStore, weights: str, programs: list[dict[str, Any]], kernels: str | None = None
) -> list[int]:
    """Microseconds of one run of each program, the least of several.

    Args:
        cache: holds the executables.
        weights: path of the packed weights.
        programs: for each its `executable` (a blob), its `weight_sets` and its `arguments`. It is run with
            each set in turn, as the layers of a model are, so that no set stays in a processor's cache alone.
        kernels: the library that they call; None: they call none.
    """
    from prejit.runtime.format.blobs import Layer
    from prejit.runtime.programs.weights import tensors

    if kernels is not None:
        native_kernels.register(native_kernels.load(_read(cache, kernels)))
    with open(weights, "rb") as file:
        layer = Layer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), weights)
    values = tensors(layer)
    device = Device("cpu")
    placed = {name: device.put(value) for name, value in values.items()}
    runs = [_runner(cache, device, placed, program) for program in programs]
    least = [math.inf] * len(programs)
    for _ in range(_PASSES):  # what disturbs the machine for a while does not disturb every pass
        for place, run in enumerate(runs):
            run()  # the first one builds what XLA makes lazily
            spent = 0.0
            while not spent or spent < _PASS_SECONDS:
                seconds = run()
                spent += seconds
                least[place] = min(least[place], seconds)
    sets = (len(program["weight_sets"]) for program in programs)
    return [max(1, round(best * 1e6 / count)) for best, count in zip(least, sets, strict=True)]


def measure_forms(
    cache: DirectoryStore, product: str, forms: dict[str, str], kernels: str
) -> dict[str, int]:
    """Nanoseconds of a product by each form, the least of many runs in turns.

    Args:
        cache: holds the executables.
        product: as `Product` prints itself.
        forms: the executable of each form, a blob.
        kernels: the library that they call.
    """
    from prejit.runtime.device.dtypes import dtype_of

    native_kernels.register(native_kernels.load(_read(cache, kernels)))
    found = Product.parse(product)
    device = Device("cpu")
    x = device.put(np.full((1, found.rows, found.inputs), 1e-3, np.float32))
    scale = [device.put(np.ones(found.outputs, np.float32))] if found.dtype == "int8" else []
    shape = (found.outputs, found.inputs)
    shape = shape[::-1] if found.in_out else shape
    ones = np.ones(shape, dtype_of(found.dtype))
    copied_bytes = max(_COPIED_BYTES, 2 * last_cache_bytes())
    copies = max(1, copied_bytes // found.matrix_bytes)
    matrices = itertools.cycle([device.put(ones.copy()) for _ in range(copies)])

    def runner(digest: str) -> Callable[[], float]:
        serialized = zstandard.ZstdDecompressor().decompress(_read(cache, digest))
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
            if least[form] > max(_FORM_SECONDS, 4 * fastest):
                continue  # who is this slow need not be asked again
            spent = 0.0
            while not spent or spent < _FORM_SECONDS:
                seconds = run()
                spent += seconds
                least[form] = min(least[form], seconds)
    return {form: max(1, round(seconds * 1e9)) for form, seconds in least.items()}


def last_cache_bytes(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the bytes of all last-level caches of the CPUs that this process may use; 0: unknown.

    Args:
        cpus: a directory as Linux has it (Documentation/ABI/testing/sysfs-devices-system-cpu).
    """
    sizes: dict[tuple[int, str], int] = {}
    for cpu in os.sched_getaffinity(0):
        for cache in cpus.glob(f"cpu{cpu}/cache/index*"):
            with suppress(OSError, ValueError, KeyError):
                level = int((cache / "level").read_text())
                shared = (cache / "shared_cpu_list").read_text().strip()
                size = (cache / "size").read_text().strip()
                sizes[level, shared] = int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]]
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


def _runner(
    cache: DirectoryStore,
    device: Device,
    weights: dict[str, Any],
    program: dict[str, Any],
) -> Callable[[], float]:
    """Runs a program with each of its weight sets and gives the seconds that it took."""
    from prejit.runtime.device.dtypes import dtype_of
    from prejit.runtime.format.checks.config import check_array

    serialized = zstandard.ZstdDecompressor().decompress(_read(cache, program["executable"]))
    loaded = device.load(serialized, program["executable"])
    arguments = [check_array(text, None, "argument") for text in program["arguments"]]
    # Ones: tokens that exist, and a sentence that is not empty.
    inputs = [np.ones(array.shape, dtype_of(array.dtype)) for array in arguments]
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


def _wait(process: int, requests: BinaryIO, from_child: socket.socket) -> int | None:
    """Answers the child's questions for its CPUs until it ends.

    Returns:
        Its exit code, or minus its signal; None if the requests ended, and with them the child.
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
                if ready.get(listener, 0) & select.POLLIN:
                    cpu_count.answer(listener)
                elif listener in ready:  # nobody is left who could ask
                    poll.unregister(listener)
    finally:
        for each in (descriptor, *listeners):
            os.close(each)
    if descriptor not in ready:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status) if descriptor in ready else None


def _send(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def main(compile_program: Compile = compile_program) -> None:
    """`python -m prejit.compiler.compile.worker CACHE PLATFORM`."""
    answers = open(os.dup(1), "wb")  # noqa: SIM115 (open until the process ends)
    os.dup2(2, 1)  # what XLA or a plugin prints must not come between the answers
    import_compiler(sys.argv[2])  # once for all forks
    requests = open(0, "rb", buffering=0)  # noqa: SIM115
    serve(DirectoryStore(Path(sys.argv[1])), compile_program, requests, answers)


if __name__ == "__main__":
    main()
