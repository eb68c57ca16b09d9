"""The build side of prejit: compile JAX programs ahead of time and package them.

    from prejit.compiler import build, program

    build(program(score, params, x))

`Manifest` and `Program` say more: buckets, parameters, targets. `read_manifest` reads the same from TOML, and
`plan` returns what a build would do. The names in `__all__` are the public ones; they are imported when they
are first used (PEP 562).

The packages, from the lowest layer up: `base`, `progress`, `store`; `targets`; `manifest`, `native`;
`models`; `checkpoint`, `lowering`, `compile`; `pipeline`; `signing`; `sharing`; `api`, `rebuilding`; `cli`.
Begin with `pipeline.build_run`, which lists all steps of a build.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prejit.compiler.api import build, plan, program
    from prejit.compiler.manifest.manifest import (
        BundleTable,
        Encode,
        Generate,
        Library,
        Manifest,
        Model,
        Program,
        ProgramCheck,
    )
    from prejit.compiler.manifest.reading import read_manifest
    from prejit.compiler.pipeline.build_interface import Built
    from prejit.compiler.pipeline.executable_jobs import PlannedExecutable
    from prejit.compiler.targets.target_classes import GpuTable
    from prejit.compiler.targets.target_table import TargetTable
    from prejit.runtime.errors import BuildError, CheckpointError, ManifestError, NetworkError
    from prejit.runtime.format.arrays import Mesh

_HOMES = {
    "prejit.compiler.api": ("build", "plan", "program"),
    "prejit.compiler.manifest.manifest": (
        *("BundleTable", "Encode", "Generate", "Library", "Manifest", "Model", "Program"),
        "ProgramCheck",
    ),
    "prejit.compiler.manifest.reading": ("read_manifest",),
    "prejit.compiler.pipeline.executable_jobs": ("PlannedExecutable",),
    "prejit.compiler.pipeline.build_interface": ("Built",),
    "prejit.compiler.targets.target_classes": ("GpuTable",),
    "prejit.compiler.targets.target_table": ("TargetTable",),
    "prejit.runtime.errors": ("BuildError", "CheckpointError", "ManifestError", "NetworkError"),
    "prejit.runtime.format.arrays": ("Mesh",),
}

__all__ = [
    "BuildError",
    "Built",
    "BundleTable",
    "CheckpointError",
    "Encode",
    "Generate",
    "GpuTable",
    "Library",
    "Manifest",
    "ManifestError",
    "Mesh",
    "Model",
    "NetworkError",
    "PlannedExecutable",
    "Program",
    "ProgramCheck",
    "TargetTable",
    "build",
    "plan",
    "program",
    "read_manifest",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
