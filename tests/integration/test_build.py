"""Builds that are repeated, damaged, elsewhere, or share a store: what they compile, import and write."""

import json
import os
import shutil
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from tests import own_decoders
from tests.decoders import write_random
from tests.manifests import functions_manifest, write_manifest
from tests.processes import ran
from tests.quick_compiling import XLA_FLAGS

import prejit.compiler
from prejit.compiler.native import kernel_library as library
from prejit.compiler.native.form_table import Conditions, FormTable, Measured, to_text
from prejit.compiler.native.kernel_library import NoKernels, level_of
from prejit.compiler.native.products import KERNEL, WIDENED, Product
from prejit.compiler.progress import Quiet
from prejit.compiler.rebuilding.rebuilt import read_recorded, rebuild
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.targets.target_table import target
from prejit.runtime import load
from prejit.runtime.base.files import digest_of


def write_tiny(directory, sizes="1, 2, 3"):
    keys = f'function = "tiny_model:f"; args = {{ x = "float32[{{n}}]" }}; buckets = {{ n = [{sizes}] }}'
    functions_manifest(directory / "tiny.toml", {"p": keys}, ("cpu-host", "cpu-x86-64-v3"))


def write_project(directory):
    (directory / "tiny_model.py").write_text("def f(x):\n    return x * 2 + 1\n")
    write_tiny(directory)
    return directory


@pytest.fixture(scope="module")
def built_once(run, tmp_path_factory):
    """A project that was built. Read only: it is the module's."""
    directory = write_project(tmp_path_factory.mktemp("built"))
    build(run, directory)
    return directory


@pytest.fixture
def built_project(built_once, tmp_path):
    return shutil.copytree(built_once, tmp_path, dirs_exist_ok=True)


def build(run, project, **options):
    [built] = json.loads(run(*arguments(project, "out"), **options).stdout)
    return built


def arguments(project, output):
    at = ("-o", project / output, "--cache", project / "cache", "--json")
    return ["build", *map(str, (project / "tiny.toml", *at))]


def test_a_build_compiles_what_a_change_touches_in_any_directory(run, built_project, tmp_path):
    project, digest = built_project, load(built_project / "out" / "tiny").digest
    if find_spec("cryptography") is not None:  # it comes with the extra trust
        from tests.signers import signer

        from prejit.compiler.signing.bundle_signing import sign

        sign(project / "out" / "tiny", signer("a"))
    done = run(*arguments(project, "out"))
    [again] = json.loads(done.stdout)
    assert (again["compiled"], again["cached"], again["written"]) == (0, 6, False)
    assert again["digest"] == digest
    assert "signed" not in done.stderr
    plan = run("plan", project / "tiny.toml", "--cache", project / "cache", "--json")
    planned = json.loads(plan.stdout)
    assert (planned["to_compile"], planned["traced_at_build"]) == (0, 0)
    elsewhere = tmp_path / "else" / "where"
    shutil.copytree(project, elsewhere, ignore=shutil.ignore_patterns("out", "else"))
    assert build(run, elsewhere)["compiled"] == 0

    write_tiny(project, "1, 2, 3, 4")
    done = run(*arguments(project, "out"), "-v")
    assert json.loads(done.stdout)[0]["compiled"] == 2
    decided = [line for line in done.stderr.splitlines() if " INFO prejit.compiler." in line]
    assert sum(line.endswith(": cached") for line in decided) == 6
    assert sum(": compiles: first build of this program" in line for line in decided) == 2
    if find_spec("cryptography") is not None:
        assert "out/tiny is not signed any more" in done.stderr


