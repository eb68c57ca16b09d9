"""The Python API: manifests made in Python build, and have the mistakes of a file."""

from __future__ import annotations

import dataclasses
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tests.decoders import write_random
from tests.layouts import index_of

import prejit.compiler
import prejit.runtime
from prejit.compiler import Generate, Manifest, Mesh, Model, Program, TargetTable
from prejit.compiler.pipeline.pack import compatibility
from prejit.runtime import load
from prejit.runtime.errors import BuildError, ManifestError, StoreError, UsageError


def score(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["layer"]["weight"]) + params["bias"]


def tree() -> dict[str, Any]:
    random = np.random.default_rng(0)
    weight = random.standard_normal((4, 3), dtype=np.float32)
    return {"layer": {"weight": weight}, "bias": jnp.ones(3, jnp.float32)}


def scoring(params: Any = None, **changes: Any) -> Program:
    given = {
        "fn": score,
        "args": {"x": "float32[{batch}, 4]"},
        "buckets": {"batch": [2, 1]},
        "params": tree() if params is None else params,
    }
    return Program("score", **{**given, **changes})


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"cache": tmp_path / "cache", "workers": 1, "quiet": True}


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    """A module as those of equinox: a pytree that can be called."""

    factor: Any

    def __call__(self, x: Any) -> Any:
        return x * self.factor


def test_functions_get_the_pytrees_that_were_given(tmp_path: Path, options: dict[str, Any]) -> None:
    def add(params: Any, x: Any) -> Any:
        assert isinstance(params, Pair)
        assert isinstance(params.right, list)
        return x * params.left + params.right[0] - params.right[1]

    given = Pair(np.float32(3), [np.ones(2, np.float64), jnp.zeros(2, jnp.bfloat16)])
    module, model = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), Scaled(jnp.full(3, 2.0))
    x, one = np.ones(3, np.float32), np.ones((1, 4), np.float32)
    programs = [
        Program("add", fn=add, args={"x": "float32[2]"}, params=given),
        Program("linear", fn=module, args=["float32[1, 4]"]),
        Program("applied", fn=lambda model, x: model(x), args=[model, x]),
    ]
    built = prejit.compiler.build(programs, tmp_path / "out", name="m", **options)
    loaded = load(built.path, on_mismatch="error")
    assert np.asarray(loaded.call("add", x=np.full(2, 2, np.float32))).tolist() == [7, 7]
    np.testing.assert_allclose(loaded.call("linear", one), module(one), rtol=1e-5)
    np.testing.assert_allclose(loaded.call("applied", model, x), np.full(3, 2.0))


def test_python_and_toml_give_the_same_bundle(tmp_path: Path, options: dict[str, Any]) -> None:
    params = tree()
    flat = {"layer.weight": params["layer"]["weight"], "bias": np.asarray(params["bias"])}
    save_file(flat, tmp_path / "params.safetensors")
    (tmp_path / "model.py").write_text(
        "import jax.numpy as jnp\n\ndef score(params, x):\n"
        '    return jnp.tanh(x @ params["layer"]["weight"]) + params["bias"]\n'
    )
    (tmp_path / "m.toml").write_text(
        '[bundle]\nname = "score"\n[[program]]\nname = "score"\nfunction = "model:score"\n'
        'args = { x = "float32[{batch}, 4]" }\nbuckets = { batch = [1, 2] }\n'
        'params = "params.safetensors"\n[[target]]\nname = "cpu-host"\n'
    )
    manifest = Manifest("score", programs=[scoring()], targets=["cpu-host"])
    ours = prejit.compiler.build(manifest, tmp_path / "python", **options)
    theirs = prejit.compiler.build(tmp_path / "m.toml", tmp_path / "toml", **options)
    assert ours.digest == theirs.digest
    assert theirs.compiled == 0


