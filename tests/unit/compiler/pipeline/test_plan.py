"""What a plan looks at, and what is in the keys that it compares: all that decides a result, and no more."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.decoders import LARGEST_CONTEXT, write_random
from tests.encoders import write_encoder
from tests.manifests import encoder_manifest, write_manifest
from tests.parity import sibling_cases

from prejit.compiler.api import plan as plan_of_user
from prejit.compiler.compile import compile_jobs
from prejit.compiler.compile.pool import WorkerPool
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.native.kernel_library import KernelLibrary, build_kernels
from prejit.compiler.pipeline import result_keys
from prejit.compiler.pipeline.build_interface import BuildOptions
from prejit.compiler.pipeline.build_run import build
from prejit.compiler.pipeline.executable_jobs import (
    COMPILE,
    choose_source,
    job_of,
    planned_executables,
)
from prejit.compiler.pipeline.lower.program_lowering import lower, source_of
from prejit.compiler.pipeline.model import read_model
from prejit.compiler.pipeline.plan import Native, PlanOptions, plan_build, stored_bits
from prejit.compiler.pipeline.published_files import find_published
from prejit.compiler.pipeline.result_keys import versions
from prejit.compiler.pipeline.target_tools import TargetTools, find_toolchain, kernels_of
from prejit.compiler.pipeline.workspace import Workspace
from prejit.compiler.progress import Quiet
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.errors import CheckpointError, ManifestError

from ..native.test_kernel_library import write_compiler


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random("gpt2", tmp_path_factory.mktemp("plan") / "gpt2")


class Planned:
    """A plan of a model, and its store."""

    def __init__(self, at, model, *targets, context=24, **lines):
        at.mkdir(exist_ok=True)
        sizes = {"prompt": (8,), "context": (context,), "targets": targets}
        manifest = write_manifest(at / "m.toml", model, **sizes, **lines)
        self.store = DirectoryStore.open(at / "cache")
        self.plan = plan_build(read_manifest(manifest), self.store)

    @property
    def space(self):
        return Workspace.of(self.plan, self.store, Quiet())

    def reasons(self):
        return {each.why for each in planned_executables(self.plan, self.store)}

    def kernels(self):
        """Build the kernels of all targets as a build does, before the first program."""
        found = {}
        for target in self.plan.targets:
            if (toolchain := find_toolchain(target)) is not None:
                library = build_kernels(toolchain, self.store)
                if isinstance(library, KernelLibrary):
                    found[target.name] = kernels_of(library, toolchain, self.plan.forms)
        return found


def compile_digests(found, name):
    """The keys of the executables of a target, by program."""
    [target] = (each for each in found.plan.targets if each.name == name)
    toolchain, kernels, space = find_toolchain(target), found.kernels(), found.space
    digests = {}
    for program in found.plan.programs:
        source = source_of(space, program, lower(space, program), kernels.get(name))
        tools = TargetTools(toolchain, None)
        job = job_of(found.plan, program.spec, source, tools, found.store)
        digests[program.spec.name] = job.key.digest
    return digests


def test_another_target_changes_no_executable(model, tmp_path, monkeypatch, toy_library):
    (tmp_path / "made.so").write_bytes(toy_library[1])
    copies = f"cp {tmp_path}/made.so $out"
    v2, v3 = "cpu-x86-64-v2", "cpu-x86-64-v3"
    write_compiler(tmp_path, monkeypatch, f'case "$*" in *x86-64-v3*) exit 1;; esac; {copies}')

    def digests(*targets):
        return compile_digests(Planned(tmp_path / "m", model, *targets), v2)

    found = [digests(v3, v2)]
    write_compiler(tmp_path, monkeypatch, copies)
    for others in ((), (v3,), ("cuda-l4",)):
        found.append(digests(*others, v2))
    assert found == found[:1] * 4
    monkeypatch.setenv("PATH", "/nonexistent")
    bare = digests(v2)
    assert bare != found[0], "without kernels its own programs are others"
    assert digests(v3, v2) == bare


def test_a_plan_makes_nothing(model, tmp_path, monkeypatch, toy_library):
    """No kernels, no program and no process; with kernels it looks for the executables that a build makes."""
    (tmp_path / "made.so").write_bytes(toy_library[1])
    compiled = write_compiler(tmp_path, monkeypatch, f"cp {tmp_path}/made.so $out")

    def fresh():
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", None)
            found = Planned(tmp_path / "m", model, "cpu-x86-64-v2")
            found.reasons()
        return found

    found = fresh()
    assert found.reasons() == {"first build of this program"}
    for program in found.plan.programs:
        lower(found.space, program)
    again = fresh()
    assert all(program.lowered is not None for program in again.plan.programs)
    assert "its kernels have still to be compiled" in again.reasons()
    assert not compiled.exists()
    [kernels] = again.kernels().values()
    assert compiled.exists()
    compiled.unlink()
    once_more = fresh()
    assert once_more.reasons() == {"first build of this program"}
    assert not compiled.exists()
    assert not list((tmp_path / "m" / "cache").rglob("actions/native/*"))

    [target] = found.plan.targets
    tools = TargetTools(find_toolchain(target), None)
    for program in once_more.plan.programs:
        made = source_of(once_more.space, program, program.lowered, kernels)
        key = job_of(found.plan, program.spec, made, tools, found.store).key
        found.store.put(key, {"not": "an executable"})
        found.store._action(key).unlink()  # only the name of the last key stays
    assert once_more.reasons() == {"its last result is gone from the cache, or was damaged"}

    program = once_more.plan.programs[0]
    portable = compile_jobs.Source(program.lowered.portable.raw_digest, program.lowered.platforms)
    empty = Native(f"sha256:{0:064x}", (), calls=False)
    for with_kernels in (None, kernels):
        assert portable == choose_source(
            found.plan.manifest, program.spec, program.lowered, with_kernels, lambda forms: empty
        )


def test_a_plan_needs_no_network(tmp_path, monkeypatch):
    import huggingface_hub

    def snapshot(repository, *, local_files_only, **options):
        assert local_files_only, "it asked the Hub"
        raise huggingface_hub.errors.LocalEntryNotFoundError("not here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    found = Planned(tmp_path / "m", "hf://org/name", "cpu-host")
    assert found.plan.model is None
    expected = {(COMPILE, "hf://org/name has still to be fetched")}
    executables = planned_executables(found.plan, found.store)
    assert {(each.state, each.why) for each in executables} == expected


def test_programs_of_an_encoder_wait_for_the_bits_of_its_matrices(tmp_path):
    write_encoder(tmp_path / "model")
    manifest, store = tmp_path / "m.toml", DirectoryStore.open(tmp_path / "cache")
    encoder_manifest(manifest, "shapes = [[1, 16]]", model='dtype = "int8"')
    plan = plan_build(read_manifest(manifest), store)
    found = planned_executables(plan, store)
    expected = "model has still to be measured: how many bits its matrices need"
    assert {(each.state, each.why) for each in found} == {(COMPILE, expected)}
    published = find_published(plan.manifest, plan.model)
    assert not published.are_known, "nothing is hashed to look for what the store cannot have"
    stored = stored_bits(plan.manifest, plan.model, published, store)
    stored.put({"chosen": {"bert.some.weight": "bfloat16"}})
    again = plan_build(plan.manifest, store)
    assert again.model.matrices.endswith("; bert.some.weight in bfloat16")
    # A process that lowers opens no file for what the build knows.
    (tmp_path / "model" / "model.safetensors").unlink()
    known = plan_build(plan.manifest, store, PlanOptions(bits=again.model.chosen))
    assert known.model == again.model
    write_encoder(tmp_path / "model")
    unmeasured = 'dtype = "int8"\naccuracy = false'
    encoder_manifest(manifest, "shapes = [[1, 16]]", model=unmeasured)
    assert plan_build(read_manifest(manifest), store).programs[0].key is not None


def changed(model, **config):
    before = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps({**before, **config}))
    return model


def test_a_plan_refuses_what_a_build_does(model, tmp_path, monkeypatch):
    compiled = write_compiler(tmp_path, monkeypatch, "exit 1")
    without, other = (Path(shutil.copytree(model, tmp_path / name)) for name in ("none", "other"))
    (without / "model.safetensors").unlink()
    changed(other, n_layer=9)
    long = LARGEST_CONTEXT + 1
    for at, context, said in (
        (model, long, f"expected at most {LARGEST_CONTEXT}, .*found {long}"),
        (without, 24, "expected weights in one of"),
        (other, 24, "the tensors do not fit config.json: missing "),
    ):
        found = Planned(tmp_path / "m", at, "cpu-x86-64-v2", context=context)
        with pytest.raises((ManifestError, CheckpointError), match=said) as refused:
            plan_of_user(tmp_path / "m" / "m.toml", cache=found.store.root)
        executor = WorkerPool(found.store, workers=1)
        options = BuildOptions(store=found.store, executor=executor, progress=Quiet())
        with pytest.raises(type(refused.value)) as caught:
            build(found.plan.manifest, tmp_path / "out", options)
        assert str(refused.value) == str(caught.value)
    assert not compiled.exists()


def test_what_is_in_the_key_of_a_lowering(model, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "jax", raising=False)  # else its configuration counts
    settings = {"JAX_ENABLE_X64": "1", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    for name in settings:
        monkeypatch.delenv(name, raising=False)

    def key(at=model):
        return dict(Planned(tmp_path / "m", at, "cpu-host").plan.programs[0].key.ingredients)

    def changes(at=model):
        return [name for name, value in key(at).items() if value != before[name]]

    before = key()
    assert changes() == []
    copy = Path(shutil.copytree(model, tmp_path / "elsewhere"))
    assert changes(copy) == []
    assert changes(changed(copy, layer_norm_epsilon=1e-3)) == ["config.json"]
    for name, value in settings.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert changes() == ["jax configuration"]
    described = tmp_path / "path" / "flax-1.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Name: flax\nVersion: {versions('flax')['flax']}\n")
    (described / "RECORD").write_text("flax/nnx/module.py,sha256=abc,10\n")
    with monkeypatch.context() as patch:  # it was installed again under its version
        patch.syspath_prepend(str(tmp_path / "path"))
        patch.setattr(result_keys, "_installed", result_keys.version_of)
        assert changes() == ["flax"]
    with monkeypatch.context() as patch:
        patch.setattr(result_keys, "code_digest", lambda *modules: f"sha256:of changed {modules}")
        assert changes() == ["our code"]


@pytest.mark.parametrize(
    ("lines", "cache"),
    [("", "float32"), ('dtype = "int8"', "bfloat16"), ('dtype = "int4"', "bfloat16")],
)
def test_a_cache_is_no_more_exact_than_the_weights(model, tmp_path, lines, cache):
    manifest = read_manifest(write_manifest(tmp_path / "m.toml", model, model=lines))
    plan = plan_build(manifest, DirectoryStore.open(tmp_path / "cache"))
    assert read_model(manifest, plan.model).shape.cache_dtype == cache


def test_latents_are_not_kept_in_int8(tmp_path):
    case = next(case for case in sibling_cases.cases() if case.name == "deepseek_v3-0")
    case.write(tmp_path / "latent")

    def model_of(dtype):
        line = f'cache_dtype = "{dtype}"'
        plan = Planned(tmp_path, tmp_path / "latent", "cpu-host", context=8, generate=line).plan
        return read_model(plan.manifest, plan.model)

    expected = r"generate.cache_dtype: expected float32 or .*deepseek"
    with pytest.raises(ManifestError, match=expected):
        model_of("int8")
    assert model_of("bfloat16")


def test_a_directory_above_the_model_is_an_error_of_the_manifest(tmp_path):
    (tmp_path / "models").mkdir()
    decoder = write_manifest(tmp_path / "decoder.toml", "models")
    encoder = encoder_manifest(tmp_path / "encoder.toml", "shapes = [[1, 16]]", source="models")
    for path in (decoder, encoder):
        with pytest.raises(
            ManifestError, match=rf"{path.name}: source: .* no .*models/config\.json"
        ):
            plan_of_user(path)
