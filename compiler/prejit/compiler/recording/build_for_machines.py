"""Build a recorded bundle for other machines: compile its programs, as jax lowered them, for targets.

The bundle has the keys that jax computed on the recorded machine, so files of calls fit. In the keys of
traced calls the recorded CPU or GPU stands, which `prejit run` gives jax in place of its own.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import zstandard

from prejit.compiler.compile.compile_jobs import (
    CANNOT_COMPILE,
    Compiled,
    CompileJob,
    Source,
    executable_key,
)
from prejit.compiler.compile.executor import collect
from prejit.compiler.compile.pool import WorkerPool
from prejit.compiler.compile.recorded_lowering import RecordedLowering
from prejit.compiler.compile.worker_process import JOB_SECONDS
from prejit.compiler.pipeline.result_keys import versions
from prejit.compiler.pipeline.target_tools import make_toolchain, why_not
from prejit.compiler.progress import Progress, open_progress
from prejit.compiler.recording.jax_cache_packing import (
    RecordedFile,
    RecordedTarget,
    cache_file,
    name_at,
    packed,
    packed_file,
    read_targets,
    write_bundle,
)
from prejit.compiler.recording.untraced_calls import RecordedCalls
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.targets.target_classes import CUDA, PLUGINS, Target
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.errors import BuildError, UsageError
from prejit.runtime.format.checks.layers import unpack
from prejit.runtime.recorded.hook.jax_texts import CALLS_PREFIX, FILE_SUFFIX, OURS_PREFIX


@dataclass(frozen=True, slots=True)
class BuiltRecording:
    """A bundle that was built from a recording.

    Attributes:
        path: its directory.
        digest: its digest.
        targets: the names of its targets.
        compiled, cached: numbers of programs that were compiled, and that the build cache had.
        left_out: why programs are not in the bundle, which jax compiles at a start, one line each.
    """

    path: Path
    digest: str
    targets: tuple[str, ...]
    compiled: int
    cached: int
    left_out: tuple[str, ...]


def build_recording(
    recording: Path,
    output: Path,
    names: Sequence[str],
    *,
    cache: Path | None = None,
    workers: int | None = None,
    timeout_seconds: float = JOB_SECONDS,
) -> BuiltRecording:
    """Compile a recorded bundle for targets, and write the bundle OUTPUT/NAME, NAME as the recording's.

    Args:
        recording: directory of the recorded bundle.
        output: directory of bundles.
        names: targets of the catalogue.
        cache: directory of the build cache; None: $PREJIT_CACHE or ~/.cache/prejit/build.
        workers: number of compile processes side by side; None: as memory and cores allow.
        timeout_seconds: time limit of one program.

    Raises:
        BuildError: this machine cannot compile for a target, XLA compiles no program, or a compile ended
            otherwise, as by its time limit.
        RejectError: the recording is damaged.
        StoreError: the bundle cannot be written.
        UsageError: it is no recording, it cannot be built for a target, or another bundle is at the output.
    """
    path = output / name_at(recording)
    if path.exists() and any(each.lowered for each in read_targets(path)):
        raise UsageError(
            f"{path}: expected a new bundle or one that was built from a recording, found a recording",
            hint="build into another directory: prejit build RECORDING -o DIR",
        )
    recorded = read_targets(recording)
    chosen = [
        (each, _fitting(recording, recorded, each)) for each in map(target, dict.fromkeys(names))
    ]
    if not chosen:
        raise UsageError(
            f"{recording}: expected the targets to build this recording for, found none",
            hint="name them: --target cpu-x86-64-v3 (`prejit targets` lists all)",
        )
    store = DirectoryStore.open(cache)
    progress = open_progress()
    with (
        progress,
        WorkerPool(
            store, workers=workers, progress=progress, timeout_seconds=timeout_seconds
        ) as pool,
    ):
        built = [_built(recording, each, source, store, pool, progress) for each, source in chosen]
        compiled = len(pool.compiled)
    targets = sorted((made for made, _ in built), key=lambda made: made.name)
    digest = write_bundle(path, path.name, [packed(each, path.name) for each in targets])
    count = sum(made.count for made in targets)
    left_out = dict.fromkeys(
        f"{file.entry.name}: the recording lacks its lowered form: an older prejit recorded it, or jax's "
        "custom_partitioning has Python in it"
        for _, source in chosen
        for file in _programs(source)
        if file.entry.file not in source.lowered
    )
    left_out |= dict.fromkeys(line for _, lines in built for line in lines)
    used = [source for _, source in chosen]
    left_out |= dict.fromkeys(
        f"the programs of {each.name}: a build for a target takes those of one recorded target, here "
        f"{used[0].name}"
        for each in recorded
        if each not in used
    )
    return BuiltRecording(
        path,
        digest,
        tuple(each.name for each in targets),
        compiled,
        count - compiled,
        tuple(left_out),
    )


def _programs(source: RecordedTarget) -> list[RecordedFile]:
    """Return the recorded programs, without prejit's own files."""
    return [each for name, each in source.programs.items() if not name.startswith(OURS_PREFIX)]


