"""Measuring in a worker process: how fast a target's own jaxlib and kernels compute on this machine.

The forms of a product (products.py) are compiled as programs are, then run in turns in one process while
nothing else compiles. The matrices take turns too: each comes from memory, as in a model, and not from a
processor's cache. costs.py measures the programs of encoders.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from prejit.compiler.compile.compile_key import executable_key
from prejit.compiler.compile.executor import Executor, collect
from prejit.compiler.compile.jobs import Compiled, CompileJob, Source
from prejit.compiler.compile.worker_process import JOB_SECONDS, WorkerProcess
from prejit.compiler.native.form_table import (
    FormTable,
    KnownForms,
    Measured,
    conditions_of,
    merge_into,
    own_path,
    read_own,
)
from prejit.compiler.native.library import KernelLibrary
from prejit.compiler.native.products import KERNEL, Product
from prejit.compiler.pipeline.program_keys import measuring_key
from prejit.compiler.progress import Progress
from prejit.compiler.store.interface import Store
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.errors import BuildError
from prejit.runtime.machine.fingerprint import Fingerprint

_FORM_SECONDS = 0.4
"""Estimated seconds to compile and measure one form of a product, on two cores."""


@contextmanager
def measuring_alone(store: Store, progress: Progress) -> Iterator[None]:
    """Wait until no other build of the store measures: two at once would slow each other down."""
    with ExitStack() as stack:
        with progress.phase("waiting for another build, which measures"):
            stack.enter_context(store.making(measuring_key("alone")))
        yield


def runs_here(toolchain: Toolchain, library: KernelLibrary) -> bool:
    """Return whether this machine has all instructions of a target, so that its forms can be measured."""
    target, here = toolchain.target, Fingerprint.current()
    needed = {*library.cpu_features, *(target.cpu_features or ())}
    return target.architecture == here.architecture and needed <= set(here.cpu_features)


def measure_missing(
    known: KnownForms,
    products: Sequence[Product],
    toolchain: Toolchain,
    library: KernelLibrary,
    store: Store,
    executor: Executor,
    progress: Progress,
    *,
    fresh: bool,
    quiet: Callable[[], None],
    timeout_seconds: float,
) -> KnownForms:
    """Measure the forms of products that no table has, keep them in the store, and return all tables.

    It runs before programs are compiled: they need the result, and the machine is quiet.

    Args:
        known: the tables so far.
        products: the products of the build.
        toolchain: the toolchain of a target that `runs_here`.
        library: the target's kernels.
        store: keeps the table of this machine.
        executor: compiles the forms.
        progress: shows each product.
        fresh: True: measure all products that this machine has not measured itself; False: only large
            products that no table has.
        quiet: waits until this process compiles nothing.
        timeout_seconds: time limit of measuring one product.
    """
    conditions, own = conditions_of(toolchain, library), own_path(store.root)
    if not known.missing(products, conditions, fresh=fresh):
        return known
    with measuring_alone(store, progress):
        known = replace(known, own=read_own(own))  # another build may have measured meanwhile
        missing = known.missing(products, conditions, fresh=fresh)
        if not missing:
            return known
        quiet()
        seconds = _FORM_SECONDS * sum(len(product.forms) for product in missing)
        progress.note(
            f"measuring the forms of {len(missing)} products for {toolchain.target.name}, "
            f"about {seconds:.0f} s"
        )
        try:
            measured = measure_products(
                missing, toolchain, library, store, executor, progress, timeout_seconds
            )
        except BuildError as error:  # forms decide about speed alone
            progress.note(f"cannot measure forms, using the recorded ones: {error}")
            return known
        return replace(known, own=merge_into(own, measured))


def measure_products(
    products: Sequence[Product],
    toolchain: Toolchain,
    library: KernelLibrary,
    store: Store,
    executor: Executor,
    progress: Progress,
    timeout_seconds: float = JOB_SECONDS,
) -> FormTable:
    """Measure each form of products on this machine, which must be one that `runs_here`.

    Args:
        products: the products.
        toolchain: the target's toolchain.
        library: the target's kernels.
        store: gets the programs.
        executor: compiles the forms.
        progress: shows each product.
        timeout_seconds: time limit of measuring one product.

    Raises:
        BuildError: a form does not compile, or fails.
    """
    name = toolchain.target.name
    compiled = _compile(products, toolchain, library, store, executor)
    conditions, today = conditions_of(toolchain, library), _today()
    measured = []
    with WorkerProcess(toolchain, store, os.environ) as worker:
        for number, product in enumerate(products, 1):
            executables = {f: compiled[product, f].executable.digest for f in product.forms}
            with progress.phase(f"measuring {product} for {name} ({number}/{len(products)})"):
                times = worker.measure_forms(product, executables, library.digest, timeout_seconds)
            measured.append(Measured(product, times, conditions, today))
    return FormTable(tuple(measured))


def _compile(
    products: Sequence[Product],
    toolchain: Toolchain,
    library: KernelLibrary,
    store: Store,
    executor: Executor,
) -> dict[tuple[Product, str], Compiled]:
    from prejit.compiler.lowering.export import lower_product

    target, futures = toolchain.target.name, {}
    for product in products:
        for form in product.forms:
            program = store.put_blob(lower_product(product, form))
            source = Source(program, ("cpu",), library if form == KERNEL else None)
            name = f"{product} by {form}"
            key = executable_key(f"forms/{target}/{name}", toolchain, source)
            futures[name, target] = executor.submit(CompileJob(name, toolchain, source, key))
    results = collect(futures)
    return {
        (product, form): results[f"{product} by {form}", target]
        for product in products
        for form in product.forms
    }


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
