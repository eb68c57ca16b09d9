"""Run a program once, and merge the files of jax's cache that it leaves into a bundle."""

from __future__ import annotations

import os
import re
import tempfile
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import zstandard

from prejit.compiler.compile.worker.lean_executable import lean
from prejit.compiler.pipeline.pack.bundle_descriptions import (
    attach_descriptions,
    recording_provenance,
)
from prejit.compiler.pipeline.pack.bundle_files import (
    DESCRIPTIONS,
    PackedTarget,
    assemble,
    check_readable,
    layer,
)
from prejit.compiler.pipeline.pack.bundle_writing import write_layout
from prejit.compiler.pipeline.result_keys import versions
from prejit.compiler.recording.hook.jax_lowerings import ENDING
from prejit.compiler.recording.lowered_layer import lowered_layer, read_lowered
from prejit.compiler.recording.untraced_calls import RecordedCalls, confirmed, read_calls
from prejit.runtime.base.files import digest_of, store_errors
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.base.written_files import lock_file, remove_and_unlock
from prejit.runtime.errors import BuildError
from prejit.runtime.format.blobs import Layer, read_whole
from prejit.runtime.format.bundle_schema import Config, RecordedProgram, Segment
from prejit.runtime.format.checks.layers import unpack
from prejit.runtime.format.index_writing import stranger
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import FORMAT_VERSION, RECORDED_MEDIA_TYPE
from prejit.runtime.format.opening import match, read_contents
from prejit.runtime.format.root import Root
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement
from prejit.runtime.recorded.hook import jax_texts
from prejit.runtime.recorded.hook.watch import Orders
from prejit.runtime.recorded.recorded_bundle import on_cpu, recorded_of
from prejit.runtime.recorded.watched_command import (
    JaxRequest,
    WatchedProcess,
    cache_settings,
    environment_for,
    read_events,
    run_to_end,
)

RECORDER = str(Path(__file__).with_name("hook") / "__init__.py")
"""The package that describes and keeps programs and calls in the processes of a recorded program."""
_ZSTD_LEVEL = 3
"""jax has compressed the files already: a higher level makes them no smaller."""


@dataclass(frozen=True)
class RecordedFile:
    """A file of jax's cache, compressed for a pack.

    Attributes:
        entry: what the program table says of it; the offset of its frame counts from 0.
        frame: the frame.
    """

    entry: RecordedProgram
    frame: bytes

    def content(self) -> bytes:
        """Return the file's bytes, verified."""
        return unpack(self.frame, self.entry.entry, self.entry.file)


@dataclass(frozen=True)
class RecordedTarget:
    """The contents of a recorded bundle for one class of machines.

    Attributes:
        requirement: what its programs need of a machine.
        versions: of the packages that compiled them, by name.
        programs: its files, by name.
        lowered: programs as jax lowered them (`RecordedLowering`), by the name of the file.
        given: its name in its bundle; empty: it is in none.
    """

    requirement: Requirement
    versions: Mapping[str, str]
    programs: Mapping[str, RecordedFile]
    lowered: Mapping[str, bytes] = field(default_factory=dict)
    given: str = ""

    @property
    def count(self) -> int:
        """Return the number of its programs. prejit's own files are none."""
        return sum(not file.startswith(jax_texts.OURS_PREFIX) for file in self.programs)

    @property
    def name(self) -> str:
        """Return its name, or a new one: what people want to know first, and digits that no other has."""
        if self.given:
            return self.given
        needs = self.requirement
        kind = re.sub(r"[^a-z0-9]+", "-", (needs.device_kind or needs.platform).lower()).strip("-")
        return f"{kind}-jaxlib{needs.jaxlib}-{digest_of(to_json(needs))[7:15]}"


def read_targets(path: Path) -> tuple[RecordedTarget, ...]:
    """Return the targets of the bundle at a path, each file verified; none where there is no bundle.

    A writer that was killed, or whose disk was full, leaves a directory without `index.json`.

    Raises:
        RejectError: the bundle is damaged.
        StoreError: it cannot be read.
        UsageError: `prejit build` wrote it.
    """
    if not path.exists() or (path.is_dir() and not stranger(path)):
        return ()
    return read_whole(path, _read_targets)


