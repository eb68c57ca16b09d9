"""A program that is loaded on a device, and the signature that XLA compiled it with."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from prejit.runtime.device import _jaxlib
from prejit.runtime.device.transfer import DeviceArray


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments and results of a compiled program on each device.

    Attributes:
        arguments, results: dtype and shape of each, in NumPy's names: `("float32", (2, 3))`.
        donated: numbers of the arguments whose memory it reuses.
    """

    arguments: tuple[tuple[str, tuple[int, ...]], ...]
    results: tuple[tuple[str, tuple[int, ...]], ...]
    donated: frozenset[int]


@final
class Executable:
    """A program loaded on a device or a mesh, ready to run.

    Attributes:
        loaded: jaxlib's executable.
    """

    def __init__(self, loaded: Any, assemble: Callable[[Any], list[DeviceArray]] | None) -> None:
        """Wrap an executable of jaxlib.

        Args:
            loaded: jaxlib's executable.
            assemble: makes arrays of its results; None: jaxlib makes them itself.
        """
        self.loaded = loaded
        # Not a method: an object that refers to itself would stay until Python's collector finds it.
        self.run: Callable[[Sequence[DeviceArray]], list[DeviceArray]] = (
            loaded.execute if assemble is None else _assembled(loaded.execute_sharded, assemble)
        )
        """Run the program: `run(sequence of DeviceArray) -> list of DeviceArray`, asynchronously.

        Donated arguments are deleted. The compiled program itself checks number and sizes.
        """

    def serialize(self) -> bytes:
        """Return the executable's bytes, for `Device.load` on the same kind of machine."""
        return bytes(self.loaded.serialize())

    def signature(self) -> Signature | None:
        """Return the arguments and results that XLA compiled; None: its plugin does not have them.

        Takes 0.3 ms for a program of 500 instructions.
        """
        head = _jaxlib.hlo_head(self.loaded)
        return None if head is None else _parse_signature(head)


def _assembled(
    execute: Callable[[Sequence[DeviceArray]], Any], assemble: Callable[[Any], list[DeviceArray]]
) -> Callable[[Sequence[DeviceArray]], list[DeviceArray]]:
    def run(arguments: Sequence[DeviceArray]) -> list[DeviceArray]:
        return assemble(execute(arguments))

    return run


_TOKENS = re.compile(r"([a-z]\w*)\[((?:\d{1,19}(?:,\d{1,19})*)?)\]|[{}]|->", re.ASCII)
_DONATED = re.compile(r"\((\d{1,19}), \{", re.ASCII)
_XLA_DTYPES = {
    **{"bool": "pred", "bfloat16": "bf16", "complex64": "c64", "complex128": "c128"},
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"s{bits}" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (1, 2, 4, 8, 16, 32, 64)},
}
_NUMPY_DTYPES = {xla: numpy for numpy, xla in _XLA_DTYPES.items()}
"""NumPy's names of dtypes by XLA's. All others follow one rule: `f8e4m3fn` is `float8_e4m3fn`."""


def _parse_signature(head: str) -> Signature | None:
    """Return the signature in the first line of a module's HLO text; None: the line has none.

    HloModule f, input_output_alias={ {0}: (2, {}, may-alias) }, buffer_donor={ (1, {}) },
        entry_computation_layout={(f32[2,3]{1,0}, s32[], f32[2]{0})->(f32[2]{0}, pred[])}
    """
    aliases, found, layout = head.partition(", entry_computation_layout={")
    if not found:
        return None
    sides: tuple[list[Any], list[Any]] = [], []
    depth, side = 1, 0
    for token in _TOKENS.finditer(layout):
        match token[0]:
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if not depth:
                    break
            case "->":
                side = 1
            case _ if depth == 1:
                dtype = _NUMPY_DTYPES.get(token[1]) or re.sub(r"^f(\d)(?=e)", r"float\1_", token[1])
                shape = tuple(map(int, token[2].split(","))) if token[2] else ()
                sides[side].append((dtype, shape))
    donated = frozenset(map(int, _DONATED.findall(aliases)))
    return Signature(tuple(sides[0]), tuple(sides[1]), donated)
