"""Input and output of a build: the options and services of a command, and the result of each build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prejit.compiler.compile.executor import Executor
from prejit.compiler.compile.worker_process import JOB_SECONDS
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.pipeline.executable_jobs import Jobs
from prejit.compiler.pipeline.pack.weights_layer import FewBits
from prejit.compiler.pipeline.shards import Packing, Shard
from prejit.compiler.progress import Progress
from prejit.compiler.store.store_interface import Store
from prejit.runtime.errors import PrejitError
from prejit.runtime.format.bundle_schema import Accuracy


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How to build: the services that a build uses, and its options.

    Attributes:
        store: keeps results.
        executor: compiles programs and forms of products. The build closes it once all is compiled.
        progress: shows every step.
        forms: a table of measured forms, which goes before all others.
        measure: which products are measured. True: those that this machine has not measured itself; False:
            none, nor an encoder's programs unless there are shards; None: large ones that no table has.
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
    forms: Path | None = None
    measure: bool | None = None
    timeout_seconds: float = JOB_SECONDS
    retrace: bool = False
    shard: Shard | None = None
    kernels_by: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Services(BuildOptions):
    """The options of a command, and what all its builds share.

    Attributes:
        output: directory of bundles.
        jobs: gets each program once, whichever build needs it.
        packings: by bundle, decides which shard packs it; empty: the build has no shards.
    """

    output: Path
    jobs: Jobs
    packings: Mapping[str, Packing]


@dataclass(frozen=True, slots=True)
class BuiltProgram:
    """A program of a bundle for one target.

    Attributes:
        key: digest of the key of its executable.
        compile_milliseconds: time that the compiler took, now or in an earlier build.
        new: whether it was compiled now, for this program.
    """

    program: str
    target: str
    key: str
    compile_milliseconds: int
    new: bool


@dataclass(frozen=True)
class Built:
    """The result of a build.

    Attributes:
        path: directory of the bundle.
        digest: digest of the bundle.
        compiled: number of programs x targets that were compiled now.
        cached: number of those that were in the store.
        written: whether the directory was changed.
        accuracy: what the dtypes of weights and cache cost; None: all are float32.
        programs: every program for every target.
        packed_by: number of the shard that packed the bundle; None: the build had no shards.
        packed_here: whether the bundle is in `path`, and not in the directory of another shard.
        few_bits: what became of matrices that were published in few bits; None: there are none.
        int4: what decided how matrices were rounded to int4; empty: there are none.
    """

    path: Path
    digest: str
    compiled: int
    cached: int
    written: bool
    accuracy: Accuracy | None = None
    programs: tuple[BuiltProgram, ...] = ()
    packed_by: int | None = None
    packed_here: bool = True
    few_bits: FewBits | None = None
    int4: str = ""


@dataclass(frozen=True)
class Failed:
    """A build that failed beside others: what it was to build, and why it failed."""

    manifest: Manifest
    error: PrejitError
