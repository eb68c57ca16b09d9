"""What a target's programs are compiled with: the environment of its workers, and what of it a key holds.

XLA reads its flags once, when a process first uses it. So each target has worker processes of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from prejit.compiler.target import Target, cross_compiles
from prejit.runtime.fingerprint import Fingerprint, read_xla_flags

_REPRODUCIBLE = "--xla_cpu_parallel_codegen_split_count=1"
"""Kernels come out in the same order each time, if XLA has one CPU to run on (`taskset -c 0`). With more
they come out as they are finished. Costs nothing: GPT-2's programs compile as fast as without (2 CPUs)."""


def environment(target: Target, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker process.

    Args:
        target: what it compiles for.
        inherited: this process's environment. The user's own XLA_FLAGS stay.

    Raises:
        StoreError: XLA_FLAGS names a file, and it cannot be read.
    """
    worker = dict(inherited)
    # They set the size of XLA's thread pool, which XLA partitions loops for: see `ingredients`.
    for name in ("NPROC", "PJRT_NPROC"):
        worker.pop(name, None)
    return worker | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(target, inherited),
        "PYTHONHASHSEED": "0",
        "OPENBLAS_NUM_THREADS": "1",  # a worker forks, and only a process without threads can well
    }


def ingredients(target: Target, inherited: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The ingredients that a target and the build host add to the key of a compiled program.

    Beside them a key needs the digest of the portable program, and the version of jaxlib.

    Args:
        target: what is compiled for.
        inherited: this process's environment.

    Raises:
        StoreError: XLA_FLAGS names a file, and it cannot be read.
    """
    if target.cpu_features is not None and cross_compiles():
        cpu, features = target.cpu or "", target.cpu_features
    else:  # what the host has goes into the code; --xla_cpu_max_isa only leaves out some of it
        host = Fingerprint.current()
        cpu, features = host.cpu_model, host.cpu_features
    return (
        ("target", target.name),
        ("platform", target.platform),
        ("architecture", target.architecture),
        ("cpu", cpu),
        ("cpu_features", " ".join(features)),
        ("xla_flags", xla_flags(target, inherited)),
        # XLA:CPU splits loops at compile time, into as many parts as the build host has CPUs.
        ("cpus", str(len(os.sched_getaffinity(0)))),
    )


def xla_flags(target: Target, inherited: Mapping[str, str]) -> str:
    """XLA_FLAGS for a target: ours, which the user's may override, and the target's limit last.

    Raises:
        StoreError: XLA_FLAGS names a file, and it cannot be read.
    """
    flags = [_REPRODUCIBLE, *read_xla_flags(inherited).split()]
    if target.xla_max_isa is not None and not cross_compiles():
        flags.append(f"--xla_cpu_max_isa={target.xla_max_isa}")
    return " ".join(flags)
