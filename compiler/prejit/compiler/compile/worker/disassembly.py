"""Find the CPU extensions that the instructions of an XLA:CPU executable use.

LLVM may use a list of extensions, and uses some of them. On jaxlib 0.10 the list has nearly all extensions of
the build host, so it does not show where the code runs.

A serialized executable of jaxlib 0.10 to 0.12 is two protobuf messages, the first with its length before it.
These fields are read:

    SerializedXlaExecutableMetadata       IFRT's: shardings, layouts
    ExecutableAndOptionsProto             xla/pjrt/proto/executable_metadata.proto
        1  CompilationResultProto         xla/service/cpu/executable.proto
            7  SymbolProto                each function that is called: {2: name}
            8  ObjFileProto               each ELF object: {1: contents}
            9  TargetMachineOptionsProto  {3: what LLVM may use: "+avx,+avx2,-xop"}
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

from prejit.compiler.compile.worker.protobuf import edit_protobuf, protobuf_fields, sort_protobuf
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
    result = _compilation_result(serialized)
    declared = _declared(result)
    try:
        objects = _objects(result)
        if len(objects) != serialized.count(_ELF):
            raise ValueError("an object outside the field of objects")
        names = [_fields(symbol)[2][0] for symbol in result.get(7, ())]
        contents = b"".join(objects)
        if not all(name + b"\0" in contents for name in names):  # as string tables hold them
            raise ValueError("a function that no object holds")
        return tuple(sorted(_needed_by(objects, declared)))
    except (ValueError, KeyError):
        return tuple(name for name in declared if name not in NEVER_CHOSEN)


def declared_features(serialized: bytes) -> tuple[str, ...]:
    """Return the extensions that LLVM could use in an XLA:CPU executable: keys of `CPU_FEATURES`, sorted."""
    return _declared(_compilation_result(serialized))


def narrowed(serialized: bytes, features: Sequence[str]) -> bytes:
    """Return an XLA:CPU executable that declares these extensions and no others.

    When XLA loads an executable, it logs an error for each declared extension that the machine lacks, even
    if the code does not use it.

    Raises:
        BuildError: the bytes are not such an executable.
    """
    try:
        header, program = split_executable(serialized)
        declared = ",".join(f"+{name}" for name in features).encode()
        return header + edit_protobuf(program, (1, 9), {3: declared})
    except ValueError as error:
        raise _not_an_executable(serialized) from error


def in_order(serialized: bytes) -> bytes:
    """Return an XLA:CPU executable with its objects sorted: the same bytes for the same objects.

    XLA writes objects in the order in which its threads finish them, and finds their functions by name.

    Raises:
        BuildError: the bytes are not such an executable.
    """
    try:
        header, program = split_executable(serialized)
        return header + sort_protobuf(program, (1,), 8)
    except ValueError as error:
        raise _not_an_executable(serialized) from error


def split_executable(serialized: bytes) -> tuple[bytes, bytes]:
    """Return the first message with its length before it, and the second."""
    _, header = next(protobuf_fields(b"\x0a" + serialized))
    assert isinstance(header, bytes)
    start = max(1, (len(header).bit_length() + 6) // 7) + len(header)  # its length is a varint
    return serialized[:start], serialized[start:]


def _compilation_result(serialized: bytes) -> Mapping[int, list[bytes]]:
    try:
        # The first message has a length before it and no tag: with one, both read as fields 1.
        _, result = _fields(b"\x0a" + serialized)[1]
        fields = _fields(result)
        _fields(fields[9][0])
        return fields
    except (ValueError, KeyError) as error:
        raise _not_an_executable(serialized) from error


def _not_an_executable(serialized: bytes) -> BuildError:
    return BuildError(
        "expected an executable of XLA:CPU as jaxlib 0.10 to 0.12 serialize it, found"
        f" {len(serialized)} bytes of another form",
        hint="a newer jaxlib may write executables in another form: build with jaxlib 0.10 to 0.12",
    )


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Return the strings, bytes and submessages of a protobuf message, by field number."""
    fields: dict[int, list[bytes]] = {}
    for number, value in protobuf_fields(message):
        if isinstance(value, bytes):
            fields.setdefault(number, []).append(value)
    return fields


def _declared(result: Mapping[int, list[bytes]]) -> tuple[str, ...]:
    [declared] = _fields(result[9][0]).get(3, [b""])
    signed = declared.decode(errors="replace").split(",")
    names = {name[1:] for name in signed if name.startswith("+")}
    return tuple(sorted(names & CPU_FEATURES.keys()))  # the others are tuning: `prefer-no-gather`


def _objects(result: Mapping[int, list[bytes]]) -> tuple[bytes, ...]:
    return tuple(_fields(file)[1][0] for file in result.get(8, ()))


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
    result = _compilation_result(serialized)
    code = [part for each in _objects(result) for part in _executable_sections(each)]
    names = (_fields(symbol)[2][0].decode("utf-8", "replace") for symbol in result.get(7, ()))
    return code, tuple(names)