def test_a_model_builds_from_values(
    tmp_path: Path, options: dict[str, Any], build_cache: Path
) -> None:
    source = write_random("gpt2", tmp_path / "gpt2")
    manifest = Manifest(
        "model",
        model=Model(str(source)),
        generate=Generate(batch=(1,), prompt=(8,), context=(16,)),
        targets=[TargetTable("cpu-host")],
        mesh=Mesh(1, 1),
    )
    assert manifest.mesh is None, "a mesh of one device is none"
    built = prejit.compiler.build(
        manifest, tmp_path / "out", measure=False, **options | {"cache": build_cache}
    )
    assert len(load(built.path).generate([1, 2, 3], max_new_tokens=4).token_ids) == 4
    planned = prejit.compiler.plan(manifest, cache=build_cache)
    assert {each.state for each in planned} == {"cached"}


def dotted() -> Program:
    return scoring({"a.b": np.ones(1, np.float32), "a": {"b": np.ones(1, np.float32)}})


MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"programs": lambda: [scoring(buckets={"batch": [0]})]},
        ["program[0].buckets.batch[0]: expected an integer from 1 to"],
    ),
    (
        {"programs": lambda: [scoring(args={"x": "float33[4]"})], "targets": lambda: []},
        ["target: missing; expected at least one", "program[0].args.x: expected a dtype (did you"],
    ),
    (
        {"programs": lambda: [scoring(fn=3)]},
        ['program[0].function: expected "package.module:attribute", or the path'],
    ),
    (
        {"model": lambda: Model("no-such-directory")},
        ["generate: missing", "model.source: expected a directory"],
    ),
    ({"model": lambda: Model(module=scoring, params={})}, ["generate: missing"]),
    ({"programs": lambda: [dotted()]}, ["params: expected different names of leaves, found 'a.b'"]),
    (
        {"programs": lambda: [scoring({"a": object()})]},
        ["params: a: expected an array of one of"],
    ),
]


@pytest.mark.parametrize(("given", "problems"), MISTAKES)
def test_a_mistake_in_python_is_reported_as_one_in_a_file(
    given: dict[str, Any], problems: list[str], tmp_path: Path, options: dict[str, Any]
) -> None:
    made = {"targets": ["cpu-host"], **{name: make() for name, make in given.items()}}
    with pytest.raises(ManifestError) as caught:
        prejit.compiler.build(Manifest("s", **made), tmp_path / "out", **options)
    text = str(caught.value)
    assert all(problem in text for problem in problems)
    assert len(text.splitlines()) == len(problems)
    assert text.startswith("manifest '")
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


def test_a_missing_file_target_or_name_is_an_error(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match=r"missing\.toml: cannot read the manifest"):
        prejit.compiler.plan(tmp_path / "missing.toml", cache=options["cache"])
    manifest = Manifest("score", programs=[scoring()], targets=["cpu-host"])
    with pytest.raises(UsageError, match="expected a target of manifest 'score', one of cpu-host"):
        prejit.compiler.build(manifest, tmp_path, targets=("cpu-hots",), **options)
    one = prejit.compiler.program(score, tree(), "float32[2,4]")
    with pytest.raises(UsageError, match="there are 2 programs"):
        prejit.compiler.build([one, one], tmp_path, **options)
    with pytest.raises(UsageError, match="expected a manifest or programs, found function at 0"):
        prejit.compiler.build([score], tmp_path, **options)  # type: ignore[list-item]
    with pytest.raises(UsageError, match="the manifest has the name"):
        prejit.compiler.build(tmp_path / "m.toml", tmp_path, name="other", **options)


