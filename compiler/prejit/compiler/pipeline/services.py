"""The services and options of all builds of a command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from prejit.compiler.compile.executor import Executor
from prejit.compiler.compile.worker_process import JOB_SECONDS
from prejit.compiler.pipeline.executables import Jobs
from prejit.compiler.pipeline.shards import Packing, Shard
from prejit.compiler.progress import Progress
from prejit.compiler.store.interface import Store


class BuildOptions(TypedDict):
    """The options of a build.

    Attributes:
        store: keeps results.
        executor: compiles programs and forms of products. The build closes it once all is compiled.
        progress: shows every step.
        forms: a table of measured forms, which goes before all others.
        measure: which products are measured. True: those that this machine has not measured itself; False:
            none; None: large ones that no table has.
        timeout_seconds: time limit of measuring one product, of measuring an encoder's programs for a target,
            and of asking all programs for their golden answers.
        retrace: whether the user's code is traced again, whatever the store has.
        shard: which part of the build this is; None: the build has one machine.
        kernels_by: identity of the C++ compiler that is tried first for each target's kernels, by target; a
            target that is not named gets no kernels. None: every target, with the first compiler.
    """

    store: Store
    executor: Executor
    progress: Progress
    forms: NotRequired[Path | None]
    measure: NotRequired[bool | None]
    timeout_seconds: NotRequired[float]
    retrace: NotRequired[bool]
    shard: NotRequired[Shard | None]
    kernels_by: NotRequired[Mapping[str, str] | None]


@dataclass(frozen=True, kw_only=True)
class Services:
    """The services and options of all builds of a command: see `BuildOptions`, and these two.

    Attributes:
        jobs: gets each program once, whichever build needs it.
        packings: by bundle, decides which shard packs it; empty: the build has no shards.
    """

    output: Path
    store: Store
    progress: Progress
    executor: Executor
    jobs: Jobs
    packings: Mapping[str, Packing]
    forms: Path | None = None
    measure: bool | None = None
    timeout_seconds: float = JOB_SECONDS
    retrace: bool = False
    shard: Shard | None = None
    kernels_by: Mapping[str, str] | None = None
