"""Measuring in a worker process: what a target's own jaxlib and kernels do on this machine.

The forms of a product (products.py) are compiled as programs are, then run in turns in one process, when
nothing else is compiled. The matrices go round, so that each comes from memory, as in a model, and not from a
processor's cache. How encoders are measured is in costs.py.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from prejit.compiler.compile.executor import collect
from prejit.compiler.compile.jobs import Compiled, CompileJob, Source
from prejit.compiler.compile.keys import compile_key
from prejit.compiler.compile.pool import WorkerPool
from prejit.compiler.compile.worker_process import JOB_SECONDS, WorkerProcess
from prejit.compiler.native.form_table import FormTable, Measured, conditions_of
from prejit.compiler.native.library import KernelLibrary
from prejit.compiler.native.products import KERNEL, Product
from prejit.compiler.progress import Progress
from prejit.compiler.store.interface import Store
from prejit.compiler.store.key import Key
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.machine.fingerprint import Fingerprint


@contextmanager
def measuring_alone(cache: Store, progress: Progress) -> Iterator[None]:
    """Held by the one build of a cache that measures: two at once would measure each other."""
    with ExitStack() as stack:
        with progress.phase("waiting for another build, which measures"):
            stack.enter_context(cache.making(Key("measure", "alone", ())))
        yield


def runs_here(toolchain: Toolchain, library: KernelLibrary) -> bool:
    """Whether this machine has all instructions of a target, so that its forms can be measured."""
    target, here = toolchain.target, Fingerprint.current()
    needed = {*library.cpu_features, *(target.cpu_features or ())}
    return target.architecture == here.architecture and needed <= set(here.cpu_features)


def measure_products(
    products: Sequence[Product],
    toolchain: Toolchain,
    library: KernelLibrary,
    cache: Store,
    progress: Progress,
    *,
    workers: int | None = None,
    timeout_seconds: float = JOB_SECONDS,
) -> FormTable:
    """Measures each form of products on this machine, which `runs_here` says can run them.

    Args:
        products: which.
        toolchain: of the target.
        library: its kernels.
        cache: where programs go.
        progress: told of each product.
        workers: how many forms are compiled side by side.
        timeout_seconds: how long one compile, or measuring one product, may take.

    Raises:
        BuildError: a form does not compile, or fails.
    """
    forms = [(product, form) for product in products for form in product.forms]
    with progress.phase(f"compiling {len(forms)} forms of products for {toolchain.target.name}"):
        compiled = _compile(forms, toolchain, library, cache, workers, timeout_seconds)
    conditions, today = conditions_of(toolchain, library), _today()
    measured = []
    with WorkerProcess(toolchain, cache, os.environ) as worker:
        for number, product in enumerate(products, 1):
            executables = {f: compiled[product, f].executable.digest for f in product.forms}
            with progress.phase(
                f"measuring {product} for {toolchain.target.name} ({number}/{len(products)})"
            ):
                times = worker.measure_forms(product, executables, library.digest, timeout_seconds)
            measured.append(Measured(product, times, conditions, today))
    return FormTable(tuple(measured))


def _compile(
    forms: Sequence[tuple[Product, str]],
    toolchain: Toolchain,
    library: KernelLibrary,
    cache: Store,
    workers: int | None,
    timeout_seconds: float,
) -> dict[tuple[Product, str], Compiled]:
    from prejit.compiler.lowering.product import lower_product

    target = toolchain.target.name
    with WorkerPool(cache, workers=workers, timeout_seconds=timeout_seconds) as pool:
        futures = {}
        for product, form in forms:
            program = cache.put_blob(lower_product(product, form))
            source = Source(program, ("cpu",), library if form == KERNEL else None)
            name = f"forms/{toolchain.target.name}/{product} by {form}"
            key = compile_key(name, toolchain, source)
            job = CompileJob(f"{product} by {form}", toolchain, source, key)
            futures[job.program, target] = pool.submit(job)
        results = collect(futures)
    return {(product, form): results[f"{product} by {form}", target] for product, form in forms}


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
