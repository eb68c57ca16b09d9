"""Differences between two bundles: programs and their instructions, weights, requirements, versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prejit.compiler.compile.stablehlo_contents import Operations, operations
from prejit.compiler.compile.worker.disassembly import CodeSummary, summarize
from prejit.runtime.format.blobs import Layer, read_whole
from prejit.runtime.format.bundle_schema import ProgramEntry, Segment
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import EXECUTABLES_MEDIA_TYPE, PORTABLE_MEDIA_TYPE
from prejit.runtime.format.opening import Contents, match, read_contents
from prejit.runtime.format.root import Root
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement

Sides = tuple[int, int]
"""A number before and after."""


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """A target of a bundle."""

    name: str
    requirement: Requirement
    contents: Contents


@dataclass(frozen=True, slots=True)
class ReadBundle:
    """A bundle that was read whole.

    Attributes:
        path: its directory.
        digest: its digest.
        targets: by name.
        frame: returns the decompressed content of a frame of a target's layer of a media type.
    """

    path: str
    digest: str
    targets: Mapping[str, ReadTarget]
    frame: Callable[[ReadTarget, str, Segment], bytes]


@dataclass(frozen=True, slots=True)
class ProgramDifference:
    """A program that both bundles have, and that differs.

    Attributes:
        program, target: its name, and that of the target.
        operations: the operations of its StableHLO whose number differs, with their types.
        code: its machine code before and after; None: it is the same, or none for x86-64.
        fields: other entries of the program table that differ, as text.
        executable_bytes, temp_bytes: size in the bundle and temporary memory, before and after.
        has_new_program: whether its StableHLO differs by more than the version in which it is stored.
        has_new_executable: whether its executable differs.
    """

    program: str
    target: str
    operations: dict[str, Sides]
    code: tuple[CodeSummary, CodeSummary] | None
    fields: dict[str, tuple[str, str]]
    executable_bytes: Sides
    temp_bytes: Sides
    has_new_program: bool
    has_new_executable: bool


@dataclass(frozen=True, slots=True)
class BundleDifference:
    """The differences between two bundles.

    Attributes:
        before, after: their digests.
        added, removed: programs, each as `NAME for TARGET`.
        changed: programs that both have.
        same: number of programs that are equal.
        layers: layers other than programs that differ, by target and media type: sizes before and after.
        versions: versions of packages that differ, by target and package.
        requirements: axes that differ, by target and axis.
    """

    before: str
    after: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[ProgramDifference, ...]
    same: int
    layers: dict[str, dict[str, Sides]]
    versions: dict[str, dict[str, tuple[str, str]]]
    requirements: dict[str, dict[str, tuple[str, str]]]

    @property
    def is_equal(self) -> bool:
        """True if the bundles are the same, byte for byte."""
        return self.before == self.after


def read_bundle(path: str | os.PathLike[str]) -> ReadBundle:
    """Read the tables of a bundle. Programs are read when they are compared.

    Raises:
        RejectError: it is damaged.
        StoreError: it cannot be read.
    """

    def read(layout: Layout, root: Root) -> tuple[str, list[ReadTarget]]:
        found = [
            ReadTarget(each.name, each.requirement, read_contents(layout, each))
            for each in match(root, Fingerprint.current())
        ]
        return root.digest, sorted(found, key=lambda each: each.name)

    digest, targets = read_whole(path, read)

    def frame(target: ReadTarget, media_type: str, segment: Segment) -> bytes:
        with Layout(path) as layout:
            at = target.contents.manifest.layer(media_type)
            return Layer.in_layout(layout, at).unpack(segment)

    return ReadBundle(os.fspath(path), digest, _by_name(targets), frame)


def _by_name(targets: Iterable[ReadTarget]) -> dict[str, ReadTarget]:
    """Return targets by their names without the version of jax, unless two would have the same one."""
    short: dict[str, list[ReadTarget]] = {}
    for each in targets:
        jax = each.contents.config.versions.get("jax", "")
        short.setdefault(each.name.removesuffix(f"-jax{jax}"), []).append(each)
    return {
        name if len(those) == 1 else each.name: each
        for name, those in short.items()
        for each in those
    }


def compare_bundles(before: ReadBundle, after: ReadBundle) -> BundleDifference:
    """Return what differs between two bundles."""
    added: list[str] = []
    removed: list[str] = []
    changed: list[ProgramDifference] = []
    layers: dict[str, dict[str, Sides]] = {}
    versions: dict[str, dict[str, tuple[str, str]]] = {}
    requirements: dict[str, dict[str, tuple[str, str]]] = {}
    same = 0
    counted = _Counting(before, after)
    for name in sorted({*before.targets, *after.targets}):
        old, new = before.targets.get(name), after.targets.get(name)
        was, now = _programs(old), _programs(new)
        added += [f"{program} for {name}" for program in now if program not in was]
        removed += [f"{program} for {name}" for program in was if program not in now]
        if old is None or new is None:
            continue
        for program in (each for each in now if each in was):
            found = counted.difference(name, old, new, was[program], now[program])
            if found is None:
                same += 1
            else:
                changed.append(found)
        _note(layers, name, _layers(old, new))
        pairs = (old.contents.config.versions, new.contents.config.versions)
        _note(versions, name, _fields(*pairs))
        _note(requirements, name, _fields(asdict(old.requirement), asdict(new.requirement)))
    return BundleDifference(
        before.digest,
        after.digest,
        tuple(added),
        tuple(removed),
        tuple(changed),
        same,
        layers,
        versions,
        requirements,
    )


class _Counting:
    """Counts operations and instructions, each program once: targets share portable programs."""

    def __init__(self, before: ReadBundle, after: ReadBundle) -> None:
        self._sides = (before, after)
        self._read: dict[tuple[str, str], Operations] = {}

    def difference(
        self, name: str, old: ReadTarget, new: ReadTarget, was: ProgramEntry, now: ProgramEntry
    ) -> ProgramDifference | None:
        """Return how a program differs; None: it does not."""
        has_new_program = was.portable.raw_digest != now.portable.raw_digest
        has_new_executable = was.executable.raw_digest != now.executable.raw_digest
        fields = _fields(_described(was), _described(now))
        counts: dict[str, Sides] = {}
        if has_new_program:
            before, after = self._operations(0, old, was), self._operations(1, new, now)
            first, second = before.counts, after.counts
            has_new_program = before.digest != after.digest
            counts = {
                each: (first.get(each, 0), second.get(each, 0))
                for each in sorted({*first, *second})
                if first.get(each) != second.get(each)
            }
        if not (has_new_program or has_new_executable or fields):
            return None
        code: tuple[CodeSummary, CodeSummary] | None = None
        if has_new_executable and old.requirement.platform == "cpu":
            summaries = (
                self._summary(0, old, was.executable),
                self._summary(1, new, now.executable),
            )
            if summaries[0] is not None and summaries[1] is not None:
                code = (summaries[0], summaries[1])
        return ProgramDifference(
            now.name,
            name,
            counts,
            code,
            fields,
            (was.executable.size, now.executable.size),
            (was.memory.temp_bytes, now.memory.temp_bytes),
            has_new_program,
            has_new_executable,
        )

    def _operations(self, side: int, target: ReadTarget, entry: ProgramEntry) -> Operations:
        platform = target.requirement.platform
        known = entry.portable.raw_digest, platform
        if known not in self._read:
            content = self._sides[side].frame(target, PORTABLE_MEDIA_TYPE, entry.portable)
            self._read[known] = operations(content, entry.platforms or (), platform)
        return self._read[known]

    def _summary(self, side: int, target: ReadTarget, segment: Segment) -> CodeSummary | None:
        return summarize(self._sides[side].frame(target, EXECUTABLES_MEDIA_TYPE, segment))


def _programs(target: ReadTarget | None) -> dict[str, ProgramEntry]:
    return {} if target is None else {each.name: each for each in target.contents.config.programs}


def _described(entry: ProgramEntry) -> dict[str, Any]:
    """Return the entries of a program that callers and loaders see."""
    names = ("kind", "bucket", "arguments", "results", "arguments_tree", "results_tree", "static")
    more = ("weights", "mask", "pad", "open_sizes", "calls", "kernels", "settings", "state")
    return {name: getattr(entry, name) for name in (*names, *more)}


def _fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    return {
        name: (_text(before.get(name)), _text(after.get(name)))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    }


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _layers(old: ReadTarget, new: ReadTarget) -> dict[str, Sides]:
    """Return the layers that are no programs and differ: sizes before and after, 0 where there is none."""
    sides = []
    for each in (old, new):
        found: dict[str, tuple[list[str], int]] = {}
        for layer in each.contents.manifest.layers:
            digests, size = found.get(layer.mediaType, ([], 0))
            found[layer.mediaType] = sorted([*digests, layer.digest]), size + layer.size
        sides.append(found)
    before, after = sides
    return {
        name: (before.get(name, ([], 0))[1], after.get(name, ([], 0))[1])
        for name in sorted({*before, *after} - {EXECUTABLES_MEDIA_TYPE, PORTABLE_MEDIA_TYPE})
        if before.get(name) != after.get(name)
    }


def _note(found: dict[str, dict[str, Any]], name: str, values: dict[str, Any]) -> None:
    if values:
        found[name] = values
