"""Compare two builds of a bundle part by part, and explain what differs.

    layers      weights, tokenizer, kernels, ...: each by its digest
    StableHLO   each program
    executable  each program for each target
    table       the config of each target, without what the other parts decide

A difference is explained by what decides the part: another StableHLO makes another executable, and so does
another version of jaxlib or another CPU. What nothing explains is a finding. Kernels that differ always are
one: they are code that no other part of the bundle can be compared with. What is known of the cause, such as
another compiler, is said with it.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prejit.compiler.rebuilding.build_record import Recorded
from prejit.runtime.base.files import Content
from prejit.runtime.base.wording import few, shortened
from prejit.runtime.device.portable import stablehlo_module
from prejit.runtime.format.blobs import Layer, read_whole
from prejit.runtime.format.bundle_schema import Config, Descriptor, Kernels, ProgramEntry, Segment
from prejit.runtime.format.checks.elf import read_sections
from prejit.runtime.format.checks.oci import check_digest
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    EXECUTABLES_MEDIA_TYPE,
    KERNELS_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    TITLE,
    WEIGHTS_MEDIA_TYPE,
    handler_target,
)
from prejit.runtime.format.root import Root

_ELF = b"\x7fELF\x02\x01"
"""The first bytes of a 64-bit little-endian object file."""
_EXECUTABLE = 4
"""The flag of sections that hold code, SHF_EXECINSTR."""
_OPERATION = re.compile(r"\b(?:stablehlo|chlo|mhlo|sdy)\.[a-z_0-9]+")
_SHOWN = 6
"""Maximum number of operations or tensors in a description."""
_LINE_CHARACTERS = 100
"""Maximum length of a line of StableHLO in a description."""


@dataclass(frozen=True)
class PartDifference:
    """How two versions of a part differ."""

    text: str
    harmless: bool = False


def in_programs(old: bytes, new: bytes, platforms: Sequence[str], platform: str) -> PartDifference:
    """Return how two portable programs differ: by their operations, or by the first line that differs."""
    texts = []
    for portable in (old, new):
        module = stablehlo_module(portable, platforms, platform)
        texts.append(module.operation.get_asm(large_elements_limit=16))
    counts = [Counter(_OPERATION.findall(text)) for text in texts]
    names = sorted(name for name in {*counts[0], *counts[1]} if counts[0][name] != counts[1][name])
    if names:
        shown = [f"{name} {counts[0][name]} -> {counts[1][name]}" for name in names[:_SHOWN]]
        more = f" and {len(names) - _SHOWN} more operations" if len(names) > _SHOWN else ""
        return PartDifference(f"{', '.join(shown)}{more}")
    lines = [text.splitlines() for text in texts]
    for before, after in zip(*lines, strict=False):
        if before != after:
            both = [line.strip()[:_LINE_CHARACTERS] for line in (before, after)]
            return PartDifference(f"the same operations, another line: {both[0]!r} -> {both[1]!r}")
    return PartDifference(
        "the same text: other large constants, or another version of its encoding"
    )


def in_executables(old: bytes, new: bytes) -> PartDifference:
    """Return how two executables differ: by the object files in them, or by their first byte that differs."""
    objects, rest = zip(*map(_split, (old, new)), strict=True)
    if any(objects):
        counts = [Counter(each) for each in objects]
        # The lengths between the objects move with them: without order they are the same bytes.
        if counts[0] == counts[1] and Counter(rest[0]) == Counter(rest[1]):
            return PartDifference(
                f"the same {len(objects[0])} kernels in another order", harmless=True
            )
        if counts[0] == counts[1]:
            return PartDifference(f"the same {len(objects[0])} kernels with another description")
        differing = sum((counts[0] - counts[1]).values())
        return PartDifference(
            f"{differing} of {len(objects[0])} kernels; {len(old)} -> {len(new)} bytes"
        )
    pairs = enumerate(zip(old, new, strict=False))
    place = next((at for at, (a, b) in pairs if a != b), min(len(old), len(new)))
    return PartDifference(f"from byte {place}; {len(old)} -> {len(new)} bytes")


def in_libraries(old: bytes, new: bytes) -> PartDifference:
    """Return how two libraries of kernels differ: whether in code, and in how many sections."""
    sizes = f"{len(old)} -> {len(new)} bytes"
    try:
        sections = [read_sections(each) for each in (old, new)]
    except ValueError as error:
        return PartDifference(f"{sizes}; {error}")
    if len(sections[0]) != len(sections[1]):
        return PartDifference(f"{len(sections[0])} -> {len(sections[1])} sections; {sizes}")
    pairs = [pair for pair in zip(*sections, strict=True) if pair[0].content != pair[1].content]
    code = any(section.flags & _EXECUTABLE for pair in pairs for section in pair)
    which = ", code among them" if code else ", and no code"
    return PartDifference(f"{len(pairs)} of {len(sections[0])} sections{which}; {sizes}")


def in_weights(old: Content, new: Content) -> PartDifference:
    """Return how two weights layers differ: by the tensors that do."""
    headers = [_header(each) for each in (old, new)]
    names = [*dict.fromkeys((*headers[0], *headers[1]))]
    differing = [
        name for name in names if _tensor(old, headers[0], name) != _tensor(new, headers[1], name)
    ]
    if not differing:
        return PartDifference("the same tensors in another order or place", harmless=True)
    return PartDifference(f"{len(differing)} of {len(names)} tensors: {few(differing, _SHOWN)}")


def _split(executable: bytes) -> tuple[list[bytes], bytes]:
    """Return the object files in an executable, and the other bytes."""
    objects, rest, done = [], bytearray(), 0
    for start, end in _places(executable):
        rest += executable[done:start]
        objects.append(executable[start:end])
        done = end
    rest += executable[done:]
    return objects, bytes(rest)


def _places(executable: bytes) -> Iterator[tuple[int, int]]:
    """Yield where object files start and end. In those that LLVM writes, the table of sections is last."""
    start = executable.find(_ELF)
    while start >= 0:
        end = start + len(_ELF)
        if start + 64 <= len(executable):
            (table,) = struct.unpack_from("<Q", executable, start + 40)
            size, count = struct.unpack_from("<HH", executable, start + 58)
            if start + table + size * count <= len(executable):
                end = max(end, start + table + size * count)
        yield start, end
        start = executable.find(_ELF, end)


def _header(weights: Content) -> dict[str, Any]:
    size = int.from_bytes(bytes(weights[:8]), "little")
    found: dict[str, Any] = json.loads(bytes(weights[8 : 8 + size]))
    found.pop("__metadata__", None)
    return found


def _tensor(weights: Content, header: Mapping[str, Any], name: str) -> object:
    """Return what a tensor is: its dtype, its shape and its values."""
    if name not in header:
        return None
    start, end = header[name]["data_offsets"]
    base = 8 + int.from_bytes(bytes(weights[:8]), "little")
    return header[name]["dtype"], header[name]["shape"], bytes(weights[base + start : base + end])


Verdict = Literal["equal", "explained", "differs"]

_SEGMENTS = ("executable", "portable", "symbolic")
_MEASURED = ("cost_microseconds", "accuracy", "forms")
"""Fields of tables that hold measurements. They differ from build to build."""
_SHORT = 40
"""Maximum length of a value in a reason."""
_LONG = 400
"""Maximum length of a value that decides kernels: compilers and their flags."""


@dataclass(frozen=True)
class ComparedPart:
    """A part of a bundle, compared.

    Attributes:
        kind: `weights.safetensors` and other files, `StableHLO`, `executable`, `table`.
        name: name of the program; empty for what belongs to all.
        target: name of the target; empty for what all targets share.
        verdict: `equal`; `explained`: it differs, and the reason says why; `differs`: a finding.
        detail: how it differs.
        reason: why it differs, if it is explained.
    """

    kind: str
    name: str
    target: str
    verdict: Verdict
    detail: str = ""
    reason: str = ""


def compare(old: Recorded, new: Recorded) -> tuple[ComparedPart, ...]:
    """Return all parts of a bundle, each compared with its rebuild."""
    return _Comparison(old, new).parts()


class _Comparison:
    def __init__(self, old: Recorded, new: Recorded) -> None:
        self._old = old
        self._new = new
        self._tracing = _changes(old.tracing, new.tracing)

    def parts(self) -> tuple[ComparedPart, ...]:
        layers = [*self._layers()]
        programs = [*self._programs()]
        found = [*layers, *programs]
        changed = {each.name: each for each in programs if each.verdict != "equal"}
        for name in self._old.targets:
            if name in self._new.targets:
                executables = [*self._executables(name, changed)]
                found += executables
                found.append(self._table(name, executables))
            else:
                found.append(
                    ComparedPart("table", "", name, "differs", "the rebuild has no such target")
                )
        return tuple(found)

    def _layers(self) -> Iterator[ComparedPart]:
        """Yield the layers except packs of programs: those that all targets have once."""
        done = set[tuple[str, str, str]]()
        for target, contents in self._old.targets.items():
            if target not in self._new.targets:
                continue
            after = _by_title(self._new.targets[target].manifest.layers)
            for title, layer in _by_title(contents.manifest.layers).items():
                own = target if layer.mediaType == KERNELS_MEDIA_TYPE else ""
                if (title, layer.digest, own) in done:
                    continue
                done.add((title, layer.digest, own))
                yield self._layer(title, own, layer, after.pop(title, None), target)
            for title in after.keys() - _by_title(contents.manifest.layers).keys():
                yield ComparedPart(title, "", "", "differs", "only the rebuild has it")

    def _layer(
        self, title: str, own: str, before: Descriptor, after: Descriptor | None, target: str
    ) -> ComparedPart:
        if after is None:
            missing = "the rebuild has none"
            if before.mediaType == KERNELS_MEDIA_TYPE:
                by = self._kernels(target)[0].compiler
                missing += f", which {by} made there: no C++ compiler made them here"
            return ComparedPart(title, "", own, "differs", missing)
        if before.digest == after.digest:
            return ComparedPart(title, "", own, "equal")
        found = PartDifference(f"{before.size} -> {after.size} bytes")
        changes: list[str] = []
        if before.mediaType == WEIGHTS_MEDIA_TYPE:
            found = in_weights(_mapped(self._old, before), _mapped(self._new, after))
            changes = self._tracing
        elif before.mediaType == KERNELS_MEDIA_TYPE:
            libraries = [bytes(_mapped(self._old, before)), bytes(_mapped(self._new, after))]
            found = in_libraries(*libraries)
            causes = "; ".join(self._kernel_changes(target))
            causes = (
                causes or "by what is recorded, the same compiler made them of the same sources"
            )
            found = PartDifference(f"{found.text}; {causes}")
        return _judged(title, "", own, found, changes)

    def _kernel_changes(self, target: str) -> list[str]:
        """Return what decided the kernels of a target and is different now."""
        before, now = ({"compiler": each.compiler} for each in self._kernels(target))
        # Else its build did not have the compiler that made them.
        if old := self._old.kernels.get(target):
            before, now = before | {**old}, now | {**self._new.kernels.get(target, {})}
        return _changes(before, now, short=_LONG)

    def _kernels(self, target: str) -> tuple[Kernels, Kernels]:
        """Return the kernels that a target has in both bundles; empty texts: none."""
        none = Kernels("", "", "", ())
        old, new = (each.targets[target].config.kernels or none for each in (self._old, self._new))
        return old, new

    def _programs(self) -> Iterator[ComparedPart]:
        """Yield the portable programs. All targets share them."""
        target, contents = next(iter(self._old.targets.items()))
        if target not in self._new.targets:
            return
        after = {each.name: each for each in self._new.targets[target].config.programs}
        for before in contents.config.programs:
            now = after.get(before.name)
            if now is None:
                yield ComparedPart("StableHLO", before.name, "", "differs", "the rebuild has none")
                continue
            found = self._program(before, now, target, contents.config)
            if found is None:
                yield ComparedPart("StableHLO", before.name, "", "equal")
            else:
                yield _judged("StableHLO", before.name, "", found, self._tracing)
        before_names = {each.name for each in contents.config.programs}
        for name in after.keys() - before_names:
            yield ComparedPart("StableHLO", name, "", "differs", "only the rebuild has it")

    def _program(
        self, before: ProgramEntry, now: ProgramEntry, target: str, config: Config
    ) -> PartDifference | None:
        for old, new in ((before.portable, now.portable), (before.symbolic, now.symbolic)):
            if old is None or new is None:
                if old is not new:
                    return PartDifference("the program for any size is in one of them alone")
            elif old.raw_digest != new.raw_digest:
                contents = [
                    _frame(each, target, PORTABLE_MEDIA_TYPE, segment)
                    for each, segment in ((self._old, old), (self._new, new))
                ]
                return in_programs(
                    contents[0], contents[1], before.platforms or (), config.requirement.platform
                )
        return None

    def _executables(
        self, target: str, changed: Mapping[str, ComparedPart]
    ) -> Iterator[ComparedPart]:
        after = {each.name: each for each in self._new.targets[target].config.programs}
        changes = self._compiling_changes(target)
        library, other = (each.digest for each in self._kernels(target))
        for before in self._old.targets[target].config.programs:
            now = after.get(before.name)
            if now is None:
                yield ComparedPart(
                    "executable", before.name, target, "differs", "the rebuild has none"
                )
                continue
            if before.executable.raw_digest == now.executable.raw_digest:
                yield ComparedPart("executable", before.name, target, "equal")
                continue
            old, new = (
                _frame(each, target, EXECUTABLES_MEDIA_TYPE, program.executable)
                for each, program in ((self._old, before), (self._new, now))
            )
            calls_other = bool(before.kernels or now.kernels) and library != other
            if calls_other and library and other:
                # The names of kernels that it would have with the old library.
                new_names = handler_target("", other).encode()
                new = new.replace(new_names, handler_target("", library).encode())
            if old == new:
                found = PartDifference("the same, with another library of kernels", harmless=True)
            else:
                found = in_executables(old, new)
            reasons = [*changes]
            if calls_other and not (before.kernels and now.kernels):
                reasons.append("one of the two calls kernels")
            if (program := changed.get(before.name)) is not None:
                # It is a finding where its program is one.
                reasons = ["its StableHLO differs"] if program.verdict == "explained" else []
            yield _judged("executable", before.name, target, found, reasons)

    def _table(self, target: str, executables: Iterable[ComparedPart]) -> ComparedPart:
        tables = [_flat(_plain(each.targets[target].config)) for each in (self._old, self._new)]
        names = sorted(
            name for name in {*tables[0], *tables[1]} if tables[0].get(name) != tables[1].get(name)
        )
        if not names:
            return ComparedPart("table", "", target, "equal")
        follows = any(each.verdict != "equal" for each in executables)
        measured = [name for name in names if not {*name.split(".")}.isdisjoint(_MEASURED)]
        others = [name for name in names if name not in measured]
        shown = [
            f"{name}: {_short(tables[0].get(name))} -> {_short(tables[1].get(name))}"
            for name in (others or measured)[:4]
        ]
        detail = "; ".join(shown) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        if not others:
            return ComparedPart("table", "", target, "explained", detail, "measured again")
        if follows:
            return ComparedPart("table", "", target, "explained", detail, "its executables differ")
        changes = self._compiling_changes(target) + self._tracing
        return _judged("table", "", target, PartDifference(detail), changes)

    def _compiling_changes(self, target: str) -> list[str]:
        return _changes(self._old.compiling[target], self._new.compiling[target])


def _judged(
    kind: str, name: str, target: str, found: PartDifference, changes: Iterable[str]
) -> ComparedPart:
    reason = "; ".join(changes)
    if found.harmless:
        return ComparedPart(kind, name, target, "explained", found.text, found.text)
    return ComparedPart(
        kind, name, target, "explained" if reason else "differs", found.text, reason
    )


def _changes(before: Mapping[str, str], after: Mapping[str, str], short: int = _SHORT) -> list[str]:
    """Return what decided the old part and is different now."""
    return [
        f"{name} {_short(before.get(name, 'none'), short)} there, "
        f"{_short(after.get(name, 'none'), short)} here"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


def _plain(config: Config) -> dict[str, Any]:
    """Return a config without what other parts show: places and digests of contents."""
    found = asdict(config)
    found.pop("chunks")
    found["kernels"] = None if config.kernels is None else {**asdict(config.kernels), "digest": ""}
    found["programs"] = {each["name"]: each for each in found["programs"]}
    for program in found["programs"].values():
        for name in _SEGMENTS:
            program.pop(name)
    # Only the form counts: the figures beside it are of another measurement.
    found["chosen"] = {each["product"]: each["form"] for each in found["forms"] or ()}
    return found


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    found: dict[str, Any] = {}
    for key, each in value.items():
        found |= _flat(each, f"{name}.{key}" if name else str(key))
    return found


def _short(value: object, most: int = _SHORT) -> str:
    text = str(value) or "''"
    if text.startswith("sha256:"):
        return text[:19]
    return shortened(text, most)


def _by_title(layers: Iterable[Descriptor]) -> dict[str, Descriptor]:
    packs = (EXECUTABLES_MEDIA_TYPE, PORTABLE_MEDIA_TYPE)
    return {
        (each.annotations or {}).get(TITLE, each.mediaType): each
        for each in layers
        if each.mediaType not in packs
    }


def _frame(recorded: Recorded, target: str, media_type: str, segment: Segment) -> bytes:
    """Return a program of a pack, whole and checked."""
    at = recorded.targets[target].manifest.layer(media_type)

    def read(layout: Layout, root: Root) -> bytes:
        return Layer.in_layout(layout, at).unpack(segment)

    return read_whole(recorded.path, read)


def _mapped(recorded: Recorded, at: Descriptor) -> Content:
    """Return a layer, whole and checked."""

    def read(layout: Layout, root: Root) -> Content:
        layer = Layer.in_layout(layout, at)
        check_digest(memoryview(layer.content), at.digest, layer.path)
        return layer.content

    return read_whole(recorded.path, read)
