"""Summarize the machine code of an XLA:CPU executable: its size, the kinds of its instructions, its calls."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from prejit.compiler.compile.worker.disassembly import machine_code
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import BuildError

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
