"""A difference says what differs, and does not call harmless what is not."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from tests.recipes import export

from prejit.compiler.rebuilding.compared_parts import in_executables, in_programs, in_weights


def elf(content: bytes) -> bytes:
    """An object file without sections, but for their table, which is last."""
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 40, 64 + len(content))
    struct.pack_into("<HH", header, 58, 64, 1)
    return bytes(header) + content + bytes(64)


def serialized(*objects: bytes, tail: bytes = b"options") -> bytes:
    """Objects, each with its length before it, between other fields."""
    return b"head" + b"".join(bytes([66, len(each) % 128]) + each for each in objects) + tail


def test_kernels_in_another_order_are_harmless_and_other_kernels_are_not() -> None:
    a, b, c = elf(b"aa"), elf(b"bbbb"), elf(b"cc")
    swapped = in_executables(serialized(a, b), serialized(b, a))
    assert swapped.harmless
    assert swapped.text == "the same 2 kernels in another order"
    other = in_executables(serialized(a, b), serialized(c, b))
    assert not other.harmless
    assert other.text.startswith("1 of 2 kernels; ")
    assert not in_executables(serialized(a, b), serialized(b, a, tail=b"other!!")).harmless
    assert not in_executables(serialized(a, a), serialized(a)).harmless


def test_an_executable_without_objects_says_where_it_differs() -> None:
    found = in_executables(b"PTX: add", b"PTX: mul.")
    assert (found.text, found.harmless) == ("from byte 5; 8 -> 9 bytes", False)


def test_a_program_says_which_operations_differ() -> None:
    import jax
    import jax.numpy as jnp

    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    plain = export(lambda x: jnp.sin(x) * 2, x)
    more = export(lambda x: jnp.sin(jnp.sin(x)) * 2, x)
    other = export(lambda x: jnp.sin(x) * 3, x)
    assert in_programs(plain, more, (), "cpu").text == "stablehlo.sine 1 -> 2"
    assert "2.000000e+00" in in_programs(plain, other, (), "cpu").text


@pytest.mark.parametrize(
    ("after", "text", "harmless"),
    [
        ({"a": 1.0, "b": 3.0}, "1 of 2 tensors: b", False),
        ({"a": 1.0}, "1 of 2 tensors: b", False),
        ({"b": 2.0, "a": 1.0}, "the same tensors in another order or place", True),
    ],
)
def test_weights_name_the_tensors_that_differ(
    after: dict[str, float], text: str, harmless: bool
) -> None:
    def layer(values: dict[str, float], note: str) -> bytes:
        arrays: dict[str, Any] = {
            name: np.full(3, value, np.float32) for name, value in values.items()
        }
        return save(arrays, {"note": note})

    found = in_weights(layer({"a": 1.0, "b": 2.0}, "x"), layer(after, "longer"))
    assert (found.text, found.harmless) == (text, harmless)