def _read_targets(layout: Layout, root: Root) -> tuple[RecordedTarget, ...]:
    found = []
    for target in match(root, Fingerprint.current()):
        contents = read_contents(layout, target)
        recorded = recorded_of(layout, contents)
        pack = Layer.in_layout(layout, contents.manifest.layer(RECORDED_MEDIA_TYPE))
        programs = {}
        for each in recorded:
            frame = pack.content[each.entry.offset : each.entry.offset + each.entry.size]
            unpack(frame, each.entry, pack.path)
            programs[each.file] = RecordedFile(
                replace(each, entry=replace(each.entry, offset=0)), frame
            )
        config = contents.config
        lowered = read_lowered(layout, contents.manifest)
        parts = (config.requirement, config.versions, programs, lowered, config.target)
        found.append(RecordedTarget(*parts))
    return tuple(found)


def is_of(target: RecordedTarget, machine: Fingerprint) -> bool:
    """Return whether a recording on this machine adds to this target, or would with its version of jaxlib."""
    here = {requirement_of(None, None, each) for each in (machine, on_cpu(machine))}
    return replace(target.requirement, jaxlib=machine.jaxlib) in here


def collect(
    cache: Path, processes: Sequence[WatchedProcess], machine: Fingerprint, known: Collection[str]
) -> tuple[tuple[RecordedTarget, ...], tuple[str, ...]]:
    """Return the files that a run left in its cache, by target, and why programs are not among them."""
    asked: dict[str, tuple[WatchedProcess, JaxRequest]] = {}
    for each in processes:
        for made in each.requests:
            if made.key is not None:
                asked.setdefault(made.key + jax_texts.FILE_SUFFIX, (each, made))
    left_out = {
        f"{made.name} at {made.where}: {made.not_kept}": None
        for each in processes
        for made in each.requests
        if made.not_kept is not None
    }
    targets: dict[Requirement, RecordedTarget] = {}
    for path in sorted(cache.glob(f"*{jax_texts.FILE_SUFFIX}")):
        if path.name in known:
            continue
        content = path.read_bytes()
        if not _is_complete(content):
            left_out[f"{path.name}: two processes wrote it at once; record again"] = None
            continue
        found = asked.get(path.name)
        process, request = (None, None) if found is None else found  # of a process without the hook
        needs = requirement_of(process, request, machine)
        target = targets.setdefault(needs, RecordedTarget(needs, _versions(process), {}))
        files = {**target.programs, path.name: packed_file(path.name, content, request)}
        targets[needs] = replace(target, programs=files)
    return tuple(targets.values()), tuple(left_out)


def requirement_of(
    process: WatchedProcess | None, request: JaxRequest | None, machine: Fingerprint
) -> Requirement:
    """Return what a recorded program needs of a machine.

    jax's own key decides whether it is used, with flags and devices in it. The requirement keeps code from
    machines that it would crash on, and chooses the target.
    """
    jaxlib = machine.jaxlib if process is None else process.versions["jaxlib"]
    on_cpu = request is not None and request.conditions.get("platform") == "cpu"
    if on_cpu or machine.platform == "cpu":
        return Requirement("cpu", machine.architecture, machine.cpu_features, jaxlib)
    return Requirement(
        machine.platform,
        machine.architecture,
        (),
        jaxlib,
        plugin=machine.plugin,
        cuda=machine.cuda,
        device_kind=machine.device_kind,
        compute_capability=machine.compute_capability,
        topology=machine.topology,
    )


def _versions(process: WatchedProcess | None) -> dict[str, str]:
    found = {} if process is None else process.versions
    return {
        **versions("prejit"),
        **{name: found[name] for name in ("jax", "jaxlib") if name in found},
    }


def packed_file(name: str, content: bytes, request: JaxRequest | None) -> RecordedFile:
    """Return a file for a pack; `request`: that of jax which it answers. None: not known."""
    frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress(content)
    segment = Segment(0, len(frame), digest_of(frame), len(content), digest_of(content))
    program = RecordedProgram(
        name=name[: -len(jax_texts.FILE_SUFFIX) - 65],  # 64 digits behind a dash
        file=name,
        entry=segment,
        ingredients={} if request is None else request.ingredients,
        conditions={} if request is None else request.conditions,
        arguments=None if request is None else request.arguments,
        function=None if request is None else request.function,
    )
    return RecordedFile(program, frame)


def _is_complete(content: bytes) -> bool:
    """Return whether a file of jax's cache is one whole compressed stream.

    jax writes it in place. If two processes write it at once, the end of the longer one stays behind the
    shorter.
    """
    try:
        if content.startswith(zstandard.FRAME_HEADER):
            zstandard.ZstdDecompressor().decompress(content, allow_extra_data=False)
            return True
        stream = zlib.decompressobj()
        stream.decompress(content)
        return stream.eof and not stream.unused_data
    except (zstandard.ZstdError, zlib.error):
        return False


