"""Whether `prejit inspect` shows the programs of a bundle as they are, and what they cost."""

import json
import sys

import jax.numpy as jnp
import pytest
from tests.layouts import GOLDEN

from prejit.compiler import Program, build
from prejit.compiler.comparing import inspected_programs
from prejit.compiler.comparing.difference import read_bundle
from prejit.compiler.comparing.inspected_programs import costs, find_target
from prejit.runtime.cli.commands import run
from prejit.runtime.errors import PrejitError, UsageError

CALL = str(GOLDEN / "call")
"""A bundle for x86-64-v2 and v3, whose programs a machine of any kind can read."""
SIDE = 64


def test_texts_are_those_of_the_program_and_the_target(said):
    stablehlo = said("inspect", CALL, "--stablehlo", "score/b2")
    assert "stablehlo.tanh" in stablehlo
    assert "tensor<2x16xf32>" in stablehlo
    hlo = said("inspect", CALL, "--hlo", "score/b2", "--for-target", "cpu-x86-64-v2")
    assert hlo.startswith("HloModule")
    assert "fused_computation" in hlo  # as XLA made it, and not the portable program
    old, new = (
        said("inspect", CALL, "--asm", "score/b2", "--for-target", f"cpu-x86-64-{level}")
        for level in ("v2", "v3")
    )
    assert ("vmovaps" in old, "vmovaps" in new, "ret" in old) == (False, True, True)
    found = json.loads(said("inspect", CALL, "--asm", "nest", "--json"))
    assert set(found) == {"program", "target", "asm"}


def test_a_server_without_the_build_side_hears_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prejit.compiler.cli.program_views", None)
    with pytest.raises(UsageError) as error:
        run(["inspect", CALL, "--hlo", "nest"])
    assert error.value.hint == "pip install 'prejit[compiler]'"


def test_mistakes_are_named():
    kernels = str(GOLDEN / "kernels")  # whose executables are stand-ins
    other_form = "scale: expected an executable of XLA:CPU as jaxlib"
    for bundle, arguments, message in (
        (CALL, ["--hlo", "scor/b2"], "did you mean 'score/b2'"),
        (CALL, ["--asm", "nest", "--for-target", "cpu-x86-64-v9"], "did you mean 'cpu-x86-64-v"),
        (CALL, ["--asm", "nest", "--costs"], "expected one of --stablehlo, --hlo, --asm"),
        (CALL, ["--for-target", "cpu-x86-64-v2"], "-target: expected --stablehlo.* found none"),
        (CALL, ["--capacity", "--for-target", "x"], "--for-target: expected .* found --capacity"),
        *((kernels, [form, "scale"], other_form) for form in ("--hlo", "--asm")),
    ):
        with pytest.raises(UsageError, match=message):
            run(["inspect", bundle, *arguments])
    with pytest.raises(PrejitError, match="found recorded ones"):
        find_target(read_bundle(GOLDEN / "recorded"), None)


@pytest.mark.thorough
def test_costs_count_what_the_function_says_and_is_run(build_cache, tmp_path, said, monkeypatch):
    program = Program("product", fn=lambda x: jnp.tanh(x @ x), args=[f"float32[{SIDE}, {SIDE}]"])
    product = str(build([program], tmp_path, name="product", cache=build_cache, quiet=True).path)
    bundle = read_bundle(product)
    [cost] = costs(bundle, find_target(bundle, None))
    assert cost.flops == pytest.approx(2 * SIDE**3 + SIDE**2, rel=0.02)
    assert cost.moved_bytes == 2 * 4 * SIDE**2
    monkeypatch.setattr(inspected_programs, "_LIMIT_SECONDS", 0.0)
    monkeypatch.setattr(inspected_programs, "_READ_BYTES", 1 << 20)
    found = json.loads(said("inspect", product, "--roofline", "--json"))
    [row] = found["programs"]
    assert row["seconds"] > 0
    assert row["bound"] in ("memory", "arithmetic")
    table = said("inspect", product, "--roofline")
    assert "of the limit" in table
    assert "product" in table
