"""How fast products and programs are on this machine, measured by a target's own jaxlib in a worker process.

The forms of a product (`native.products`) are compiled as programs are, then run in turns in one process
while nothing else compiles. The matrices take turns too: each comes from memory, as in a model, and not from
a processor's cache.

The runtime groups sentences by the costs of an encoder's programs, so only their ratios matter. They run one
after another with the weights that were packed; where this machine cannot run them, costs are estimated.
The store keeps all figures, so that a build that changes nothing measures nothing.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from prejit.compiler.compile.compile_jobs import Compiled, CompileJob, Source, executable_key
from prejit.compiler.compile.executor import Executor, collect
from prejit.compiler.compile.worker_process import JOB_SECONDS, WorkerProcess
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.specs import ENCODER_KINDS, IMAGE, TYPICAL_TOKENS
from prejit.compiler.native.form_table import (
    FormTable,
    KnownForms,
    Measured,
    conditions_of,
    merge_into,
    own_path,
    read_own,
)
from prejit.compiler.native.kernel_library import KernelLibrary
from prejit.compiler.native.products import KERNEL, Product
from prejit.compiler.pipeline.build_interface import Services
from prejit.compiler.pipeline.executable_jobs import CompiledTarget
from prejit.compiler.pipeline.pack.bundle_files import PackedLayer
from prejit.compiler.pipeline.pack.contents import requirement_of
from prejit.compiler.pipeline.result_keys import cost_key, measuring_key
from prejit.compiler.progress import Progress
from prejit.compiler.store.store_interface import Store, kept_values
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.errors import BuildError
from prejit.runtime.machine.compare import compare
from prejit.runtime.machine.fingerprint import Fingerprint

_COSTED = (*ENCODER_KINDS, IMAGE)
"""The kinds of programs whose costs are measured."""
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
    service: Services,
) -> KnownForms:
    """Measure the forms of products that no table has, keep them in the store, and return all tables.

    It runs before programs are compiled: they need the result, and the machine is quiet. The toolchain is
    that of a target that `runs_here`. `service.measure` says which products are measured.
    """
    store, progress, fresh = service.store, service.progress, bool(service.measure)
    conditions, own = conditions_of(toolchain, library), own_path(store.root)
    if not known.missing(products, conditions, fresh=fresh):
        return known
    with measuring_alone(store, progress):
        known = replace(known, own=read_own(own))  # another build may have measured meanwhile
        missing = known.missing(products, conditions, fresh=fresh)
        if not missing:
            return known
        service.jobs.wait()
        seconds = _FORM_SECONDS * sum(len(product.measured_forms) for product in missing)
        progress.note(
            f"measuring the forms of {len(missing)} products for {toolchain.target.name}, "
            f"about {seconds:.0f} s"
        )
        try:
            measured = measure_products(
                *(missing, toolchain, library, store, service.executor, progress),
                service.timeout_seconds,
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
    """Measure the forms of products on this machine, which must be one that `runs_here`.

    The time limit is that of one product.
    """
    name = toolchain.target.name
    compiled = _compile(products, toolchain, library, store, executor)
    conditions, today = (
        conditions_of(toolchain, library),
        datetime.datetime.now(datetime.UTC).date(),
    )
    measured = []
    with WorkerProcess(toolchain, store, os.environ) as worker:
        for number, product in enumerate(products, 1):
            executables = {
                f: compiled[product, f].executable.digest for f in product.measured_forms
            }
            with progress.phase(f"measuring {product} for {name} ({number}/{len(products)})"):
                times = worker.measure_forms(product, executables, library.digest, timeout_seconds)
            measured.append(Measured(product, times, conditions, today.isoformat()))
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
        for form in product.measured_forms:
            program = store.put_blob(lower_product(product, form))
            source = Source(program, ("cpu",), library if form == KERNEL else None)
            name = f"{product} by {form}"
            key = executable_key(f"forms/{target}/{name}", toolchain, source)
            futures[name, target] = executor.submit(CompileJob(name, toolchain, source, key))
    results = collect(futures)
    return {
        (product, form): results[f"{product} by {form}", target]
        for product in products
        for form in product.measured_forms
    }


def measure_costs(
    manifest: Manifest,
    targets: Sequence[CompiledTarget],
    weights: PackedLayer | None,
    service: Services,
) -> dict[tuple[str, str], int]:
    """Return the microseconds of one run of an encoder's programs, by program and target.

    A target that this machine cannot run gets the figures of one that it can run, else estimates. A build
    with `--no-measure` has estimates alone, also where the store has figures: its bytes are those of any
    machine. The shards of a build measure once, and share the figures by their store.
    """
    if manifest.encode is None or weights is None or not isinstance(weights.content, Path):
        return {}
    found: dict[str, dict[str, int]] = {target.tools.name: {} for target in targets}
    measures = service.measure is not False or service.shard is not None
    for target in targets if measures else ():
        with service.progress.phase(f"measuring programs of {target.tools.name}"):
            found[target.tools.name] = _measured(manifest, target, weights.content, service)
    any_measured = next(filter(None, found.values()), {})
    estimated = {
        each.spec.name: each.lowered.estimated_microseconds
        for each in targets[0].executables
        if each.spec.kind in _COSTED
    }
    return {
        (program, name): cost
        for name, own in found.items()
        for program, cost in (own or any_measured or estimated).items()
    }


def _lengths(bucket: Mapping[str, int]) -> list[int]:
    """Return the tokens of sentences that fill a bucket; packed ones are typical, as far as all fit."""
    length = bucket.get("length", 1)
    if (most := bucket.get("sentences")) is None:
        return [length] * bucket["batch"]
    each = max(TYPICAL_TOKENS, -(-length // most))
    whole, rest = divmod(length, each)
    found = [*[each] * whole, *[rest][: rest > 0]]
    return found + [0] * (most - len(found))


def _measured(
    manifest: Manifest, target: CompiledTarget, weights: Path, service: Services
) -> dict[str, int]:
    """Return the microseconds of programs on this machine; {}: it cannot run them."""
    toolchain, library, store = target.tools.toolchain, target.library, service.store
    executables = [each for each in target.executables if each.spec.kind in _COSTED]
    keys = {each.spec.name: cost_key(each.job.key) for each in executables}
    known: dict[str, int] = kept_values(store, keys, "microseconds")
    if len(known) == len(executables):
        return known
    needs = requirement_of(manifest, toolchain, target.results, library)
    fits = compare(target.tools.name, needs, Fingerprint.current()).matches
    if toolchain.target.platform != "cpu" or not fits:
        return {}
    with measuring_alone(store, service.progress):
        # Another build may have measured them meanwhile.
        known = kept_values(store, keys, "microseconds")
        if len(known) == len(executables):
            return known
        service.jobs.wait()
        # All at once, also those known: they are compared with each other, and machines are busy at times.
        requests = [
            {
                "executable": each.compiled.executable.digest,
                "weight_sets": list(each.lowered.weight_sets.values()) or [each.lowered.weights],
                "arguments": each.lowered.arguments,
                "lengths": _lengths(each.spec.bucket),
            }
            for each in executables
        ]
        kernels = None if library is None else library.digest
        with WorkerProcess(toolchain, store, os.environ) as worker:
            costs = worker.measure(requests, weights, kernels, service.timeout_seconds)
        found = dict(zip(keys, costs, strict=True))
        for name, microseconds in found.items():
            store.put(keys[name], {"microseconds": microseconds})
    return found
