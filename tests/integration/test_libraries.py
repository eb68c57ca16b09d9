"""Libraries of the user: C++ handlers that functions call, built into bundles and run in fresh processes."""

import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.format import second_reader
from tests.layouts import blob, contents_of
from tests.manifests import functions_manifest

from prejit.compiler import BuildError, Library, Manifest, ManifestError, Program, build
from prejit.compiler.native.compilers import find_compilers
from prejit.compiler.pipeline.plan import plan_build
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime import FallbackWarning, MismatchError, load
from prejit.runtime.__main__ import main
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.device import kernels
from prejit.runtime.errors import KernelError, RejectError
from prejit.runtime.format.checks.oci import check_manifest
from prejit.runtime.format.checks.program_table import check_config
from prejit.runtime.format.checks.seldom_parts import check_library, check_library_layers
from prejit.runtime.machine.fingerprint import Fingerprint

SOURCE = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Scale(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y, float factor) {
  for (size_t i = 0; i < x.element_count(); ++i) y->typed_data()[i] = x.typed_data()[i] * factor + SHIFT;
  return ffi::Error::Success();
}
static ffi::Error Negate(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  for (size_t i = 0; i < x.element_count(); ++i) y->typed_data()[i] = -x.typed_data()[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(ScaleHandler, Scale, ffi::Ffi::Bind()
    .Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>().Attr<float>("factor"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(NegateHandler, Negate, ffi::Ffi::Bind()
    .Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
"""
HANDLERS = {"scale": "ScaleHandler", "negate": "NegateHandler"}
MODULE = """
import jax
import jax.numpy as jnp
import numpy as np
def scaled(x):
    call = jax.ffi.ffi_call("scale", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jnp.tanh(call(x, factor=np.float32(2.5)))
def in_a_loop(x):
    call = jax.ffi.ffi_call("negate", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jax.lax.fori_loop(0, 3, lambda _, value: call(value) + 1, x)
def anywhere(x):
    return jax.lax.platform_dependent(x, cpu=scaled, default=lambda x: jnp.tanh(x * 2.5))
def unknown(x):
    return jax.ffi.ffi_call("nobody", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
"""
PROGRAMS = {
    "scaled": 'function = "own_code:scaled"; args = { x = "float32[{n}]" }; '
    'buckets = { n = [5] }; open_sizes = ["n"]',
    "in_a_loop": 'function = "own_code:in_a_loop"; args = { x = "float32[4]" }',
}
LIBRARY = """
[[library]]
path = "libown.so"
handlers = { scale = "ScaleHandler", negate = "NegateHandler" }
"""
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-library.md"
X = np.linspace(-1, 1, 5, dtype=np.float32)
EXPECTED = np.tanh(X * np.float32(2.5))


@pytest.fixture(scope="module")
def compiled(build_cache, tmp_path_factory):
    """Compiles SOURCE as a shared library: `compiled(shift=1)`. One shift gives the same bytes each time."""
    import jax

    compiler = next(find_compilers("x86-64-v2", build_cache), None)
    if compiler is None or os.uname().machine != "x86_64":
        pytest.skip("no C++ compiler for x86-64")
    directory = tmp_path_factory.mktemp("libraries")

    def run(*flags):
        problem = compiler.run([*map(str, flags)])
        assert not problem, problem

    def make(shift=0, *, needs=""):
        made = directory / f"libown{shift}{needs}.so"
        if made.exists():
            return made
        (directory / "own.cc").write_text(SOURCE)
        links = ["-Wl,--build-id=none"]
        if needs:  # a library that no other machine has
            (directory / "empty.cc").write_text("extern int missing_here = 1;")
            soname = f"-Wl,-soname,{needs}"
            run("-shared", directory / "empty.cc", "-o", directory / needs, soname)
            links += ["-Wl,--no-as-needed", f"-L{directory}", f"-l:{needs}"]
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-s", f"-DSHIFT={shift}"]
        flags += ["-isystem", jax.ffi.include_dir(), directory / "own.cc"]
        run(*compiler.flags, *flags, *links, "-o", made)
        return made

    return make


@pytest.fixture(scope="module")
def project(compiled, tmp_path_factory):
    directory = tmp_path_factory.mktemp("own")
    shutil.copy(compiled(), directory / "libown.so")
    (directory / "own_code.py").write_text(MODULE)
    functions_manifest(directory / "own.toml", PROGRAMS, more=LIBRARY)
    return directory


@pytest.fixture(scope="module")
def built(project, run):
    run("build", project / "own.toml", "-o", project / "out", quick=True)
    return project / "out" / "own"


def of(project, library, function="scaled", **changes):
    fields = {
        "programs": [Program(function, f"own_code:{function}", {"x": "float32[5]"})],
        "libraries": [Library(str(library), HANDLERS)],
        "targets": ["cpu-host"],
        "path": project / "python.toml",
    }
    return Manifest("made", **{**fields, **changes})


@pytest.fixture
def make(project, compiled, build_cache, tmp_path):
    """Builds a bundle of one function from Python: `make("scaled", shift=1)`."""

    def make(function, *libraries, shift=0, **changes):
        changes |= {"libraries": libraries} if libraries else {}
        manifest = of(project, compiled(shift), function, **changes)
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        return build(manifest, out, cache=build_cache, quiet=True).path

    return make


USE = """
import json, sys
import numpy as np
from prejit.runtime import load
bundle = load(sys.argv[1], on_mismatch="error")
scaled = bundle.call("scaled", x=np.linspace(-1, 1, 5, dtype=np.float32))
looped = bundle.call("in_a_loop", x=np.arange(4, dtype=np.float32))
mapped = [line for line in open("/proc/self/maps") if "memfd:prejit" in line and "x" in line.split()[1]]
sources = [each.source for each in bundle.report()]
print(json.dumps([scaled.tolist(), looped.tolist(), len(mapped), "jax" in sys.modules, sources]))
"""


def test_a_fresh_process_runs_handlers_of_the_bundles_library(built, project, python, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(built, moved)
    said = json.loads(python(USE, moved, PYTHONPATH="").stdout.splitlines()[-1])
    np.testing.assert_allclose(said[0], EXPECTED, rtol=1e-6)
    np.testing.assert_array_equal(said[1], [1, 0, -1, -2])  # 1 - x, three times over
    assert said[2:] == [1, False, ["loaded", "loaded"]]


def test_keys_hold_the_digest_of_the_library(project, run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns("out"))
    library = copy / "libown.so"
    # Other bytes and the same code; no cache of an earlier run has them.
    library.write_bytes(library.read_bytes() + os.urandom(8))
    for counts in ("compiled 2, cached 0", "compiled 0, cached 2"):
        assert counts in run("build", copy / "own.toml", "-o", copy / "out", quick=True).stderr


def test_arrays_of_jax_other_sizes_and_a_fallback_reach_the_library(built):
    import jax

    loaded = load(built)
    of_jax = loaded.call("scaled", x=jax.numpy.asarray(X))  # on the client of jax itself
    np.testing.assert_allclose(of_jax, EXPECTED, rtol=1e-6)
    with pytest.warns(FallbackWarning, match="no bucket has the sizes"):
        found = loaded.call("scaled", x=X[:3])
    np.testing.assert_allclose(found, EXPECTED[:3], rtol=1e-6)
    for source in ("compiled", "kept"):
        with pytest.warns(FallbackWarning, match="jaxlib"):
            loaded = load(built, fingerprint=other_jaxlib())
        np.testing.assert_allclose(loaded.call("scaled", x=X), EXPECTED, rtol=1e-6)
        assert loaded.report()[0].source == source


def other_jaxlib(**changes):
    return replace(Fingerprint.current(), jaxlib="0.1.2", **changes)


@pytest.fixture
def nothing_is_mapped(monkeypatch):
    """Makes the test fail where a library reaches the dynamic linker."""
    monkeypatch.setattr(kernels, "_open_sealed", lambda *_: pytest.fail("it was opened"))
    monkeypatch.setattr(kernels, "_opened", {})


@pytest.mark.usefixtures("nothing_is_mapped")
def test_a_machine_that_lacks_an_extension_does_not_open_the_library(built):
    features = Fingerprint.current().cpu_features
    lesser = tuple(name for name in features if name != "sse4.2")
    with pytest.warns(FallbackWarning, match="cpu_features"):
        loaded = load(built, fingerprint=other_jaxlib(cpu_features=lesser))
    with pytest.raises(BuildError, match=r"it calls scale .*cpu_features: .*all but sse4\.2"):
        loaded.call("scaled", x=X)


def test_a_function_with_another_form_runs_on_other_platforms(make):
    """The program of a GPU calls nothing, so a GPU target may be in the same bundle."""
    from prejit.runtime.device.portable import custom_calls

    path = make("anywhere")
    loaded = load(path)
    np.testing.assert_allclose(loaded.call("anywhere", x=X), EXPECTED, rtol=1e-6)
    [program] = loaded.config.programs
    portable = loaded._programs._portable_of(program)
    assert program.calls == ("scale",)
    for platform, has_call in (("cpu", True), ("cuda", False)):
        calls = custom_calls(portable, program.platforms or (), platform)
        assert ("scale" in calls) == has_call


@pytest.mark.thorough
def test_bundles_with_other_libraries_or_other_symbols_of_the_same_names_do_not_mix(make, compiled):
    swapped = Library(str(compiled()), {"negate": "ScaleHandler", "scale": "NegateHandler"})
    plain, shifted = (load(make("scaled", shift=each)) for each in (0, 1))
    other = load(make("scaled", swapped))  # its bytes are those of `plain`
    shifted_x = np.tanh(X * np.float32(2.5) + 1)
    for _ in range(2):
        for bundle, expected in ((plain, EXPECTED), (shifted, shifted_x), (other, np.tanh(-X))):
            np.testing.assert_allclose(bundle.call("scaled", x=X), expected, rtol=1e-6)


@pytest.mark.thorough
def test_a_library_whose_own_libraries_are_missing_is_a_mismatch_that_names_them(make, compiled):
    """It builds, because a build opens no library."""
    needy = compiled(2, needs="libnothere.so.7")
    path = make("scaled", Library(str(needy), HANDLERS))
    with pytest.raises(MismatchError, match=r"libraries: needs libown2.*libnothere\.so\.7"):
        load(path, on_mismatch="error")
    with pytest.warns(FallbackWarning, match="libraries"):
        loaded = load(path)
    with pytest.raises(BuildError, match=r"it calls scale .*libnothere\.so\.7"):
        loaded.call("scaled", x=X)


def test_a_library_that_xla_does_not_take_is_an_error_of_kernels(built, monkeypatch):
    def refused(*_):
        raise KernelError("XLA does not take the handler scale: another version")

    monkeypatch.setattr(kernels, "register", refused)
    with pytest.raises(MismatchError, match=r"libraries: .*another version"):
        load(built, on_mismatch="error")


@pytest.mark.thorough
def test_the_page_shows_what_works(build_cache, compiled, run, tmp_path):
    """The first C++, Python and TOML of docs/how-to/own-library.md, and its command for x86-64-v2."""
    import jax

    compiled()  # skips where there is no compiler
    page = PAGE.read_text()
    code, command, python, manifest = (
        page.split(f"```{language}\n", 1)[1].split("```")[0]
        for language in ("cpp", "sh", "python", "toml")
    )
    (tmp_path / "scale.cc").write_text(code)
    (tmp_path / "page_code.py").write_text(python)
    manifest = manifest.replace("my_package.model:", "page_code:").replace("x86-64-v3", "x86-64-v2")
    (tmp_path / "m.toml").write_text(manifest)
    flags = [word for word in command.split("-I")[0].split()[1:] if word != "-march=x86-64-v3"]
    flags = [str(tmp_path / word) if "scale." in word else word for word in flags]
    compiler = next(find_compilers("x86-64-v2", build_cache))
    problem = compiler.run([*compiler.flags, *flags, "-w", "-isystem", jax.ffi.include_dir()])
    assert not problem
    run("build", tmp_path / "m.toml", "-o", tmp_path / "out", quick=True)
    x = np.ones((8, 128), np.float32)
    np.testing.assert_array_equal(load(tmp_path / "out/scaled").call("scaled", x=x), x * 2.5)


# Damage


@pytest.mark.usefixtures("nothing_is_mapped")
def test_a_damaged_library_is_rejected_before_it_is_opened(built, tmp_path):
    copy = shutil.copytree(built, tmp_path / "copy")
    [contents] = contents_of(built).values()
    digest = contents.config.libraries[0].digest
    file = blob(copy, digest)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(RejectError, match=digest.removeprefix("sha256:")):
        load(copy)
    assert main(["verify", str(copy)]) == RejectError.exit_code


def test_a_library_that_is_not_what_the_config_says_is_rejected(built):
    [contents] = contents_of(built).values()
    [library] = contents.config.libraries
    content = blob(built, library.digest).read_bytes()
    check_library(content, library, "x86_64", "path")
    lacking = replace(library, handlers={"scale": "Missing"})
    for given, told, architecture, complaint in (
        (content, library, "aarch64", "expected a library for aarch64, found one for x86_64"),
        (content, lacking, "x86_64", "expected exports Missing"),
        (content + b"\0", library, "x86_64", "expected sha256"),
    ):
        with pytest.raises(RejectError, match=complaint):
            check_library(given, told, architecture, "path")


def test_tables_that_contradict_themselves_are_rejected(built):
    [contents] = contents_of(built).values()
    config, manifest = contents.config, contents.manifest
    [library] = config.libraries
    first, second = config.programs

    def calling(*calls):
        return {"programs": (replace(first, calls=calls), second)}

    other = replace(library, digest="sha256:" + "f" * 64)
    on_cuda = replace(config.requirement, platform="cuda")
    silent = tuple(replace(each, calls=None) for each in config.programs)
    for complaint, changes in (
        ("expected libraries with the handlers", {"libraries": None}),
        ("each once, sorted; found ()", calling()),
        ("each once, sorted; found ('scale', 'negate')", calling("scale", "negate")),
        ("found no ['else']", calling("else")),
        ("expected a program that calls 'libown.so'", {"programs": silent}),
        ("digests, each once", {"libraries": (library, library)}),
        ("expected each handler once", {"libraries": (library, other)}),
        ("expected names of handlers", {"libraries": (replace(library, handlers={"a b": "c"}),)}),
        ("expected digests", {"libraries": (replace(library, digest="../lib"),)}),
        ("expected libraries for cpu", {"requirement": on_cuda}),
    ):
        forged = replace(config, **changes)
        with pytest.raises(RejectError) as caught:
            check_config(to_json(forged), config.target, forged.requirement, "c")
        assert complaint in str(caught.value)
    check_library_layers(config, manifest, "m")
    [own] = [layer for layer in manifest.layers if layer.digest == library.digest]
    others = tuple(layer for layer in manifest.layers if layer != own)
    for layers in (others, (*manifest.layers, own)):
        with pytest.raises(RejectError, match="expected libraries sha256"):
            check_library_layers(config, replace(manifest, layers=layers), "m")
    large = (*others, replace(own, size=(256 << 20) + 1))
    with pytest.raises(RejectError, match="expected at most 268435456 bytes"):
        check_manifest(to_json(replace(manifest, layers=large)), "m")


def test_another_reader_and_the_command_line_read_it(built, ran):
    [target] = second_reader.read(built)
    assert target.config["libraries"][0]["handlers"] == HANDLERS
    assert main(["inspect", str(built)]) == 0
    assert "library libown.so, " in (said := ran("verify", built).out)
    assert "negate, scale" in said


# What a build refuses


def test_a_useless_library_is_told_with_its_place_and_fix(project, compiled, build_cache, tmp_path):
    good, store = compiled(), DirectoryStore.open(build_cache)
    content = good.read_bytes()

    def written(name, changed):
        (tmp_path / name).write_bytes(changed)
        return tmp_path / name

    def with_machine(number):
        return content[:18] + struct.pack("<H", number) + content[20:]

    arm, sparc = (written(f"{number}.so", with_machine(number)) for number in (183, 43))
    script = written("script.so", b"#!/bin/sh\n")
    static = written("static.so", content[:16] + struct.pack("<H", 2) + content[18:])
    once = [Library(str(good), {"scale": "ScaleHandler"})]
    typo = [Library(str(good), {"scale": "Scale"})]
    for manifest, complaint, fix in (
        (of(project, script), r"library\[0\].path: .*script.so: expected a sh.*not an ELF", ""),
        (of(project, static), "no shared library", "-shared"),
        (of(project, sparc), "expected a library for x86_64 or aarch64", "compile it for"),
        (of(project, arm), "is for aarch64: expected a CPU target.*found cpu-host", "add a target"),
        (of(project, good, libraries=typo), r"library\[0\].handlers: .*no Scale; it exports", ""),
        (of(project, good, libraries=once * 2), "expected one library with 'scale'", "targets ="),
    ):
        with pytest.raises(ManifestError, match=f"(?s){complaint}") as caught:
            plan_build(manifest, store)
        assert fix in str(caught.value.hint)


def test_a_manifest_tells_its_mistakes_about_libraries(project, run):
    wrong = LIBRARY.replace('path = "libown.so"', 'path = "libwon.so"\ntargets = ["cpu-hots"]')
    wrong = wrong.replace('scale = "ScaleHandler"', '"a b" = "ScaleHandler", n = 3')
    file = functions_manifest(project / "wrong.toml", PROGRAMS, more=wrong)
    told = run("plan", file, status=2).stderr
    for line in (
        'library[0].path: expected a file at "libwon.so", relative to the manifest; found none',
        'library[0].targets[0]: expected the name of a target of this manifest; found "cpu-hots"',
        'library[0].handlers."a b": expected letters, digits',
        "library[0].handlers.n: expected the name of a symbol that the library exports; found 3",
    ):
        assert line in told
    assert "did you mean" in told


def test_a_custom_call_of_no_library_is_told(make):
    with pytest.raises(BuildError, match=r"calls nobody, which is in no \[\[library\]\]") as caught:
        make("unknown")
    assert 'handlers = { "nobody" = SYMBOL }' in str(caught.value.hint)


def test_a_file_that_calls_a_handler_is_bound_or_told(project, compiled, build_cache, tmp_path):
    """StableHLO from elsewhere, in which jax.export checks nothing."""
    text = """
    module { func.func @main(%x: tensor<5xf32>) -> tensor<5xf32> {
      %y = stablehlo.custom_call @negate(%x) {mhlo.backend_config = {}, api_version = 4 : i32}
        : (tensor<5xf32>) -> tensor<5xf32>
      return %y : tensor<5xf32> } }
    """
    (tmp_path / "negate.mlir").write_text(text)
    programs = [Program("negate", str(tmp_path / "negate.mlir"))]
    manifest = of(project, compiled(), programs=programs)
    options = {"cache": build_cache, "quiet": True}
    path = build(manifest, tmp_path / "out", **options).path
    np.testing.assert_array_equal(load(path).call("negate", X), -X)
    with pytest.raises(BuildError, match="No FFI handler registered for negate") as caught:
        build(replace(manifest, libraries=[]), tmp_path / "o", **options)
    assert "handlers = { negate = SYMBOL }" in str(caught.value.hint)


def test_each_target_gets_its_own_library_and_one_without_is_told(make, compiled):
    only = Library(str(compiled()), HANDLERS, ("cpu-x86-64-v3",))
    with pytest.raises(BuildError, match="target cpu-host: program scaled: it calls ") as told:
        make("scaled", only, targets=("cpu-x86-64-v3", "cpu-host"))
    assert "add a [[library]] that is built for cpu-host" in str(told.value.hint)
    own = Library(str(compiled(1)), HANDLERS, ("cpu-host",))
    general = Library(str(compiled()), HANDLERS, ("cpu-x86-64-v2",))
    path = make("scaled", own, general, targets=("cpu-x86-64-v2", "cpu-host"))
    loaded = load(path)
    shift = {"cpu-host": 1, "cpu-x86-64-v2": 0}[loaded.target]
    found = loaded.call("scaled", x=X)
    np.testing.assert_allclose(found, np.tanh(X * np.float32(2.5) + shift), rtol=1e-6)
    libraries = {name: each.config.libraries for name, each in contents_of(path).items()}
    names = {name: [each.name for each in found] for name, found in libraries.items()}
    assert names == {"cpu-host": ["libown1.so"], "cpu-x86-64-v2": ["libown0.so"]}
