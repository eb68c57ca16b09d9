"""Measure programs on this machine, in a worker process.

Each program runs many times and its least time counts: whatever disturbs the machine makes a run slower.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from prejit.compiler.base.stored_dtypes import STORED_DTYPES
from prejit.compiler.native.products import Product
from prejit.compiler.store.store_interface import Store
from prejit.runtime.device import kernels as native_kernels
from prejit.runtime.device.device import Device
from prejit.runtime.device.transfer import to_numpy
from prejit.runtime.errors import BuildError

_PASSES = 2
"""Number of times that each program is measured in turn."""
_PASS_SECONDS = 0.1
"""Duration of measuring one program in one pass; one run may take longer."""
_FORM_PASSES = 4
"""Number of times that each form of a product is measured in turn."""
_FORM_SECONDS = 0.04
"""Duration of measuring one form in one pass; one run may take longer."""
_SLOW_SECONDS = 1.0
"""A form that takes at least this long runs once before the passes, not three times."""
_COPIED_BYTES = 128 << 20
"""Minimum bytes of all copies of a product's matrix; more where twice the last-level caches is more."""


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
        programs: for each its `executable` (a blob), its `weight_sets` and its `arguments`. A program runs
            with each set in turn, like the layers of a model, so that no set stays in a processor's cache.
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
    for _ in range(_PASSES):  # a disturbance rarely lasts for all passes
        for place, run in enumerate(runs):
            run()  # the first run also builds what XLA makes lazily
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