def test_a_build_shows_its_progress_and_what_soon_cannot_be_read_unless_it_is_quiet(
    tmp_path: Path,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    manifest = of("score", double)
    for quiet, days, compiled, old in ((True, 170, 0, 0), (False, 100, 1, 0), (False, 170, 1, 1)):
        released = date.today() - timedelta(days=days)
        monkeypatch.setitem(compatibility._RELEASED, jax.__version__, released)
        given = {**options, "quiet": quiet, "cache": tmp_path / f"{quiet}{days}"}
        prejit.compiler.build(manifest, tmp_path / f"out{quiet}{days}", **given)
        captured = capfd.readouterr()
        assert (captured.out, captured.err == "") == ("", quiet)
        assert captured.err.count("compiled f for cpu-host") == compiled
        assert captured.err.count("score: its portable programs are of jax") == old
    assert len(index_of(tmp_path / "outTrue170" / "score")["manifests"]) == 1


def keyed(x: Any, *, y: Any, mode: str = "sum") -> Any:
    return x + y if mode == "sum" else x - y


def leaves(tree: Any) -> Any:
    return jax.tree.leaves(tree)


def test_a_program_has_the_arguments_of_an_example_call() -> None:
    x, y = np.ones(3, np.float32), "float32[3]"
    by_place = prejit.compiler.program(score, tree(), x)
    assert (by_place.name, by_place.fn, len(by_place.args)) == ("score", score, 2)
    assert by_place.args[1] is x
    jitted = jax.jit(keyed, static_argnames="mode", donate_argnames="y")
    by_name = prejit.compiler.program(jitted, x, y=y, mode="difference")
    assert by_name.fn is keyed
    assert list(by_name.args) == ["x", "y"]
    assert by_name.static == {"mode": ("difference",)}
    assert by_name.donate == ["y"]
    decorated = prejit.runtime.jit(score, bundle="none", name="other", donate_argnums=1)
    renamed = prejit.compiler.program(decorated, tree(), x)
    assert (renamed.name, renamed.fn, renamed.donate) == ("other", score, [1])


@pytest.mark.parametrize(
    ("function", "arguments", "problem"),
    [
        (lambda x: x, {"x": "float32[]"}, "expected a function with a name"),
        (score, {"x": "float32[]"}, "program 'score': args: missing a required argument: 'params'"),
        (keyed, {"z": 1}, "program 'keyed': args: missing a required argument: 'x'"),
    ],
)
def test_an_example_call_must_fit(function: Any, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ManifestError) as caught:
        prejit.compiler.program(function, **arguments)
    assert problem in str(caught.value)
    assert "Program(" in str(caught.value.hint)

    def placed(a: Any, /, *, b: Any) -> Any:
        return a + b

    with pytest.raises(ManifestError, match="all arrays by position or all by name"):
        prejit.compiler.program(placed, "float32[]", b="float32[]")


@dataclasses.dataclass(frozen=True)
class Settings:
    factor: int = 2


@pytest.mark.parametrize(
    "value", [Settings(), 2.5, None, (1, 2), nnx.graphdef(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))]
)
def test_a_static_argument_that_no_bundle_can_hold_is_an_error(value: Any) -> None:
    jitted = jax.jit(keyed, static_argnames="mode")
    expected = "'mode': expected a text, an integer or a boolean, found"
    with pytest.raises(ManifestError, match=f"{expected} {type(value).__name__}") as caught:
        prejit.compiler.program(jitted, "float32[3]", y="float32[3]", mode=value)
    assert "functools.partial" in str(caught.value.hint)
    args = {"x": "float32[3]", "y": "float32[3]"}
    by_hand = prejit.compiler.Program("keyed", fn=keyed, args=args, static={"mode": (value,)})
    with pytest.raises(ManifestError, match="expected a text, an integer or a boolean"):
        prejit.compiler.build(by_hand)


def test_odd_keys_and_dimensions_are_errors(tmp_path: Path, options: dict[str, Any]) -> None:
    for key in (1.5, (1, 2), b"a", None):
        one = prejit.compiler.program(leaves, {"a": {key: "float32[2]"}})
        with pytest.raises(BuildError, match=r"keys are texts or integers, found the k") as caught:
            prejit.compiler.build(one, tmp_path, **options)
        assert repr(key) in str(caught.value)
    shape = jax.ShapeDtypeStruct((1,) * 65, np.float32)
    with pytest.raises(BuildError, match="expected at most 64 dimensions, found 65"):
        prejit.compiler.build(prejit.compiler.program(leaves, shape), tmp_path, **options)
    assert not (tmp_path / "leaves").exists()


def double(x: Any) -> Any:
    return x * 2


def of(name: str, function: Any) -> Manifest:
    program = Program("f", fn=function, args={"x": "float32[4]"})
    return Manifest(name, programs=[program], targets=["cpu-host"])
