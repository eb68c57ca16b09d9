"""What a plan looks at, and what is in the keys that it compares: all that decides a result, and no more."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.decoders import LARGEST_CONTEXT, write_random

from prejit.compiler.build import plan
from prejit.compiler.build.build import build
from prejit.compiler.build.plan import Inputs, make_plan
from prejit.compiler.compile import jobs
from prejit.compiler.manifest.manifest import read_manifest
from prejit.compiler.progress import Quiet
from prejit.compiler.store.directory import DirectoryStore
from prejit.compiler.store.key import Key
from prejit.runtime.errors import CheckpointError, ManifestError

from ..native.test_kernel_library import write_compiler  # noqa: TID252 (tests are no installed package)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random("gpt2", tmp_path_factory.mktemp("plan") / "gpt2")


def inputs(
    at: Path,
    model: Path,
    *targets: str,
    context: int = 24,
    only: tuple[str, ...] = (),
    mesh: str = "",
) -> Inputs:
    """Of a manifest in a directory, which has a build cache too."""
    at.mkdir(exist_ok=True)
    manifest = at / "m.toml"
    manifest.write_text(
        f'[bundle]\nname = "m"\n[model]\nsource = {json.dumps(str(model))}\n{mesh}'
        f"[generate]\nbatch = [1]\nprompt = [8]\ncontext = [{context}]\n"
        + "".join(f"[[target]]\nname = {json.dumps(target)}\n" for target in targets)
    )
    return Inputs(read_manifest(manifest), DirectoryStore.open(at / "cache"), only)


def lower_keys(found: Inputs) -> list[str]:
    return [found.lower_key(spec).digest for spec in found.specs]


def test_other_targets_and_compilers_change_neither_layout_nor_program(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy_library: tuple[Any, bytes]
) -> None:
    (tmp_path / "made.so").write_bytes(toy_library[1])
    write_compiler(tmp_path, monkeypatch, f"cp {tmp_path}/made.so $out")
    targets = ("cuda-l4", "cpu-x86-64-v2", "cpu-host")
    found = [
        inputs(tmp_path / "gpu", model, "cuda-l4"),
        inputs(tmp_path / "all", model, *targets),
        inputs(tmp_path / "only", model, *targets, only=("cuda-l4",)),
    ]
    keys = [(each.matrices, lower_keys(each)) for each in found]
    monkeypatch.setenv("PATH", "/nonexistent")  # no compiler
    bare = inputs(tmp_path / "bare", model, *targets)
    keys.append((bare.matrices, lower_keys(bare)))
    assert all(each == keys[0] for each in keys)


def test_a_mesh_has_no_kernels_and_each_matrix_as_xla_wants_it(model: Path, tmp_path: Path) -> None:
    split = "[mesh]\ntensor = 3\n"
    assert inputs(tmp_path / "a", model, "cpu-host", mesh=split).matrices == "each as XLA wants it"
    assert inputs(tmp_path / "b", model, "cpu-host").matrices == "out, in"


def test_a_plan_compiles_no_kernels_and_traces_no_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy_library: tuple[Any, bytes]
) -> None:
    (tmp_path / "made.so").write_bytes(toy_library[1])
    compiled = write_compiler(tmp_path, monkeypatch, f"cp {tmp_path}/made.so $out")
    found = inputs(tmp_path / "m", model, "cpu-x86-64-v2")
    reasons = {each.why for each in make_plan(found)}
    assert reasons == {"first build of this program"}
    assert not compiled.exists()
    assert "model" not in vars(found), "it was read to trace it"

    for spec in found.specs:
        found.lower(spec)
    again = inputs(tmp_path / "m", model, "cpu-x86-64-v2")
    reasons = {each.why for each in make_plan(again)}
    assert "its kernels have still to be compiled" in reasons
    assert not compiled.exists()

    again.kernels()
    assert compiled.exists()
    compiled.unlink()
    once_more = inputs(tmp_path / "m", model, "cpu-x86-64-v2")
    planned = make_plan(once_more)
    assert {each.why for each in planned} == {"first build of this program"}
    assert not compiled.exists()
    assert "model" not in vars(once_more)
    assert not list((tmp_path / "m" / "cache").rglob("actions/native/*"))


def test_a_plan_names_what_a_build_compiles(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy_library: tuple[Any, bytes]
) -> None:
    """With kernels and forms, a plan looks for the executables that a build makes."""
    (tmp_path / "made.so").write_bytes(toy_library[1])
    write_compiler(tmp_path, monkeypatch, f"cp {tmp_path}/made.so $out")
    found = inputs(tmp_path / "m", model, "cpu-x86-64-v2")
    (target,) = found.targets
    for spec in found.specs:
        lowered = found.lower(spec)
        made = found.source(spec, target, lowered)
        fresh = inputs(tmp_path / "m", model, "cpu-x86-64-v2")
        assert fresh.planned_source(spec, target, lowered) == made


@pytest.mark.parametrize("what", ["context", "weights", "config"])
def test_what_the_model_does_not_allow_is_refused_before_anything_compiles(
    what: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = write_compiler(tmp_path, monkeypatch, "exit 1")
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    context = LARGEST_CONTEXT + 1 if what == "context" else 24
    if what == "weights":
        (copy / "model.safetensors").unlink()
    if what == "config":
        (copy / "config.json").write_text('{"model_type": "no_such_family"}')
    found = inputs(tmp_path / "m", copy, "cpu-x86-64-v2", context=context)
    with pytest.raises((ManifestError, CheckpointError)) as caught:
        build(found, tmp_path / "out", workers=1, progress=Quiet())
    assert not compiled.exists()
    if what == "context":
        assert f"expected at most {LARGEST_CONTEXT}" in str(caught.value)
        assert f"found {context}" in str(caught.value)


def test_code_configuration_and_config_json_are_in_the_key_of_a_lowering(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "jax", raising=False)  # else its configuration counts
    for name in ("JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION"):
        monkeypatch.delenv(name, raising=False)

    def key(at: Path = model) -> Key:
        found = inputs(tmp_path / "m", at, "cpu-host")
        return found.lower_key(found.specs[0])

    def changed(new: Key) -> Sequence[str]:
        old = dict(before.ingredients)
        return [name for name, value in new.ingredients if value != old[name]]

    before = key()
    assert changed(key()) == []
    assert changed(key(Path(shutil.copytree(model, tmp_path / "elsewhere")))) == []

    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_bytes())
    (other / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": 1e-3}))
    assert changed(key(other)) == ["config.json"]

    for name, value in (("JAX_ENABLE_X64", "1"), ("JAX_DEFAULT_MATMUL_PRECISION", "highest")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert changed(key()) == ["jax configuration"]
    with monkeypatch.context() as patch:
        patch.setattr(plan, "code_digest", lambda *modules: f"sha256:of mended {modules}")
        assert changed(key()) == ["our code"]


def test_the_platforms_of_a_program_are_in_the_key_of_its_executable(
    model: Path, tmp_path: Path
) -> None:
    found = inputs(tmp_path / "m", model, "cpu-x86-64-v3")
    toolchain = found.toolchain(found.targets[0])
    assert toolchain is not None
    source = jobs.Source(f"sha256:{1:064x}", ("cpu", "cuda", "tpu"))
    turned = replace(source, platforms=source.platforms[::-1])
    spec = found.specs[0]
    keys = {found.compile_key(toolchain, spec, each).digest for each in (source, turned)}
    assert len(keys) == 2
