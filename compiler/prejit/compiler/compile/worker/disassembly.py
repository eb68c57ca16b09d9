"""Read the machine code of an XLA:CPU executable: the CPU extensions that it needs, and a summary.

LLVM may use a list of extensions, and uses some of them. On jaxlib 0.10 the list has nearly all extensions of
the build host, so it does not show where the code runs.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prejit.compiler.compile.worker.xla_messages import (
    Message,
    message_bytes,
    read_executable,
    replace_messages,
)
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import BuildError
from prejit.runtime.format.checks.elf import read_sections
from prejit.runtime.machine.fingerprint import CPU_FEATURES

LLVM_NAMES = {
    name: name.lower().replace("_", "")
    for name in """
    ADX AES AVX AVX2 AVX512BW AVX512CD AVX512DQ AVX512F AVX512VL AVX512_BF16 AVX512_BITALG
    AVX512_FP16 AVX512_IFMA AVX512_VBMI AVX512_VBMI2 AVX512_VNNI AVX512_VP2INTERSECT
    AVX512_VPOPCNTDQ AVX_IFMA AVX_NE_CONVERT AVX_VNNI AVX_VNNI_INT16 AVX_VNNI_INT8 BMI2 CLFLUSHOPT
    CLWB CLZERO CMOV CMPCCXADD CX8 F16C FMA FMA4 FSGSBASE FXSR GFNI INVPCID LZCNT MMX MOVBE
    MOVDIR64B MOVDIRI POPCNT RDPID RDSEED SERIALIZE SHA SSE SSE2 SSE3 SSE4A SSSE3 TBM VAES
    VPCLMULQDQ WAITPKG XOP XSAVE XSAVEC XSAVEOPT XSAVES
    """.split()  # noqa: SIM905 (a list of them has a line for each)
} | {
    "AMX_BF16": "amx-bf16",
    "AMX_COMPLEX": "amx-complex",
    "AMX_FP16": "amx-fp16",
    "AMX_INT8": "amx-int8",
    "AMX_TILE": "amx-tile",
    "BMI1": "bmi",
    "CMPXCHG16B": "cx16",
    "PCLMULQDQ": "pclmul",
    "PREFETCHW": "prfchw",
    "RDRAND": "rdrnd",
    "SSE4_1": "sse4.1",
    "SSE4_2": "sse4.2",  # with `crc32`, which LLVM counts apart
    "X64": "64bit",
}
"""Names of CPU extensions: LLVM's by iced's."""

EVERYWHERE = frozenset(
    # Some run as a no-operation: `endbr64`, `pause`.
    {
        *("CET_IBT", "CLFSH", "CPUID", "FPU", "FPU287", "FPU387", "MULTIBYTENOP", "PAUSE", "TSC"),
        *("INTEL186", "INTEL286", "INTEL386", "INTEL486", "INTEL8086"),
    }
)
"""iced's CpuidFeatures that every x86-64 processor has. LLVM uses no others of its own accord."""

NEVER_CHOSEN = ("rdrnd", "rdseed")
"""Extensions whose instructions LLVM uses only where a program asks for random numbers, and XLA never does.

LLVM asks the CPU for its extensions. Linux hides these two on CPUs where they are broken, such as `rdseed`
on AMD's Zen 5: a requirement that lists one would not fit the machine that built it."""
_ELF = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_EM_X86_64 = 62
_SHF_EXECINSTR = 4
_SHT_NOBITS = 8


def used_features(serialized: bytes) -> tuple[str, ...]:
    """Return the extensions that the instructions of an XLA:CPU executable need.

    Where the code cannot be read with certainty (another architecture, an extension newer than the
    disassembler, an object in an unknown place), return `declared_features` without `NEVER_CHOSEN`.

    Returns:
        Keys of `CPU_FEATURES`, sorted.

    Raises:
        BuildError: the bytes are not such an executable.
    """
    result = read_executable(serialized)[1].result
    declared = _declared(result)
    try:
        objects = [each.content for each in result.objects]
        if len(objects) != serialized.count(_ELF):
            raise ValueError("an object outside the field of objects")
        contents = b"".join(objects)
        names = (each.name.encode() for each in result.symbols)
        if not all(name + b"\0" in contents for name in names):  # as string tables hold them
            raise ValueError("a function that no object holds")
        return tuple(sorted(_needed_by(objects, declared)))
    except (ValueError, KeyError):
        return tuple(name for name in declared if name not in NEVER_CHOSEN)


def declared_features(serialized: bytes) -> tuple[str, ...]:
    """Return the extensions that LLVM could use in an XLA:CPU executable: keys of `CPU_FEATURES`, sorted."""
    return _declared(read_executable(serialized)[1].result)


def narrowed(serialized: bytes, features: Sequence[str]) -> bytes:
    """Return an XLA:CPU executable that declares these extensions and no others, with its objects sorted.

    When XLA loads an executable, it logs an error for each declared extension that the machine lacks, even
    if the code does not use it. It writes objects in the order in which its threads finish them, and finds
    their functions by name: sorted, the same objects give the same bytes.

    Raises:
        BuildError: the bytes are not such an executable.
    """
    header, executable = read_executable(serialized)
    executable.result.machine.features = ",".join(f"+{name}" for name in features)
    objects = sorted(executable.result.objects, key=message_bytes)
    replace_messages(executable.result.objects, objects)
    return header + message_bytes(executable)


def _declared(result: Message) -> tuple[str, ...]:
    names = {each[1:] for each in result.machine.features.split(",") if each.startswith("+")}
    return tuple(sorted(names & CPU_FEATURES.keys()))  # the others are tuning: `prefer-no-gather`


