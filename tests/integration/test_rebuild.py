"""A model with kernels is built again: the same bytes."""

import pytest
from tests.decoders import write_random
from tests.manifests import write_manifest
from tests.quick_compiling import XLA_FLAGS

import prejit.compiler
from prejit.compiler.native import kernel_library as library
from prejit.compiler.native.form_table import Conditions, FormTable, Measured, to_text
from prejit.compiler.native.kernel_library import NoKernels, level_of
from prejit.compiler.native.products import KERNEL, WIDENED, Product
from prejit.compiler.progress import Quiet
from prejit.compiler.rebuilding.rebuilt import read_recorded, rebuild
from prejit.compiler.targets.target_table import target


@pytest.mark.thorough
def test_kernels_are_the_same_bytes_with_the_forms_of_the_bundle(
    build_cache, tmp_path, monkeypatch
):
    """All kernels are compiled twice here, without optimization, which is faster."""
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS)
    flags = tuple("-O0" if each == "-O3" else each for each in library._COMPILE_FLAGS)
    assert "-O0" in flags
    monkeypatch.setattr(library, "_COMPILE_FLAGS", flags)
    write_random("gpt2", tmp_path / "gpt2")
    sizes = {"prompt": (8,), "context": (24,)}
    write_manifest(tmp_path / "m.toml", "gpt2", model='dtype = "int8"', **sizes)
    # Forms that no table has here: a rebuild takes those of the bundle all the same.
    level = level_of(target("cpu-host"))
    if isinstance(level, NoKernels):
        pytest.skip(level.reason)
    product = Product("int8", 1, 24, 24, in_out=False)
    conditions = Conditions(level, "", 1, "", "", "")
    measured = Measured(product, {WIDENED: 1, KERNEL: 100}, conditions, "2026-01-01")
    forms = tmp_path / "forms.json"
    forms.write_text(to_text(FormTable((measured,))))
    options = {"cache": build_cache, "forms": forms, "measure": False, "quiet": True}
    built = prejit.compiler.build(tmp_path / "m.toml", tmp_path / "out", **options)
    config = read_recorded(built.path).targets["cpu-host"].config
    if config.kernels is None:
        pytest.skip("no C++ compiler here, so no kernels")
    assert {each.form for each in config.forms or ()} == {WIDENED}
    same = rebuild(built.path, tmp_path / "m.toml", progress=Quiet())
    assert {each.kind for each in same.parts} >= {"kernels.so", "executable", "StableHLO"}
    # The figures of forms are of another measurement; the forms are not.
    assert {(each.kind, each.reason) for each in same.parts if each.verdict != "equal"} == {
        ("table", "measured again")
    }
