"""The services and options of all builds of a command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prejit.compiler.compile.executor import Executor
from prejit.compiler.pipeline.executables import Jobs
from prejit.compiler.pipeline.shards import Packing, Shard
from prejit.compiler.progress import Progress
from prejit.compiler.store.interface import Store


@dataclass(frozen=True)
class Services:
    """The services and options of all builds of a command: see `run.build`, and these two.

    Attributes:
        jobs: gets each program once, whichever build needs it.
        packings: by bundle, decides which shard packs it; empty: the build has no shards.
    """

    output: Path
    store: Store
    progress: Progress
    forms: Path | None
    measure: bool | None
    timeout_seconds: float
    retrace: bool
    executor: Executor
    jobs: Jobs
    shard: Shard | None
    packings: Mapping[str, Packing]
    kernels_by: Mapping[str, str] | None
