"""Build a recorded bundle for other machines: compile its programs, as jax lowered them, for targets.

The bundle has the keys that jax computed on the recorded machine, so files of calls fit. In the keys of
traced calls the recorded CPU stands, which `prejit run` gives jax in place of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import zstandard

from prejit.compiler.compile.compile_jobs import Compiled, CompileJob, Source
from prejit.compiler.compile.executable_keys import executable_key
from prejit.compiler.compile.executor import collect
from prejit.compiler.compile.pool import WorkerPool
from prejit.compiler.compile.recorded_lowering import RecordedLowering
from prejit.compiler.compile.worker_process import JOB_SECONDS
from prejit.compiler.pipeline.build_run import make_toolchain
from prejit.compiler.pipeline.pack.bundle_files import PackedTarget
from prejit.compiler.pipeline.plan import why_not
from prejit.compiler.pipeline.result_keys import versions
from prejit.compiler.progress import Progress, open_progress
from prejit.compiler.recording.jax_cache_packing import (
    RecordedFile,
    RecordedTarget,
    bundle_name,
    packed,
    packed_file,
    read_targets,
    write_bundle,
)
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.targets.target_classes import Target
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.errors import BuildError, UsageError
from prejit.runtime.format.checks.layers import unpack
from prejit.runtime.recorded.hook.jax_texts import CALLS_PREFIX


@dataclass(frozen=True, slots=True)
class BuiltRecording:
    """A bundle that was built from a recording.

    Attributes:
        path: its directory.
        digest: its digest.
        targets: the names of its targets.
        compiled, cached: numbers of programs that were compiled, and that the build cache had.
        left_out: names of programs whose lowered form the recording lacks, which jax compiles at a start.
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
        BuildError: this machine cannot compile for a target, or a program does not compile.
        RejectError: the recording is damaged.
        StoreError: the bundle cannot be written.
        UsageError: it is no recording, it cannot be built for a target, or another bundle is at the output.
    """
    path = output / bundle_name(recording.name)
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
        built = [_built(each, source, store, pool, progress) for each, source in chosen]
        compiled = len(pool.compiled)
    packs = []
    for each, made in sorted(zip(chosen, built, strict=True), key=lambda pair: pair[0][0].name):
        pack = packed(made, path.name)
        packs.append(PackedTarget(replace(pack.config, target=each[0].name), pack.layers))
    digest = write_bundle(path, path.name, packs)
    count = sum(each.count for each in built)
    left_out = dict.fromkeys(
        file.entry.name
        for _, source in chosen
        for file in _programs(source)
        if file.entry.file not in source.lowered
    )
    return BuiltRecording(
        path,
        digest,
        tuple(each.config.target for each in packs),
        compiled,
        count - compiled,
        tuple(left_out),
    )


def _programs(source: RecordedTarget) -> list[RecordedFile]:
    """Return the recorded programs, without the files of calls."""
    return [each for name, each in source.programs.items() if not name.startswith(CALLS_PREFIX)]


def _fitting(path: Path, recorded: Sequence[RecordedTarget], wanted: Target) -> RecordedTarget:
    """Return the recorded target to build for a target: of several the one with most programs."""
    platforms = sorted({each.requirement.platform for each in recorded})
    if wanted.platform != "cpu" or "cpu" not in platforms:
        raise UsageError(
            f"{path}: cannot build the programs for {wanted.name}: expected a recording and a "
            f"target of platform cpu, found {' and '.join(platforms)} and {wanted.platform}",
            hint=f"record on such a machine: prejit record -o {path} -- COMMAND",
        )
    found = max(
        (each for each in recorded if each.requirement.platform == "cpu"),
        key=lambda each: each.count,
    )
    if not any(each.entry.file in found.lowered for each in _programs(found)):
        raise UsageError(
            f"{path}: expected the programs as jax lowered them, found none",
            hint="an older prejit recorded them, or another build made this bundle from a recording: remove "
            f"{path} and record again with prejit record -o {path} -- COMMAND",
        )
    return found


def _built(
    wanted: Target,
    source: RecordedTarget,
    store: DirectoryStore,
    pool: WorkerPool,
    progress: Progress,
) -> RecordedTarget:
    """Compile the programs of a recorded target for another, with the jax of the recording."""
    jax = source.versions.get("jax", versions("jax")["jax"])
    wanted = replace(wanted, jax=None if jax == versions("jax")["jax"] else jax)
    if reason := why_not(wanted):
        raise BuildError(f"target {wanted.name}: {reason}")
    tools = make_toolchain(wanted, progress)
    if tools.jaxlib != source.requirement.jaxlib:
        raise BuildError(
            f"target {wanted.name}: expected jaxlib {source.requirement.jaxlib}, with which the program was "
            f"recorded, found {tools.jaxlib}",
            hint="build where this jaxlib is installed, or record again with the one that is",
        )
    programs = {
        each.entry.file: RecordedLowering.of(source.lowered[each.entry.file])
        for each in _programs(source)
        if each.entry.file in source.lowered
    }
    futures = {}
    for file, lowered in programs.items():
        job = _job(source.programs[file].entry.name, file, source, lowered, tools, store)
        futures[file, wanted.name] = pool.submit(job)
    results = {file: each for (file, _), each in collect(futures).items()}
    features = {name for each in results.values() for name in each.cpu_features}
    made = {
        file: each for file, each in source.programs.items() if file.startswith(CALLS_PREFIX)
    } | {
        file: _cached(source.programs[file], programs[file], each, store)
        for file, each in results.items()
    }
    needs = wanted.requirement(tools.jaxlib, cpu_features=tuple(sorted(features)))
    return RecordedTarget(needs, source.versions, made)


def _job(
    name: str,
    file: str,
    source: RecordedTarget,
    lowered: RecordedLowering,
    tools: Toolchain,
    store: DirectoryStore,
) -> CompileJob:
    program = Source(store.put_blob(source.lowered[file]), (lowered.platform,))
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
    content = zstandard.ZstdCompressor().compress(content) if is_zstd else zlib.compress(content)
    made = packed_file(entry.file, content, None)
    conditions = {**entry.conditions, lowered.devices: lowered.accelerator}
    return replace(made, entry=replace(entry, entry=made.entry.entry, conditions=conditions))