def _needed_by(objects: Sequence[bytes], declared: Sequence[str]) -> set[str]:
    """Return the extensions that the instructions of objects need, in LLVM's names."""
    import iced_x86

    seen: dict[int, iced_x86.Instruction] = {}
    for contents in objects:
        for section in _executable_sections(contents):
            seen.update((found.code, found) for found in iced_x86.Decoder(64, section))
    code = iced_x86.Code
    if code.INVALID in seen:
        raise ValueError("bytes that are no instruction")
    needed = set[str]()
    if seen.keys() & {code.LAHF, code.SAHF}:
        needed.add("sahf")  # iced calls them 8086; the first x86-64 processors lack them
    if "bmi" not in declared:
        # For a processor without `tzcnt`, LLVM writes `rep bsf` where the result is the same: its bytes are
        # those of `tzcnt`, which newer processors run faster (llvm/lib/Target/X86/X86MCInstLower.cpp).
        for same in (code.TZCNT_R16_RM16, code.TZCNT_R32_RM32, code.TZCNT_R64_RM64):
            seen.pop(same, None)
    names = {value: name for name, value in vars(iced_x86.CpuidFeature).items() if name.isupper()}
    of_iced = {names[value] for found in seen.values() for value in found.cpuid_features()}
    if unknown := of_iced - LLVM_NAMES.keys() - EVERYWHERE:
        raise ValueError(f"instructions that LLVM does not choose: {unknown}")
    return needed | {LLVM_NAMES[name] for name in of_iced - EVERYWHERE}


def _executable_sections(contents: bytes) -> Iterator[bytes]:
    """Yield the sections of an ELF object that hold instructions."""
    sections = read_sections(contents)
    (machine,) = struct.unpack_from("<H", contents, 18)
    if machine != _EM_X86_64 or not sections:
        raise ValueError("not a whole object for x86-64")
    for section in sections:
        if section.flags & _SHF_EXECINSTR and section.kind != _SHT_NOBITS:
            if len(section.content) < section.size:
                raise ValueError("not a whole section")
            yield bytes(section.content)


def machine_code(serialized: bytes) -> tuple[list[bytes], tuple[str, ...]]:
    """Return the sections of an XLA:CPU executable that hold instructions, and its functions that XLA calls.

    Raises:
        BuildError: the bytes are not such an executable.
        ValueError, KeyError: its code is not for x86-64, or not whole.
    """
    result = read_executable(serialized)[1].result
    code = [part for each in result.objects for part in _executable_sections(each.content)]
    names = (each.name for each in result.symbols)
    return code, tuple(names)


_HANDLER = re.compile(rb"\bprejit_\w+")
_LIBRARY_DIGITS = re.compile(r"_[0-9a-f]{16}$")
_WIDTHS = {64: "512-bit vectors", 32: "256-bit vectors", 16: "128-bit vectors"}
"""Names of instructions by the largest register that they name, in bytes."""
_MULTIPLY_ADD = ("VFMADD", "VFMSUB", "VFNMADD", "VFNMSUB", "VDPBF16", "VPDPBUSD", "TDP")
"""Beginnings of iced's names of instructions that multiply and add."""


@dataclass(frozen=True, slots=True)
class CodeSummary:
    """The machine code of an executable.

    Attributes:
        digest: digest of all instructions, whatever the order of the functions.
        code_bytes: size of all instructions.
        functions: number of functions that XLA calls.
        instructions: number of instructions by kind; one that multiplies and adds counts twice.
        kernels: the native kernels that it calls, without the digest of their library.
    """

    digest: str
    code_bytes: int
    functions: int
    instructions: dict[str, int]
    kernels: tuple[str, ...]


def summarize(serialized: bytes) -> CodeSummary | None:
    """Return the summary of an executable; None: it is none of XLA:CPU for x86-64."""
    try:
        code, functions = machine_code(serialized)
    except (BuildError, ValueError, KeyError):
        return None
    names = {_LIBRARY_DIGITS.sub("", found.decode()) for found in _HANDLER.findall(serialized)}
    digest = digest_of("".join(sorted(map(digest_of, code))).encode())
    return CodeSummary(
        digest, sum(map(len, code)), len(functions), _instructions(code), tuple(sorted(names))
    )


def _instructions(code: list[bytes]) -> dict[str, int]:
    import iced_x86

    sizes = {
        value: iced_x86.RegisterInfo(value).size
        for name, value in vars(iced_x86.Register).items()
        if name.isupper() and name != "NONE" and not name.startswith("DONTUSE")
    }
    adds = {
        value
        for name, value in vars(iced_x86.Mnemonic).items()
        if name.isupper() and name.startswith(_MULTIPLY_ADD)
    }
    flow, is_register = iced_x86.FlowControl, iced_x86.OpKind.REGISTER
    kinds: dict[int, str] = {}  # by iced's code, which decides form and registers of an instruction
    found: Counter[str] = Counter()
    for section in code:
        for each in iced_x86.Decoder(64, section):
            kind = kinds.get(each.code)
            if kind is None:
                registers = (
                    sizes.get(each.op_register(n), 0)
                    for n in range(each.op_count)
                    if each.op_kind(n) == is_register
                )
                kind = _WIDTHS.get(max(registers, default=0), "scalar")
                if each.flow_control in (flow.CALL, flow.INDIRECT_CALL):
                    kind = "calls"
                elif each.flow_control != flow.NEXT:
                    kind = "branches"
                kinds[each.code] = kind
            found[kind] += 1
            if each.mnemonic in adds:
                found["multiply-add"] += 1
    return dict(sorted(found.items()))