def _fitting(path: Path, recorded: Sequence[RecordedTarget], wanted: Target) -> RecordedTarget:
    """Return the recorded target to build for a target.

    Of several that of the installed jaxlib comes first, then that of a plugin that builds have, then that of
    the target's own kind of device, then the one with most programs.
    """
    platforms = sorted({each.requirement.platform for each in recorded})
    if wanted.platform == "tpu":
        raise UsageError(
            f"{path}: expected targets of platform cpu or cuda, for which recordings are built, found "
            f"{wanted.name}",
            hint="record on the TPU that runs the program; its recording needs no build",
        )
    if wanted.platform not in platforms:
        raise UsageError(
            f"{path}: cannot build the programs for {wanted.name}: expected a recording on a machine of "
            f"platform {wanted.platform}, found {' and '.join(platforms) or 'none'}",
            hint=f"record on such a machine: prejit record -o {path} -- COMMAND",
        )
    found = max(
        (each for each in recorded if each.requirement.platform == wanted.platform),
        key=lambda each: (
            each.requirement.jaxlib == versions("jaxlib")["jaxlib"] and len(each.lowered) > 0,
            (each.requirement.plugin or "").partition(" ")[0] == PLUGINS.get(wanted.platform, ""),
            each.requirement.device_kind == wanted.device_kind,
            each.count,
        ),
    )
    if not any(each.entry.file in found.lowered for each in _programs(found)):
        raise UsageError(
            f"{path}: expected the programs as jax lowered them, found none",
            hint="an older prejit recorded them, or another build made this bundle from a recording: remove "
            f"{path} and record again with prejit record -o {path} -- COMMAND",
        )
    return found


def _built(
    path: Path,
    wanted: Target,
    source: RecordedTarget,
    store: DirectoryStore,
    pool: WorkerPool,
    progress: Progress,
) -> tuple[RecordedTarget, list[str]]:
    """Compile the programs of a recorded target for another, with the jax of the recording.

    Returns:
        The target, and why programs are not in it that XLA refuses, one line each.
    """
    jax = source.versions.get("jax", versions("jax")["jax"])
    wanted = replace(wanted, jax=None if jax == versions("jax")["jax"] else jax)
    if reason := why_not(wanted):
        raise BuildError(f"target {wanted.name}: {reason}")
    tools = make_toolchain(wanted, progress)
    for compiles, compiled in (
        (tools.plugin, source.requirement.plugin),
        (f"jaxlib {tools.jaxlib}", f"jaxlib {source.requirement.jaxlib}"),
    ):
        if compiles != compiled:
            raise BuildError(
                f"target {wanted.name}: expected {compiled or 'no plugin'}, with which {path} was recorded, "
                f"found {compiles}",
                hint=f"record with {compiles}, or build where {compiled or 'none'} is installed",
            )
    programs = {
        each.entry.file: RecordedLowering.of(
            source.lowered[each.entry.file], f"{path}: {each.entry.name}"
        )
        for each in _programs(source)
        if each.entry.file in source.lowered
    }
    futures = {}
    for file, lowered in programs.items():
        job = _job(source.programs[file].entry.name, file, source, lowered, tools, store)
        futures[file, wanted.name] = pool.submit(job)
    refused = {
        each: error
        for each, future in futures.items()
        if isinstance(error := future.exception(), BuildError) and CANNOT_COMPILE in str(error)
    }
    if len(refused) == len(futures):
        refused = {}  # for `collect` to raise
    wanted_ones = {each: future for each, future in futures.items() if each not in refused}
    results = {file: each for (file, _), each in collect(wanted_ones).items()}
    features = {name for each in results.values() for name in each.cpu_features}
    made = {
        file: _calls(each, results)
        for file, each in source.programs.items()
        if file.startswith(CALLS_PREFIX)
    } | {
        file: _cached(source.programs[file], programs[file], each, store)
        for file, each in results.items()
    }
    needs = wanted.requirement(
        tools.jaxlib,
        plugin=tools.plugin,
        cuda=CUDA if wanted.platform == "cuda" else None,
        cpu_features=tuple(sorted(features)),
    )
    # XLA's flags and the devices are in jax's keys, and in the options that a program was recorded with.
    needs = replace(needs, xla_flags=None, device_count=None)
    lines = [str(error).partition("\n")[0] for error in refused.values()]
    return RecordedTarget(needs, source.versions, made, given=wanted.name), lines


def _calls(file: RecordedFile, programs: Container[str]) -> RecordedFile:
    """Return a file of calls in which those of programs that are left out have that as their reason."""
    name = file.entry.file
    calls = RecordedCalls.of(name, file.content())
    lacking = [
        each
        for each in calls.content["calls"].values()
        if each["reason"] is None and each["program"] + FILE_SUFFIX not in programs
    ]
    for each in lacking:
        each["reason"] = "the build for this target left its program out"
    return packed_file(name, calls.encoded(), None) if lacking else file


def _job(
    name: str,
    file: str,
    source: RecordedTarget,
    lowered: RecordedLowering,
    tools: Toolchain,
    store: DirectoryStore,
) -> CompileJob:
    program = Source(store.put_blob(source.lowered[file]), (tools.target.platform,))
    tools = replace(tools, target=replace(tools.target, device_count=lowered.count))
    return CompileJob(name, tools, program, executable_key(f"recorded {name}", tools, program))


def _cached(
    recorded: RecordedFile, lowered: RecordedLowering, result: Compiled, store: DirectoryStore
) -> RecordedFile:
    """Return the file of jax's cache of a compiled program: the seconds that it took, then the executable."""
    entry = recorded.entry
    frame = store.read_blob(result.executable.digest)
    if frame is None:
        raise BuildError(f"{entry.name} is gone from the build cache", hint="build again")
    executable = unpack(frame, replace(result.executable, offset=0), entry.name)
    content = (result.milliseconds // 1000).to_bytes(4, "big") + executable
    # As the recorded program's jax has zstd, or not.
    is_zstd = recorded.content().startswith(zstandard.FRAME_HEADER)
    made = packed_file(entry.file, cache_file(content, zstd=is_zstd), None)
    conditions = {**entry.conditions, lowered.devices: lowered.accelerator}
    return replace(made, entry=replace(entry, entry=made.entry.entry, conditions=conditions))
