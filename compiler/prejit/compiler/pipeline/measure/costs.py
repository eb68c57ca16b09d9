"""What one run of an encoder's program costs: measured where this machine can run it, else estimated.

The runtime groups sentences by these figures, so only their ratios matter. A worker process runs the programs
one after another while nothing compiles, with the weights that were packed. The store keeps the figures under
the key of the executable, so that a build that changes nothing measures nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prejit.compiler.compile.worker_process import WorkerProcess
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.specs import ENCODER_KINDS
from prejit.compiler.pipeline.executables import CompiledExecutable, CompiledTarget
from prejit.compiler.pipeline.measure.measured_forms import measuring_alone
from prejit.compiler.pipeline.pack.bundle_files import PackedLayer
from prejit.compiler.pipeline.pack.target_requirement import requirement_of
from prejit.compiler.pipeline.program_keys import cost_key
from prejit.compiler.progress import Progress
from prejit.compiler.store.interface import Store
from prejit.compiler.store.key import Key
from prejit.runtime.machine.compare import compare
from prejit.runtime.machine.fingerprint import Fingerprint


def measure_costs(
    manifest: Manifest,
    targets: Sequence[CompiledTarget],
    weights: PackedLayer | None,
    store: Store,
    progress: Progress,
    quiet: Callable[[], None],
    timeout_seconds: float,
) -> dict[tuple[str, str], int]:
    """Return the microseconds of one run of an encoder's programs, by program and target.

    A target that this machine cannot run gets the figures of one that it can run, else estimates.

    Args:
        manifest: the manifest.
        targets: the executables.
        weights: the packed weights; None: the bundle has none.
        store: keeps what was measured.
        progress: shows what is measured.
        quiet: waits until this process compiles nothing.
        timeout_seconds: time limit for all programs of a target.

    Raises:
        BuildError: a program fails on this machine.
    """
    if manifest.encode is None or weights is None or not isinstance(weights.content, Path):
        return {}
    found: dict[str, dict[str, int]] = {}
    for target in targets:
        executables = [each for each in target.executables if each.spec.kind in ENCODER_KINDS]
        with progress.phase(f"measuring programs of {target.tools.name}"):
            found[target.tools.name] = _measured(
                manifest,
                target,
                executables,
                weights.content,
                store,
                progress,
                quiet,
                timeout_seconds,
            )
    any_measured = next(filter(None, found.values()), {})
    estimated = {
        each.spec.name: each.lowered.estimated_microseconds
        for each in targets[0].executables
        if each.spec.kind in ENCODER_KINDS
    }
    return {
        (program, name): cost
        for name, own in found.items()
        for program, cost in (own or any_measured or estimated).items()
    }


def _measured(
    manifest: Manifest,
    target: CompiledTarget,
    executables: Sequence[CompiledExecutable],
    weights: Path,
    store: Store,
    progress: Progress,
    quiet: Callable[[], None],
    timeout_seconds: float,
) -> dict[str, int]:
    """Return the microseconds of programs on this machine; {}: it cannot run them."""
    toolchain, library = target.tools.toolchain, target.library
    keys = {each.spec.name: cost_key(each.job.key) for each in executables}
    known = _known(store, keys)
    if len(known) == len(executables):
        return known
    needs = requirement_of(manifest, toolchain, target.results, library)
    fits = compare(target.tools.name, needs, Fingerprint.current()).matches
    if toolchain.target.platform != "cpu" or not fits:
        return {}
    with measuring_alone(store, progress):
        known = _known(store, keys)  # another build may have measured them meanwhile
        missing = [each for each in executables if each.spec.name not in known]
        if not missing:
            return known
        quiet()
        requests = [
            {
                "executable": each.compiled.executable.digest,
                "weight_sets": list(each.lowered.weight_sets.values()) or [[]],
                "arguments": each.lowered.arguments,
            }
            for each in missing
        ]
        kernels = None if library is None else library.digest
        with WorkerProcess(toolchain, store, os.environ) as worker:
            costs = worker.measure(requests, weights, kernels, timeout_seconds)
        for each, microseconds in zip(missing, costs, strict=True):
            store.put(keys[each.spec.name], {"microseconds": microseconds})
            known[each.spec.name] = microseconds
    return known


def _known(store: Store, keys: Mapping[str, Key]) -> dict[str, int]:
    """Return earlier measurements, by program."""
    found = {name: store.get(key) for name, key in keys.items()}
    return {name: int(cost["microseconds"]) for name, cost in found.items() if cost is not None}
