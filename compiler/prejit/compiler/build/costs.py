"""What one run of an encoder's program costs: measured where this machine can run it, else estimated.

The runtime groups sentences by these figures, so they matter to each other and not to a clock: programs are
measured one after another in one worker process, when nothing is compiled, with the weights that were packed.
They are part of the bundle and kept under the compile key, so that a build that changes nothing measures
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from prejit.compiler.build.measuring import measuring_alone
from prejit.compiler.build.plan import Lowered
from prejit.compiler.compile.jobs import Compiled
from prejit.compiler.compile.worker_process import WorkerProcess
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.progress import Progress
from prejit.compiler.store.interface import Store
from prejit.compiler.store.key import Key
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.machine.compare import compare
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.requirement import Requirement


def measured(
    toolchain: Toolchain,
    needs: Requirement,
    specs: Sequence[ProgramSpec],
    keys: Mapping[str, Key],
    programs: Mapping[str, Compiled],
    lowered: Mapping[str, Lowered],
    weights: Path,
    cache: Store,
    kernels: str | None,
    progress: Progress,
    timeout_seconds: float,
) -> dict[str, int]:
    """Microseconds of one run of each program on this machine, by name.

    Args:
        toolchain: of a target.
        needs: what its executables need of a machine.
        specs: of an encoder's programs.
        keys: their compile keys.
        programs: their executables.
        lowered: their portable programs.
        weights: the packed weights.
        cache: keeps what was measured.
        kernels: the library that programs call, a blob of the cache; None: they call none.
        progress: told of a wait for another build.
        timeout_seconds: how long measuring all of them may take.

    Returns:
        Nothing where this machine is no such target, or has no CPU to run them on.

    Raises:
        BuildError: a program fails here.
    """
    target = toolchain.target
    here = Fingerprint.current()
    machine = ("measured on", f"{here.cpu_model}, {here.cpu_count} CPUs")
    under = {
        spec.name: Key("cost", key.name, (*key.ingredients, machine))
        for spec in specs
        for key in (keys[spec.name],)
    }
    known = _known(cache, under)
    if len(known) == len(specs):
        return known
    if target.platform != "cpu" or not compare(target.name, needs, here).matches:
        return {}
    with measuring_alone(cache, progress):
        known = _known(cache, under)  # another build may have measured them
        missing = [spec for spec in specs if spec.name not in known]
        if not missing:
            return known
        requests = [
            {
                "executable": programs[spec.name].executable.digest,
                "weight_sets": list(lowered[spec.name].weight_sets.values()) or [[]],
                "arguments": lowered[spec.name].arguments,
            }
            for spec in missing
        ]
        with WorkerProcess(toolchain, cache, os.environ) as worker:
            costs = worker.measure(requests, weights, kernels, timeout_seconds)
        for spec, microseconds in zip(missing, costs, strict=True):
            cache.put(under[spec.name], {"microseconds": microseconds})
            known[spec.name] = microseconds
    return known


def _known(cache: Store, keys: Mapping[str, Key]) -> dict[str, int]:
    """Return earlier measurements by name."""
    found = {name: cache.get(key) for name, key in keys.items()}
    return {name: int(cost["microseconds"]) for name, cost in found.items() if cost is not None}
