"""What differs is a finding, its cause is named, and nothing is called harmless that is not."""

import dataclasses
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zstandard
from safetensors.numpy import save
from tests.kernel_bundles import with_library
from tests.recipes import export, framed

from prejit.compiler.rebuilding.build_record import Recorded
from prejit.compiler.rebuilding.compared_parts import (
    PartDifference,
    compare,
    in_executables,
    in_programs,
    in_weights,
)
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.checks.elf import read_sections
from prejit.runtime.format.names import EXECUTABLES_MEDIA_TYPE, KERNELS_MEDIA_TYPE
from prejit.runtime.format.opening import match, read_contents
from prejit.runtime.machine.fingerprint import Fingerprint

CONDITIONS = {
    "compiler": "g++ (Debian 12.2.0-14) 12.2.0; glibc 2.36",
    "flags": "-O3 -march=x86-64-v2",
    "source toy.cc": "sha256:" + "1" * 64,
}


def recorded(recipe, at, kernels=CONDITIONS):
    path = recipe.write(at)

    def read(layout, root):
        targets = match(root, Fingerprint.current())
        return {each.name: read_contents(layout, each) for each in targets}

    contents, same = read_whole(path, read), {"jaxlib": "0.12.0"}
    versions, conditions = dict.fromkeys(contents, same), dict.fromkeys(contents, kernels)
    return Recorded(path, "", contents, "m.toml", "", (), same, versions, conditions)


def found_in(old, new):
    """The compared parts by their kind."""
    return {each.kind: each for each in compare(old, new)}


@pytest.fixture
def old(kernel_recipe, tmp_path):
    return recorded(kernel_recipe, tmp_path / "old")


def test_equal_kernels_are_equal_and_none_are_explained(kernel_recipe, old, tmp_path):
    new = recorded(kernel_recipe, tmp_path / "new", {**CONDITIONS, "flags": "-O2"})
    assert {each.verdict for each in compare(old, new)} == {"equal"}

    def without(config):
        [program] = config.programs
        program = dataclasses.replace(program, kernels=None)
        return dataclasses.replace(config, kernels=None, programs=(program,))

    bare = kernel_recipe.configured(without).layered(
        lambda layers: tuple(each for each in layers if each.media_type != KERNELS_MEDIA_TYPE)
    )
    kernels = found_in(old, recorded(bare, tmp_path / "new", {}))["kernels.so"]
    assert kernels.verdict == "differs"
    for said in ("the rebuild has none, which ", "no C++ compiler made them here"):
        assert said in kernels.detail


DECIDED = {  # what decided the kernels: its value here, and how both are shown
    "compiler": ("clang 19", "g++ (Debian 12.2.0-14) 12.2.0; glibc 2.36 there, clang 19 here"),
    "flags": ("-O2", "-O3 -march=x86-64-v2 there, -O2 here"),
    "source toy.cc": (f"sha256:{'2' * 64}", "sha256:111111111111 there, sha256:222222222222 here"),
}


def test_other_kernels_are_a_finding_as_another_program(kernel_recipe, old, toy_library, tmp_path):
    """Or whoever changes a kernel could change all programs that call it."""
    library = bytearray(toy_library[1])
    sections = read_sections(toy_library[1])
    code = max((each for each in sections if each.flags & 4), key=lambda each: each.size)
    library[toy_library[1].index(bytes(code.content))] ^= 1
    changed = with_library(kernel_recipe, bytes(library))
    new = recorded(changed, tmp_path / "new")
    found = found_in(old, new)
    kernels, called = found["kernels.so"], found["executable"]
    assert (kernels.verdict, kernels.target) == ("differs", "cpu-host")
    assert kernels.detail.startswith("1 of ")
    assert " sections, code among them; " in kernels.detail
    assert kernels.detail.endswith("the same compiler made them of the same sources")
    reason = "the same, with another library of kernels"
    assert (called.verdict, called.reason) == ("explained", reason)
    for name, (value, named) in DECIDED.items():
        conditions = {each: {**CONDITIONS, name: value} for each in new.targets}
        kernels = found_in(old, dataclasses.replace(new, kernels=conditions))["kernels.so"]
        assert kernels.verdict == "differs"
        assert kernels.detail.endswith(f"bytes; {name} {named}")
    raw = bytearray(zstandard.decompress(changed.content(EXECUTABLES_MEDIA_TYPE)))
    raw[-1] ^= 1
    segment, frame = framed(bytes(raw))

    def with_frame(config):
        [program] = config.programs
        programs = (dataclasses.replace(program, executable=segment),)
        return dataclasses.replace(config, programs=programs)

    changed = changed.configured(with_frame).with_content(EXECUTABLES_MEDIA_TYPE, frame)
    new = recorded(changed, tmp_path / "newer")
    assert found_in(old, new)["executable"].verdict == "differs"


def elf(content):
    """An object file without sections, but for their table, which is last."""
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 40, 64 + len(content))
    struct.pack_into("<HH", header, 58, 64, 1)
    return bytes(header) + content + bytes(64)


def serialized(*objects, tail=b"options"):
    """Objects, each with its length before it, between other fields."""
    return b"head" + b"".join(bytes([66, len(each) % 128]) + each for each in objects) + tail


def test_differences_are_named_and_those_of_order_are_harmless():
    a, b, c = elf(b"aa"), elf(b"bbbb"), elf(b"cc")
    assert in_executables(serialized(a, b), serialized(b, a)) == PartDifference(
        "the same 2 kernels in another order", harmless=True
    )
    for before, after, text in (
        (serialized(a, b), serialized(b, a, tail=b"other!!"), "the same 2 kernels with another "),
        (serialized(a, b), serialized(c, b), "1 of 2 kernels; "),
        (serialized(a, a), serialized(a), "1 of 2 kernels; "),
        (b"PTX: add", b"PTX: mul.", "from byte 5; 8 -> 9 bytes"),
    ):
        found = in_executables(before, after)
        assert found.text.startswith(text)
        assert not found.harmless
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    plain = export(lambda x: jnp.sin(x) * 2, x)
    more = export(lambda x: jnp.sin(jnp.sin(x)) * 2, x)
    other = export(lambda x: jnp.sin(x) * 3, x)
    assert in_programs(plain, more, (), "cpu").text == "stablehlo.sine 1 -> 2"
    assert "2.000000e+00" in in_programs(plain, other, (), "cpu").text

    def layer(values, note):
        arrays = {name: np.full(3, value, np.float32) for name, value in values.items()}
        return save(arrays, {"note": note})

    before = layer({"a": 1.0, "b": 2.0}, "x")
    for after, text, harmless in (
        ({"a": 1.0, "b": 3.0}, "1 of 2 tensors: b", False),
        ({"a": 1.0}, "1 of 2 tensors: b", False),
        ({"b": 2.0, "a": 1.0}, "the same tensors in another order or place", True),
    ):
        assert in_weights(before, layer(after, "longer")) == PartDifference(text, harmless)