def merged(
    before: Iterable[RecordedTarget], added: Iterable[RecordedTarget]
) -> tuple[RecordedTarget, ...]:
    """Return the targets of both, sorted by name. A file that both have is the one from before."""
    targets: dict[Requirement, RecordedTarget] = {}
    for target in (*before, *added):
        there = targets.setdefault(target.requirement, target)
        programs = {**target.programs, **there.programs}
        if there is not target:
            programs |= _confirmed(there, target)
        lowered = {**target.lowered, **there.lowered}
        targets[target.requirement] = replace(there, programs=programs, lowered=lowered)
    return tuple(sorted(targets.values(), key=lambda target: target.name))


def _confirmed(before: RecordedTarget, now: RecordedTarget) -> dict[str, RecordedFile]:
    """Return the files of calls of a new recording, compared with those of the ones before."""
    found = {}
    for name, file in now.programs.items():
        if name.startswith(jax_texts.CALLS_PREFIX):
            calls, there = RecordedCalls.of(name, file.content()), before.programs.get(name)
            old = None if there is None else RecordedCalls.of(name, there.content())
            found[name] = packed_file(name, confirmed(old, calls).encoded(), None)
    return found


def packed(target: RecordedTarget, bundle: str) -> PackedTarget:
    """Return the config and the layer of a target. Equal targets give equal bytes."""
    content, recorded = bytearray(), []
    programs = {**target.programs, **_lean(target)}
    for file in sorted(programs):
        program = programs[file]
        segment = replace(program.entry.entry, offset=len(content))
        recorded.append(replace(program.entry, entry=segment))
        content += program.frame
    config = Config(
        format=FORMAT_VERSION,
        bundle=bundle,
        target=target.name,
        requirement=target.requirement,
        versions=dict(target.versions),
        programs=(),
        weight_sets={},
        recorded=tuple(recorded),
    )
    layers = [layer(RECORDED_MEDIA_TYPE, bytes(content), "programs.jax-cache")]
    if lowered := {file: each for file, each in target.lowered.items() if file in target.programs}:
        layers.append(lowered_layer(lowered))
    return PackedTarget(config, tuple(layers))


def _lean(target: RecordedTarget) -> dict[str, RecordedFile]:
    """Return files with the lean executables of calls without a trace, those that the target lacks."""
    found: dict[str, RecordedFile] = {}
    if target.requirement.platform != "cpu":
        return found
    for file, calls in target.programs.items():
        if not file.startswith(jax_texts.CALLS_PREFIX):
            continue
        for each in RecordedCalls.of(file, calls.content()).content["calls"].values():
            name = f"{each['program']}{jax_texts.FILE_SUFFIX}"
            lean_name = jax_texts.LEAN_PREFIX + name
            if each["reason"] is None and not {lean_name} & {*target.programs, *found}:
                content = _lean_cache_file(target.programs[name].content())
                if content is not None:
                    found[lean_name] = packed_file(lean_name, content, None)
    return found


def _lean_cache_file(content: bytes) -> bytes | None:
    """Return a file of jax's cache with a lean executable; None: the form of this one is not known.

    It has the seconds of the compile in four bytes, then the executable, and is compressed as it was.
    """
    is_zstd = content.startswith(zstandard.FRAME_HEADER)
    plain = zstandard.ZstdDecompressor().decompressobj() if is_zstd else zlib.decompressobj()
    entry = plain.decompress(content)
    executable = lean(entry[4:])
    return None if executable is None else cache_file(entry[:4] + executable, zstd=is_zstd)


def cache_file(content: bytes, *, zstd: bool) -> bytes:
    """Return a file of jax's cache: zstd, where jax found it, or zlib."""
    return zstandard.ZstdCompressor().compress(content) if zstd else zlib.compress(content)


@dataclass(frozen=True)
class Recording:
    """The result of a recording.

    Attributes:
        path: the directory of the bundle.
        name, digest: name and digest of the bundle.
        status: the exit status of the program.
        added: the number of programs that the recording added.
        programs: the number of programs in the bundle, of all targets.
        targets: the names of its targets.
        left_out: why programs that jax compiled are not in the bundle, one line each.
        requests: what the program's processes asked of jax.
        calls: the calls that start without a trace, or would, of each command.
    """

    path: Path
    name: str
    digest: str
    status: int
    added: int
    programs: int
    targets: tuple[str, ...]
    left_out: tuple[str, ...]
    requests: tuple[JaxRequest, ...]
    calls: tuple[RecordedCalls, ...] = ()


