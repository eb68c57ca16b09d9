"""The programs of a bundle as text: StableHLO, HLO as XLA optimized it, and machine code.

All of it is read out of the bundle: nothing is compiled or run, so the target may be one of another machine.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from prejit.compiler.comparing.difference import ReadBundle, ReadTarget
from prejit.compiler.compile.stablehlo_contents import as_text
from prejit.compiler.compile.worker.xla_messages import message_bytes, read_executable
from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.device import _jax_parts
from prejit.runtime.errors import BuildError, UsageError
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.checks.elf import read_sections
from prejit.runtime.format.names import EXECUTABLES_MEDIA_TYPE, PORTABLE_MEDIA_TYPE
from prejit.runtime.machine.compare import compare, preference
from prejit.runtime.machine.fingerprint import Fingerprint

_SHT_SYMTAB, _STT_FUNC = 2, 2


def find_target(bundle: ReadBundle, name: str | None) -> ReadTarget:
    """Return a target by its name; None: the one that this machine loads, or else the first.

    Raises:
        UsageError: the bundle has no such target, or its programs were recorded.
    """
    targets = list(bundle.targets.values())
    if name is None:
        here = Fingerprint.current()
        fitting = [each for each in targets if compare(each.name, each.requirement, here).matches]
        key = lambda each: preference(each.requirement, here)  # noqa: E731
        found = min(fitting, key=key, default=targets[0])
    elif name in bundle.targets:
        found = bundle.targets[name]
    else:
        raise UsageError(
            f"{bundle.path}: expected a target, found {name!r}{did_you_mean(name, bundle.targets)}",
            hint=f"its targets are: {', '.join(bundle.targets)}",
        )
    if found.contents.config.recorded is not None:
        raise UsageError(
            f"{bundle.path}: expected programs that `prejit build` compiled, found recorded ones",
            hint="a recorded program is in the form of jax's cache, which only jax reads",
        )
    return found


def find_program(bundle: ReadBundle, target: ReadTarget, name: str) -> ProgramEntry:
    """Return a program of a target by its name.

    Raises:
        UsageError: there is none.
    """
    programs = {each.name: each for each in target.contents.config.programs}
    if name not in programs:
        raise UsageError(
            f"{bundle.path}: expected a program of {target.name}, found {name!r}"
            f"{did_you_mean(name, programs)}",
            hint="`prejit inspect BUNDLE` lists them",
        )
    return programs[name]


def stablehlo(bundle: ReadBundle, target: ReadTarget, program: ProgramEntry) -> str:
    """Return a portable program, for the platform of a target, as MLIR."""
    content = bundle.frame(target, PORTABLE_MEDIA_TYPE, program.portable)
    return as_text(content, program.platforms or (), target.requirement.platform)


def optimized_hlo(bundle: ReadBundle, target: ReadTarget, program: ProgramEntry) -> str:
    """Return the HLO of an executable, as XLA optimized it.

    Raises:
        UsageError: it is not an executable of XLA:CPU.
    """
    with _reading(bundle, program):
        serialized = _serialized(bundle, target, program)
        module = _jax_parts.kept_hlo(serialized)
        if module is None:  # a build before decision 0138
            whole = read_executable(serialized)[1].result.hlo.module
            module = _jax_parts.parse_hlo(message_bytes(whole))
        return str(module.to_string())


def assembly(bundle: ReadBundle, target: ReadTarget, program: ProgramEntry) -> str:
    """Return the machine code of an executable, function by function, in Intel's syntax.

    Raises:
        UsageError: it is not an executable of XLA:CPU for x86-64.
    """
    if target.requirement.architecture != "x86_64":
        raise UsageError(
            f"{bundle.path}: expected a target for x86_64, found {target.name} for "
            f"{target.requirement.architecture}",
            hint="--hlo and --stablehlo show the programs of every architecture",
        )
    with _reading(bundle, program):
        objects = read_executable(_serialized(bundle, target, program))[1].result.objects
        return "\n".join(line for each in objects for line in _disassembled(each.content))


@contextmanager
def _reading(bundle: ReadBundle, program: ProgramEntry) -> Iterator[None]:
    """Turn the errors of bytes that have another form than an executable's into one that names it."""
    try:
        yield
    except (BuildError, ValueError, IndexError, struct.error) as error:
        raise UsageError(
            f"{bundle.path}: {program.name}: expected an executable of XLA:CPU as jaxlib 0.10 to 0.12 "
            f"serialize it, found another form: {error}",
            hint="--stablehlo shows the programs of every version",
        ) from error


def _serialized(bundle: ReadBundle, target: ReadTarget, program: ProgramEntry) -> bytes:
    platform = target.requirement.platform
    if platform != "cpu":
        raise UsageError(
            f"{bundle.path}: expected a target for CPUs, found {target.name} for {platform}",
            hint="--stablehlo shows the programs of every platform",
        )
    return bundle.frame(target, EXECUTABLES_MEDIA_TYPE, program.executable)


def _disassembled(content: bytes) -> Iterator[str]:
    """Yield the functions of an ELF object: a line for the name of each, and one for each instruction."""
    import iced_x86

    formatter = iced_x86.Formatter(iced_x86.FormatterSyntax.INTEL)
    sections = read_sections(content)
    for table in (each for each in sections if each.kind == _SHT_SYMTAB):
        names = bytes(sections[table.strings].content)
        for name, info, _, place, start, size in struct.iter_unpack("<IBBHQQ", table.content):
            if info & 15 != _STT_FUNC or not 0 < place < len(sections):
                continue
            yield f"{names[name : names.index(0, name)].decode('utf-8', 'replace')}:"
            code = bytes(sections[place].content[start : start + size])
            for each in iced_x86.Decoder(64, code, ip=start):
                yield f"{each.ip:8x}  {formatter.format(each)}"
            yield ""