def test_a_damaged_bundle_and_a_damaged_cache_are_mended_by_the_next_build(run, built_project):
    project = built_project
    bundle = project / "out" / "tiny"
    for directory in (bundle, project / "cache"):
        for blob in directory.rglob("blobs/sha256/*"):
            content = bytearray(blob.read_bytes())
            content[len(content) // 2] ^= 1
            blob.write_bytes(content)
    run("verify", bundle, status=4)
    built = build(run, project)
    assert (built["compiled"], built["cached"], built["written"]) == (6, 0, True)
    run("verify", bundle)
    assert load(bundle).call("p", x=np.ones(3, np.float32)).tolist() == [3, 3, 3]
    for directory in (bundle, project / "cache"):
        for blob in directory.rglob("blobs/sha256/*"):
            assert digest_of(blob.read_bytes()) == f"sha256:{blob.name}"
    again = build(run, project)
    assert (again["compiled"], again["written"], again["digest"]) == (0, False, built["digest"])


def test_a_second_machine_compiles_nothing_and_damaged_programs_are_lowered_again(warm, tmp_path):
    model = write_random("gpt2", tmp_path / "model")
    manifest = write_manifest(tmp_path / "m.toml", model, prompt=(4,), context=(24,))
    store = tmp_path / "store"

    def ran_on(machine, *words, shared=True):
        at = ("--cache", tmp_path / machine / "cache", *(("--store", store) if shared else ()))
        without_compiler = {"PATH": "/nonexistent"}  # kernels would take 15 s
        return warm.prejit(*words, manifest, *at, "--json", env=without_compiler, quick=True)

    def built(machine, **options):
        done = ran_on(machine, "build", "-o", tmp_path / machine, **options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)[0], done.stderr

    def planned(machine):
        rows = json.loads(ran_on(machine, "plan").stdout)["programs"]
        return {(each["state"], each["where"]) for each in rows}

    first, _ = built("first")
    assert first["compiled"] > 0
    assert planned("second") == {("cached", store.as_uri())}
    second, told = built("second")
    assert (second["compiled"], second["digest"]) == (0, first["digest"])
    assert "results read" in told
    assert planned("second") == {("cached", "local")}, "what it took is now on this machine"

    # Programs are damaged in the first one's cache, and what was made of them is not there.
    cache, bundle = tmp_path / "first" / "cache", tmp_path / "first" / "model"
    actions, damaged = cache / "v1" / "actions", set()
    for action in (actions / "lower").glob("*.json"):
        damaged |= {*json.loads(action.read_bytes().partition(b"\n")[2])["blobs"]}
    own = DirectoryStore.open(cache)
    for each in damaged:
        content = bytearray(own.blob_path(each).read_bytes())
        content[len(content) // 2] ^= 1
        own.blob_path(each).write_bytes(content)
    for each in (actions / "compile", actions / "pack", bundle):
        shutil.rmtree(each)
    third, told = built("first", shared=False)
    again = "was damaged or deleted in the build cache and is lowered again"
    assert told.count(again) == len(load(bundle).config.programs)
    assert third["digest"] == first["digest"]
    assert all(own.read_blob(each) is not None for each in damaged)


FUNCTIONS = {
    "f": 'function = "one:f"; args = ["float32[3]"]',
    "g": 'function = "one:g"; args = ["float32[3]"]',
    "h": 'function = "two:h"; args = ["float32[{n}]"]; buckets = { n = [1, 2] }',
}
NOOP = """
import json, sys
from prejit.runtime.__main__ import main

status = main(sys.argv[1:])
heavy = {"jax", "flax", "equinox", "one", "two", "own_decoders"} & sys.modules.keys()
print(json.dumps({"status": status, "heavy": sorted(heavy)}))
"""


def noop(python, build_cache, directory, manifest):
    arguments = ("build", directory / manifest, "-o", directory / "out", "--json", "--no-measure")
    done = python(NOOP, *arguments, PREJIT_CACHE=str(build_cache))
    *built, imported = done.stdout.splitlines()
    [found] = json.loads("\n".join(built))
    assert json.loads(imported) == {"status": 0, "heavy": []}
    return dict(found)


@pytest.mark.thorough
def test_a_build_that_changes_nothing_imports_no_jax_or_code(run, python, build_cache, tmp_path):
    functions_manifest(tmp_path / "functions.toml", FUNCTIONS)
    one = "def f(x):\n    return x * 11\n\n\ndef g(x):\n    return x * 13\n"
    (tmp_path / "one.py").write_text(one)
    (tmp_path / "two.py").write_text("def h(x):\n    return x * 17\n")
    arguments = ("build", tmp_path / "functions.toml", "-o", tmp_path / "out", "--json")
    run(*arguments, quick=False)
    found = noop(python, build_cache, tmp_path, "functions.toml")
    assert (found["compiled"], found["cached"], found["written"]) == (0, 4, False)
    new = str(1000 + os.getpid())  # no cache of an earlier run has it
    (tmp_path / "one.py").write_text(one.replace("13", new))
    [changed] = json.loads(run(*arguments, quick=False).stdout)
    assert (changed["compiled"], changed["cached"]) == (1, 3)


@pytest.mark.thorough
def test_a_decoder_of_the_user_is_not_imported_again(run, python, build_cache, tmp_path):
    shutil.copy(own_decoders.__file__, tmp_path / "own_decoders.py")
    module = 'module = "own_decoders:equinox_decoder"'
    more = {"prompt": (8,), "context": (32,), "targets": ("cpu-x86-64-v3",)}
    write_manifest(tmp_path / "own.toml", model=module, **more)
    options = ("-o", tmp_path / "out", "--no-measure")
    run("build", tmp_path / "own.toml", *options, quick=False)
    found = noop(python, build_cache, tmp_path, "own.toml")
    assert (found["compiled"], found["written"]) == (0, False)
    run("plan", tmp_path / "own.toml")  # all is cached: its exit status is 0
    with (tmp_path / "own_decoders.py").open("a") as file:
        file.write("\nUNUSED = 1\n")
    planned = run("plan", tmp_path / "own.toml", "--json", status=8)
    rows = json.loads(planned.stdout)["programs"]
    assert {row["state"] for row in rows} == {"traced at build"}
    assert all("module own_decoders: sha256:" in row["why"] for row in rows)


CODE = """
import os, sys
import jax, jax.numpy as jnp

def many(x):
    tables = {jnp.sin, jnp.cos, jnp.tanh}  # the order of a set follows PYTHONHASHSEED
    for each in sorted(tables, key=lambda f: f.__name__):
        x = each(x) @ x.T @ x
    return jnp.sort(jax.nn.softmax(x), axis=-1), jnp.cumsum(x)

def walk(x):
    return jax.lax.scan(lambda c, y: (jnp.sin(c) * y, c.sum()), x[0], x)
"""
EQUAL = {
    "many": 'function = "code_of_it:many"; args = { x = "float32[{n}, 64]" }; buckets = { n = [8, 64] }',
    "walk": 'function = "code_of_it:walk"; args = { x = "float32[16, 64]" }',
}
START = """
import os, sys
os.sched_setaffinity(0, {cpus})
os.umask({umask})
os.execv(sys.executable, [sys.executable, "-m", "prejit.runtime", *sys.argv[1:]])
"""


def build_in(directory, cpus, umask, jobs, **environ):
    """Builds in a directory of its own, and returns the digest of each file of the bundle."""
    project = directory / "project"
    project.mkdir(parents=True)
    (project / "code_of_it.py").write_text(CODE)
    functions_manifest(project / "equal.toml", EQUAL, ("cpu-host", "cpu-x86-64-v3"))
    for file in project.iterdir():
        os.utime(file, (86400 * umask, 86400 * umask))
    arguments = ["build", "equal.toml", "-o", str(directory / "out"), "--jobs", str(jobs)]
    own = {"HOME": str(directory), "PREJIT_CACHE": str(directory / "cache")}
    env = {**os.environ, **own, **environ}
    start = START.format(cpus=cpus, umask=umask)
    done = ran(sys.executable, "-c", start, *arguments, cwd=project, env=env)
    assert "compiled 6, cached 0" in done.stderr
    bundle = directory / "out" / "equal"
    files = [path for path in bundle.rglob("*") if path.is_file()]
    return {str(path.relative_to(bundle)): digest_of(path.read_bytes()) for path in files}


def test_one_core_and_many_give_equal_bytes_in_any_directory_home_time_and_language(tmp_path):
    cpus = os.sched_getaffinity(0)
    if len(cpus) == 1:
        pytest.skip("this machine has one core")
    one = {"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo", "LANG": "C"}
    other = {"PYTHONHASHSEED": "2", "LC_ALL": "tr_TR.UTF-8"}
    alone = build_in(tmp_path / "alone", {min(cpus)}, 0o077, 1, **one)
    beside = build_in(tmp_path / "somewhere" / "else", cpus, 0o022, 3, **other)
    assert alone == beside, "the bundle and what is attached to it"


@pytest.mark.thorough
def test_kernels_are_the_same_bytes_with_forms_of_the_bundle(build_cache, tmp_path, monkeypatch):
    """All kernels are compiled twice here, without optimization, which is faster."""
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS)
    flags = tuple("-O0" if each == "-O3" else each for each in library._COMPILE_FLAGS)
    assert "-O0" in flags
    monkeypatch.setattr(library, "_COMPILE_FLAGS", flags)
    write_random("gpt2", tmp_path / "gpt2")
    sizes = {"prompt": (8,), "context": (24,)}
    write_manifest(tmp_path / "m.toml", "gpt2", model='dtype = "bfloat16"', **sizes)
    # Forms that no table has here: a rebuild takes those of the bundle all the same.
    level = level_of(target("cpu-host"))
    if isinstance(level, NoKernels):
        pytest.skip(level.reason)
    product = Product("bfloat16", 1, 24, 24, in_out=False)
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


@pytest.mark.thorough
def test_equal_builds_at_once_compile_each_program_once(warm, tmp_path):
    project = write_project(tmp_path)
    processes = [warm.start(*arguments(project, f"out{n}"), quick=True) for n in range(3)]
    built = [json.loads(process.communicate(timeout=300)[0])[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert sum(each["compiled"] for each in built) == 6
    assert [each["compiled"] + each["cached"] for each in built] == [6] * 3
    assert len({each["digest"] for each in built}) == 1
