"""The steps of the command line as Python functions: `plan`, `build`, and `program` for one function."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prejit.compiler.compile.executor import Executor
from prejit.compiler.compile.pool import WorkerPool
from prejit.compiler.compile.worker_process import JOB_SECONDS
from prejit.compiler.manifest.manifest import Manifest, Program
from prejit.compiler.manifest.manifest_checks import is_bundle_name
from prejit.compiler.manifest.reading import check_manifest, read_manifest
from prejit.compiler.manifest.valid_values import expected
from prejit.compiler.pipeline.build_interface import BuildOptions, Built, Failed, Shard
from prejit.compiler.pipeline.build_run import build_all as run_all
from prejit.compiler.pipeline.build_run import only_built
from prejit.compiler.pipeline.executable_jobs import PlannedExecutable, planned_executables
from prejit.compiler.pipeline.lower.model_checks import check_planned
from prejit.compiler.pipeline.plan import PlanOptions, plan_build
from prejit.compiler.pipeline.report_files import report_build
from prejit.compiler.progress import Progress, Quiet, open_progress
from prejit.compiler.sharing.layered import LayeredStore
from prejit.compiler.sharing.leases import Leases
from prejit.compiler.sharing.remote import Patient
from prejit.compiler.sharing.sharing_settings import read_stores
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.store.store_interface import Store
from prejit.runtime.device._jit_dispatch import Dispatch
from prejit.runtime.errors import ManifestError, StoreError, UsageError
from prejit.runtime.jitted.jit_call import Chosen, Parameters

AnyManifest = Manifest | str | os.PathLike[str]
"""A manifest, or the path of its TOML file."""
logging.getLogger("prejit.compiler").addHandler(logging.NullHandler())
EXECUTOR = "PREJIT_EXECUTOR"
"""The environment variable that says where a build compiles."""
LOCAL = "local"
"""The executor that compiles in worker processes of this machine."""


def plan(
    manifest: AnyManifest | Program | Iterable[Program],
    *,
    name: str | None = None,
    targets: str | Sequence[str] = (),
    cache: str | os.PathLike[str] | None = None,
    shared: str | None = None,
    forms: Path | None = None,
) -> tuple[PlannedExecutable, ...]:
    """Return what a build would do about each program and target, as `prejit plan` shows it.

    A plan traces and compiles nothing. A function that changed is imported, and traced at build, which shows
    whether its executable is cached.

    Args:
        manifest: as for `build`.
        name: as for `build`.
        targets: as for `build`.
        cache: directory of the build cache; None: $PREJIT_CACHE or ~/.cache/prejit/build.
        shared: URL of a store that many machines share, a directory, or a TOML file; None: $PREJIT_STORE.
        forms: a table of measured forms.

    Raises:
        ManifestError: the manifest has mistakes, or names a function that does not exist.
        BuildError: this machine cannot compile for a target, or code of the user raises.
        CheckpointError: the model is one that prejit does not build, or its files are wrong.
        StoreError: a file cannot be read.
        UsageError: a name in `targets` is no target of the manifest; or several programs, and no name.
    """
    checked, only = _checked(manifest, name, targets)
    with _open_store(cache, shared, Quiet()) as store:
        options = PlanOptions(only, None if forms is None else str(forms))
        found = plan_build(checked, store, options)
        check_planned(found, store)
        return planned_executables(found, store)


def program(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Program:
    """Return a program of a function, with the arguments of one call as examples.

        build(program(score, params, x))

    The program's name is the function's, or the name that `prejit.runtime.jit` looks for. Static and donated
    arguments, and shardings on a mesh, are those that `prejit.runtime.jit` or jax.jit was given.

    Args:
        function: a function, or what `prejit.runtime.jit` or jax.jit returned.
        *args: the arguments as in a call. In place of an array a shape string such as `float32[8, 128]` or a
            jax.ShapeDtypeStruct will do.
        **kwargs: the same, by name.

    Raises:
        ManifestError: the function does not take these arguments, or has no name; or jax.jit has options that
            no bundle has, such as compiler_options.
    """
    static: Chosen = (None, None)
    donated: Chosen = (None, None)
    if (jitted := Dispatch.of(function)) is not None:
        static, donated = jitted.static, jitted.donated
    name = getattr(function, "program_name", None) or getattr(function, "__name__", None)
    if name is None or name == "<lambda>":
        raise ManifestError(
            f"program: expected a function with a name, found {function!r}",
            hint="give the name: Program('name', fn=function, args=[...])",
        )
    try:
        call = Parameters(function, static=static, donated=donated).bind(args, kwargs)
    except TypeError as error:
        raise ManifestError(
            f"program {name!r}: args: {error}",
            hint="give the arguments of one call; Program(NAME, fn=..., args=[...]) takes a name too",
        ) from error
    for key in call.static:
        if not key.isidentifier():
            raise ManifestError(
                f"program {name!r}: static {key!r}: expected an argument that has a name, found one of *args",
                hint="make it a parameter of its own",
            )
    if len(call.placed) < len(call.arrays) and not call.nameable:
        raise ManifestError(
            f"program {name!r}: args: expected all arrays by position or all by name, found a function that "
            "takes some by position only and others by name only",
            hint="wrap it in a function that takes all by name",
        )
    # Arrays that come by name alone stay so, for `Bundle.bind(name, state=...)` and calls like this one.
    by_place = len(call.placed) == len(call.arrays) and (bool(args) or not call.arrays)
    names: list[str | int] = [*range(len(call.arrays))] if by_place else [*call.arrays]
    mesh, split = None, dict[str, tuple[str, ...]]()
    if jitted is not None:
        # It imports jax, which a build of a manifest may not need.
        from prejit.compiler.lowering.user.shardings import jitted_split

        mesh, split = jitted_split(jitted.options, names, f"program {name!r}")
    return Program(
        name,
        fn=getattr(function, "__wrapped__", function) if jitted is not None else function,
        args=[*call.arrays.values()] if by_place else dict(call.arrays),
        static={key: (value,) for key, value in call.static.items()},
        donate=[
            place if by_place else key
            for place, key in enumerate(call.arrays)
            if key in call.donated
        ],
        shardings=split,
        mesh=mesh,
    )


def build(
    manifest: AnyManifest | Program | Iterable[Program],
    output: str | os.PathLike[str] = "artifacts",
    *,
    name: str | None = None,
    targets: str | Sequence[str] = (),
    cache: str | os.PathLike[str] | None = None,
    shared: str | None = None,
    forms: Path | None = None,
    measure: bool | None = None,
    executor: str | None = None,
    workers: int | None = None,
    timeout_seconds: float = JOB_SECONDS,
    shard: str | None = None,
    quiet: bool = False,
    retrace: bool = False,
) -> Built:
    """Compile the programs of a manifest and write the bundle `output/NAME`, as `prejit build` does.

    Beside it are `NAME.report.json` and `NAME.report.html`: what the build did, how long each step took, and
    what changed since the last report. A build that changes nothing leaves them as they are.

    Args:
        manifest: a manifest, or the path of a TOML file; or programs, or one.
        output: directory of bundles.
        name: the bundle's name, for programs; None: that of the only program.
        targets: names of targets, or one; empty: all targets of the manifest, and for programs this
            machine's CPU.
        cache: directory of the build cache; None: $PREJIT_CACHE or ~/.cache/prejit/build.
        shared: URL of a store that many machines share, a directory, or a TOML file; None: $PREJIT_STORE.
        forms: a table of measured forms.
        measure: which products are measured. True: those that this machine has not measured itself; False:
            none; None: large ones that no table has.
        executor: `local`, or the address of a Ray cluster that compiles, `ray://HOST:PORT` or `ray://auto`;
            None: $PREJIT_EXECUTOR or `local`.
        workers: maximum number of compile processes on this machine; None: by cores and free memory.
        timeout_seconds: time limit of one compile, and of measuring one product.
        shard: `i/N`: this is the i-th of N processes on any machines that share the build by their shared
            store; None: it is the only one.
        quiet: whether nothing is printed; else the progress goes to stderr.
        retrace: whether functions and decoders of the user are traced again, though nothing changed that they
            read.

    Raises:
        ManifestError: the manifest has mistakes.
        BuildError: a program does not compile. What was finished stays in the build cache.
        CheckpointError, NetworkError, StoreError: something cannot be read, fetched or written.
        UsageError: a name in `targets` is no target of the manifest; or several programs, and no name; or a
            shard without a shared store that it may write.
    """
    checked, only = _checked(manifest, name, targets)
    results: list[Built | Failed] = []
    settings = BuildSettings(
        cache, shared, forms, measure, executor, workers, timeout_seconds, shard, quiet, retrace
    )
    build_all([(checked, only)], output, settings, done=results.append)
    return only_built(results)


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """How to build; the attributes are arguments of `build`."""

    cache: str | os.PathLike[str] | None = None
    shared: str | None = None
    forms: Path | None = None
    measure: bool | None = None
    executor: str | None = None
    workers: int | None = None
    timeout_seconds: float = JOB_SECONDS
    shard: str | None = None
    quiet: bool = False
    retrace: bool = False


def build_all(
    requests: Sequence[tuple[Manifest, tuple[str, ...]]],
    output: str | os.PathLike[str],
    settings: BuildSettings,
    *,
    done: Callable[[Built | Failed], None],
) -> None:
    """Build several manifests with one pool of workers, as `prejit build` does.

    Args:
        requests: manifests with different bundle names, each with the names of its targets (empty: all).
        output: directory of bundles.
        settings: how to build.
        done: called with each build as it ends. One that fails ends no other.

    Raises:
        StoreError: the build cache cannot be opened.
        UsageError: a shard has no shared store that it may write.
    """
    display: Progress = Quiet() if settings.quiet else open_progress()
    shard = None if settings.shard is None else Shard.parse(settings.shard)
    with (
        display as progress,
        _open_store(settings.cache, settings.shared, progress, builds=True, shard=shard) as store,
    ):

        def reported(result: Built | Failed) -> None:
            if isinstance(result, Built) and result.packed_here:
                fetched = store.fetched if isinstance(store, LayeredStore) else {}
                report_build(result, progress, fetched)
            done(result)

        options = BuildOptions(
            store=store,
            executor=_open_executor(settings, store, progress, in_order=shard is not None),
            progress=progress,
            forms=settings.forms,
            # What each shard measured for itself would make its programs differ from those of others.
            measure=settings.measure if shard is None else bool(settings.measure),
            timeout_seconds=settings.timeout_seconds,
            retrace=settings.retrace,
            shard=shard,
        )
        run_all(requests, Path(output), options, done=reported)


def _open_executor(
    settings: BuildSettings, store: Store, progress: Progress, *, in_order: bool
) -> Executor:
    place = settings.executor or os.environ.get(EXECUTOR) or LOCAL
    common: dict[str, Any] = {
        "workers": settings.workers,
        "progress": progress,
        "timeout_seconds": settings.timeout_seconds,
    }
    if place == LOCAL:
        return WorkerPool(store, in_order=in_order, **common)
    from prejit.compiler.cluster.cluster_executor import ClusterExecutor

    try:
        return ClusterExecutor(place, store, shared=settings.shared, **common)
    except UsageError as error:
        if not settings.executor:
            error.args = (f"{EXECUTOR}: {error}",)
        raise


def _checked(
    given: AnyManifest | Program | Iterable[Program], name: str | None, targets: str | Sequence[str]
) -> tuple[Manifest, tuple[str, ...]]:
    """Return the manifest of a build, without mistakes, and the names of its targets; empty: all."""
    only = (targets,) if isinstance(targets, str) else tuple(targets)
    if not isinstance(given, Manifest | str | os.PathLike):
        return check_manifest(_of_programs(given, name, only)), only
    if name is not None:
        raise UsageError("name: expected none, because the manifest has the name of the bundle")
    if not isinstance(given, Manifest):
        return read_manifest(Path(given)), only
    return check_manifest(given) if given.path is None else given, only


def _of_programs(
    given: Program | Iterable[Program], name: str | None, targets: tuple[str, ...]
) -> Manifest:
    is_one = isinstance(given, Program) or not isinstance(given, Iterable)
    listed: Any = (given,) if is_one else given
    programs: tuple[Any, ...] = tuple(listed)
    for place, each in enumerate(programs):
        if not isinstance(each, Program):
            called = getattr(each, "__name__", "function") if callable(each) else "function"
            raise UsageError(
                f"manifest: expected a manifest or programs, found {type(each).__name__}"
                + ("" if is_one else f" at {place}"),
                hint=f"give the arguments of one call as examples: build(program({called}, x, y))",
            )
    if name is None and len(programs) != 1:
        raise UsageError(
            f"name: expected the bundle's name, because there are {len(programs)} programs",
            hint='build([...], name="mine")',
        )
    if name is None and not is_bundle_name(str(programs[0].name)):
        raise UsageError(
            f"name: expected the bundle's name, because {programs[0].name!r} is none: "
            f"{expected('bundle.name')}",
            hint='build(program(...), name="mine")',
        )
    return Manifest(name or programs[0].name, programs=programs, targets=targets or ("cpu-host",))


@contextmanager
def _open_store(
    cache: str | os.PathLike[str] | None,
    shared: str | None,
    progress: Progress,
    *,
    builds: bool = False,
    shard: Shard | None = None,
) -> Iterator[Store]:
    """Yield the store of a plan or build. A build sends what it has to the shared ones."""
    stores = read_stores(shared)
    tiers = stores.tiers
    leading = next((each for each in tiers if each.writes), None)
    if shard is not None:
        if leading is None:
            raise UsageError(
                "--shard: expected a shared store that this build may write, found "
                + ("none" if not tiers else "one that it only reads"),
                hint="give --store URL, the same one for all shards",
            )
        patient = replace(leading, remote=Patient(leading.remote))
        tiers = tuple(patient if each is leading else each for each in tiers)
        leading = patient
    local = DirectoryStore.open(None if cache is None else Path(cache), stores.namespace)
    if not tiers:
        yield local
        return
    leases = None
    if shard is not None and leading is not None:
        leases = Leases(leading, f"shard {shard}")
    layered = LayeredStore(local, tiers, progress.note, offers=builds, leases=leases)
    try:
        yield layered
    except BaseException as error:
        layered.abandon()
        if down := layered.disagreement:
            raise StoreError(
                f"shard {shard}: the shared store does not answer any more, and the bundle was not packed: "
                f"{down}",
                hint="run the same command again when it answers: what was finished stays in the build "
                "cache of its machine, is sent then, and is not compiled again",
            ) from error
        raise
    with progress.phase("sending results to the shared store"):
        layered.finish()