def default_name(command: Sequence[str]) -> str:
    """Return a bundle's name for a command: that of its Python file, its module or its program."""
    word = next((each for each in command if each.endswith(".py")), command[0])
    if "-m" in command[:-1]:
        word = command[command.index("-m") + 1].rpartition(".")[2]
    return bundle_name(Path(word).stem)


def bundle_name(text: str) -> str:
    """Return a text as the name of a bundle: small letters and digits with single dashes between them."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "recorded"


def name_at(path: Path) -> str:
    """Return the name of the bundle at a path, that of its directory, as of `.`, too."""
    return bundle_name(os.path.basename(os.path.abspath(path)))


def record(command: Sequence[str], output: Path, *, untraced: bool = False) -> Recording:
    """Run a command, and write what jax compiled for it into a bundle.

    A bundle that is there gets it in addition. The program gets what the bundle holds already, so that only
    the rest compiles. `untraced`: the calls that jax traced are recorded as well.

    Raises:
        BuildError: the program compiled nothing, and there is no bundle.
        RejectError: the bundle that is there is damaged.
        StoreError: the bundle cannot be written.
        UsageError: the command cannot be started, or `prejit build` wrote the bundle that is there.
    """
    machine = Fingerprint.current()
    with tempfile.TemporaryDirectory(prefix="prejit-record-") as scratch:
        cache, events = Path(scratch, "cache"), Path(scratch, "events")
        cache.mkdir()
        events.mkdir()
        known = [
            program
            for target in read_targets(output)
            if is_of(target, machine)
            for program in target.programs.values()
        ]
        for program in known:
            (cache / program.entry.file).write_bytes(program.content())
        orders = Orders(
            cache_settings(cache, write=True), str(events), recorder=RECORDER, calls=untraced
        )
        status = run_to_end(command, environment_for(orders, os.environ))
        processes = read_events(events)
        found, left_out = collect(
            cache, processes, machine, {program.entry.file for program in known}
        )
        if calls := read_calls(events):
            needs = requirement_of(None, None, machine)
            files = {each.file: packed_file(each.file, each.encoded(), None) for each in calls}
            found = (*found, RecordedTarget(needs, _versions(None), files))
        lowered = {
            path.name.removesuffix(ENDING) + jax_texts.FILE_SUFFIX: path.read_bytes()
            for path in sorted(events.glob(f"*{ENDING}"))
        }
    requests = tuple(request for process in processes for request in process.requests)
    return _write(output, status, found, left_out, requests, lowered)


def write_bundle(output: Path, name: str, targets: Iterable[PackedTarget]) -> str:
    """Write a recorded bundle and return its digest.

    Raises:
        BuildError: no reader would take it.
        StoreError: it cannot be written.
    """
    index, blobs = assemble(name, targets, DESCRIPTIONS)
    check_readable(index, blobs)
    write_layout(output, index, blobs)
    digest = digest_of(index)
    attach_descriptions(output, digest, partial(recording_provenance, digest))
    return digest


def _write(
    output: Path,
    status: int,
    found: Sequence[RecordedTarget],
    left_out: Sequence[str],
    requests: tuple[JaxRequest, ...],
    lowered: Mapping[str, bytes],
) -> Recording:
    """Merge targets into the bundle at `output` and write it. A key names one program, of one target."""
    name = name_at(output)
    with store_errors(output.parent, "write a bundle"):
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = output.parent / f".{output.name}.record.lock"
        held = lock_file(lock)
    try:
        # Another recording may have written since this one began.
        before = read_targets(output)
        targets = tuple(
            replace(each, lowered={**lowered, **each.lowered}) for each in merged(before, found)
        )
        if not targets:
            raise BuildError(
                f"the program compiled nothing with jax, and ended with status {status}",
                hint="mend the command first; has the Python that it runs jax? Give that Python's path"
                if status
                else "record a command that calls jitted functions; Python must not run with -I, -E or -S",
            )
        digest = write_bundle(output, name, [packed(target, name) for target in targets])
    finally:
        remove_and_unlock(lock, held)
    count = sum(target.count for target in targets)
    return Recording(
        output,
        name,
        digest,
        status,
        count - sum(target.count for target in before),
        count,
        tuple(target.name for target in targets),
        tuple(left_out),
        requests,
        tuple(
            RecordedCalls.of(name, file.content())
            for target in targets
            for name, file in target.programs.items()
            if name.startswith(jax_texts.CALLS_PREFIX)
        ),
    )
