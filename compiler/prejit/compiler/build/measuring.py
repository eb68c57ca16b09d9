"""Measuring in a worker process: what a target's own jaxlib and kernels do on this machine.

The forms of a product (products.py) are compiled as programs are, then run in turns in one process, when
nothing else is compiled. The matrices go round, so that each comes from memory, as in a model, and not from a
processor's cache. How encoders are measured is in costs.py.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from prejit.compiler.build.keys import measuring_key
from prejit.compiler.compile.jobs import Compiled, CompileJob, Source, compile_ingredients
from prejit.compiler.compile.pool import CompilePool
from prejit.compiler.compile.worker_process import JOB_SECONDS, Death, WorkerProcess
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
from prejit.compiler.progress import Progress
from prejit.compiler.store.cache import Cache
from prejit.compiler.store.key import Key
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.errors import BuildError
from prejit.runtime.machine.fingerprint import Fingerprint

Ask = Callable[[dict[str, Any]], Any]
"""Sends a request to worker.py and returns its result; raises BuildError where it has none."""

_FORM_SECONDS = 0.4
"""Estimated seconds to compile and measure one form of a product, on two cores."""


@contextmanager
def worker(
    toolchain: Toolchain, cache: Cache, timeout_seconds: float = JOB_SECONDS
) -> Iterator[Ask]:
    """A worker process for requests of one's own, one after another.

    Args:
        toolchain: what it runs with.
        cache: holds the executables.
        timeout_seconds: how long one request may take; then the worker is killed.
    """
    process = WorkerProcess(toolchain, cache, os.environ)

    def ask(request: dict[str, Any]) -> Any:
        answer = process.ask(request, timeout_seconds)
        if not isinstance(answer, Death) and "result" in answer:
            return answer["result"]
        name = toolchain.target.name
        if isinstance(answer, Death):
            raise BuildError(
                f"target {name}: cannot measure its programs on this machine: {answer}",
                hint=answer.hint,
            )
        reason = answer["error"]["message"]
        raise BuildError(
            f"target {name}: its programs fail on this machine, which it fits: {reason}",
            hint="what compiled them has an error: try another jax",
        )

    try:
        yield ask
    finally:
        process.release()


@contextmanager
def measuring_alone(cache: Cache, progress: Progress) -> Iterator[None]:
    """Held by the one build of a cache that measures: two at once would measure each other."""
    with ExitStack() as stack:
        with progress.phase("waiting for another build, which measures"):
            stack.enter_context(cache.making(measuring_key("alone")))
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
    cache: Cache,
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
    with worker(toolchain, cache, timeout_seconds) as ask:
        for number, product in enumerate(products, 1):
            request = {
                "product": str(product),
                "forms": {
                    form: compiled[product, form].executable.digest for form in product.forms
                },
                "kernels": library.digest,
            }
            with progress.phase(
                f"measuring {product} for {toolchain.target.name} ({number}/{len(products)})"
            ):
                times = ask({"measure_forms": request})
            measured.append(Measured(product, times, conditions, today))
    return FormTable(tuple(measured))


def measure_missing(
    known: KnownForms,
    products: Sequence[Product],
    toolchain: Toolchain,
    library: KernelLibrary,
    store: Cache,
    progress: Progress,
    *,
    fresh: bool,
    workers: int | None,
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
        progress: shows each product.
        fresh: whether all products are measured that this machine has not measured itself; else only large
            products that no table has.
        workers: number of forms that are compiled side by side.
        timeout_seconds: time limit of one compile, and of measuring one product.
    """
    conditions, own = conditions_of(toolchain, library), own_path(store.root)
    if not known.missing(products, conditions, fresh=fresh):
        return known
    with measuring_alone(store, progress):
        known = replace(known, own=read_own(own))  # another build may have measured meanwhile
        missing = known.missing(products, conditions, fresh=fresh)
        if not missing:
            return known
        seconds = _FORM_SECONDS * sum(len(product.forms) for product in missing)
        progress.note(
            f"measuring the forms of {len(missing)} products for {toolchain.target.name}, "
            f"about {seconds:.0f} s"
        )
        try:
            measured = measure_products(
                missing,
                toolchain,
                library,
                store,
                progress,
                workers=workers,
                timeout_seconds=timeout_seconds,
            )
        except BuildError as error:  # forms decide about speed alone
            progress.note(f"cannot measure forms, using the recorded ones: {error}")
            return known
        return replace(known, own=merge_into(own, measured))


def _compile(
    forms: Sequence[tuple[Product, str]],
    toolchain: Toolchain,
    library: KernelLibrary,
    cache: Cache,
    workers: int | None,
    timeout_seconds: float,
) -> dict[tuple[Product, str], Compiled]:
    from prejit.compiler.lowering.product import lower_product

    with CompilePool(cache, workers=workers, timeout_seconds=timeout_seconds) as pool:
        for product, form in forms:
            program = cache.put_blob(lower_product(product, form))
            source = Source(program, ("cpu",), library if form == KERNEL else None)
            name = f"forms/{toolchain.target.name}/{product} by {form}"
            key = Key("compile", name, compile_ingredients(toolchain, source))
            pool.submit(CompileJob(f"{product} by {form}", toolchain, source, key))
        results = pool.results()
    target = toolchain.target.name
    return {(product, form): results[f"{product} by {form}", target] for product, form in forms}


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
