"""Whether a build compares programs with their references, and `verify --run` does so after it."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tests.manifests import functions_manifest

import prejit.runtime
from prejit.compiler import BuildError, ManifestError, Program, ProgramCheck, build, read_manifest
from prejit.compiler.pipeline.measure import golden_answers
from prejit.compiler.pipeline.measure.reference_checks import SOURCE
from prejit.compiler.pipeline.pack.user_sources import manifest_sources

W = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


def score(params, x, *, scale=1):
    return {"y": jnp.tanh(x @ params["w"]) * scale, "rows": jnp.int32(x.shape[0])}


def reference(params, x, *, scale=1):
    assert type(x) is np.ndarray
    return {"y": np.tanh(x @ params["w"]) * scale, "rows": x.shape[0]}


@pytest.fixture
def make(build_cache, tmp_path):
    def make(check, **more):
        sizes = {"args": {"x": "float32[{batch}, 8]"}, "buckets": {"batch": [1, 4]}}
        program = Program("score", fn=score, check=check, params={"w": W}, **sizes, **more)
        return build([program], tmp_path, name="checked", cache=build_cache, quiet=True).path

    return make


def test_numpy_gives_the_golden_answer(make, said):
    path = make(ProgramCheck(function=reference, tolerance=1e-4), static={"scale": [1, 3]})
    with prejit.runtime.load(path) as bundle:
        golden = {each.name: each.golden for each in bundle.config.programs}
    assert len(golden) == 4
    assert {(each.source, each.tolerance) for each in golden.values()} == {(SOURCE, 13)}
    answers = json.loads(said("verify", path, "--run", "--json"))["answers"]
    assert {each["source"] for each in answers} == {SOURCE}
    assert all(each["share"] < 1 for each in answers)


def test_a_wrong_element_another_result_or_what_is_beyond_the_tolerance_is_named(make):
    def wrong(params, x):
        found = reference(params, x)
        found["y"][-1, 2] += 0.25
        x[:] = 0  # a function may write into its arguments
        return found

    with pytest.raises(BuildError) as error:
        make(ProgramCheck(function=wrong))
    first, second = str(error.value).splitlines()
    assert "program score/batch1: check: expected what" in first
    assert "at y[0, 2], its largest difference, 0.25 (tolerance 0.001)" in first
    assert "program score/batch4" in second
    assert "at y[3, 2]" in second
    assert "[program.check]" in str(error.value.hint)

    def near(params, x):
        found = reference(params, x)
        return {**found, "y": found["y"] * 1.01}

    def one_more(params, x):
        return {**reference(params, x), "rows": 1 + x.shape[0]}

    make(ProgramCheck(function=near, tolerance=0.02))
    for function, said in (
        (one_more, "found 1 at rows, its largest difference, 1 "),
        (near, "its largest difference"),
        (lambda params, x: {"y": x}, "expected the results of the program: rows is missing"),
        (lambda params, x: {"y": x, "rows": 1}, r"y: expected float32\[1, 3\], as the program"),
        (lambda params, x: 1 / 0, "ZeroDivisionError"),
    ):
        with pytest.raises(BuildError, match=said):
            make(ProgramCheck(function=function, tolerance=0.001))


def save(path, rows, **changed):
    x = np.arange(rows * 8, dtype=np.float32).reshape(rows, 8) / 64
    results = reference({"w": W}, x) | changed
    np.savez(path, **{"args.x": x}, **{f"results.{name}": each for name, each in results.items()})
    return str(path)


@pytest.mark.thorough
def test_files_have_arguments_of_their_own_and_must_fit(make, tmp_path):
    files = tuple(save(tmp_path / f"{rows}.npz", rows) for rows in (1, 4))
    path = make(ProgramCheck(files=files))
    with prejit.runtime.load(path) as bundle:
        assert {each.golden.source for each in bundle.config.programs} == {bundle.target}
    wrong = save(tmp_path / "wrong.npz", 4, y=np.zeros((4, 3), np.float32))
    with pytest.raises(BuildError, match=r"score/batch4: check: expected what .*wrong\.npz has, 0"):
        make(ProgramCheck(files=(*files, wrong)))
    for y, problem in (
        (np.zeros((1, 3), np.float32), r"results\.y: expected the shape \[4, 3\], found \[1, 3\]"),
        (np.zeros((4, 3), np.complex64), r"results\.y: expected float32, found complex64"),
        (np.full((4, 3), np.nan, np.float32), r"has, nan, found "),
    ):
        files = (save(tmp_path / "1.npz", 1), save(tmp_path / "4.npz", 4, y=y))
        with pytest.raises(BuildError, match=problem):
            make(ProgramCheck(files=files))
    (tmp_path / "text.npz").write_text("no arrays")
    more = save(tmp_path / "more.npz", 4, z=np.zeros(3))
    for file, problem in (
        (save(tmp_path / "odd.npz", 3), r"score/batch4: args\.x \[4, 8\]\), found .* \[3, 8\]"),
        (more, r"more\.npz: expected results .*results\.y\), found results\.z"),
        (str(tmp_path / "text.npz"), "cannot read arrays"),
    ):
        with pytest.raises(ManifestError, match=problem):
            make(ProgramCheck(files=(file,)))


def written(directory, check):
    keys = 'function = "model:score"; args = { x = "float32[8]" }\n[program.check]\n'
    return functions_manifest(directory / "b.toml", {"score": keys + check})


def test_mistakes_of_a_manifest_are_named(tmp_path):
    for text, problem in (
        ("tolerance = 0.1", "check: expected function or files in it"),
        ('function = "model"', "check.function: expected a function as package.module"),
        ('files = ["no.npz"]', "check.files[0]: "),
        ('function = "m:f"\ntolerance = 1.5', "expected a number between 0 and 1; found 1.5"),
        ('function = "m:f"\ntolerance = nan', "expected a number between 0 and 1; found NaN"),
        ('function = "m:f"\nrtol = 1', "check.rtol: unknown key"),
    ):
        with pytest.raises(ManifestError) as error:
            read_manifest(written(tmp_path, text))
        assert "program[0].check" in str(error.value)
        assert problem in str(error.value)


@pytest.mark.thorough
def test_a_manifest_names_a_function_of_its_own_module(tmp_path, build_cache):
    (tmp_path / "model.py").write_text("def score(x):\n    return x * 2\n")
    (tmp_path / "expected.py").write_text("def double(x):\n    return x + x\n")
    manifest = read_manifest(written(tmp_path, 'function = "expected:double"'))
    sources = {source.name for source in manifest_sources(manifest)}
    assert sources == {"model.py", "expected.py"}
    path = build(manifest, tmp_path, cache=build_cache, quiet=True).path
    (tmp_path / "expected.py").write_text("def double(x):\n    return x - x\n")
    with pytest.raises(BuildError, match=r"b\.toml: program score: .* what expected:double has"):
        build(manifest, tmp_path, cache=build_cache, quiet=True)
    assert path.exists()


def endless(x):
    return lax.while_loop(lambda n: n != 7, lambda n: n + 2, x.shape[0] * 2)


def test_an_endless_loop_loses_its_golden_answer_alone(build_cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(golden_answers, "_CALL_SECONDS", 1.0)
    args = ["float32[2]"]
    programs = [Program(fn.__name__, fn=fn, args=args) for fn in (endless, jnp.sin)]
    path = build(programs, tmp_path, name="loops", cache=build_cache).path
    assert "endless gets no golden answer: its process took too long" in capsys.readouterr().err
    with prejit.runtime.load(path) as bundle:
        golden = {each.name: each.golden for each in bundle.config.programs}
    assert golden["endless"] is None
    assert golden["sin"].source == "cpu-host"
