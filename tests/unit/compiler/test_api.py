"""The Python API: manifests made in Python build, and have the mistakes of a file."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import prejit.compiler
import prejit.runtime
from prejit.compiler import Manifest, Model, Program
from prejit.runtime import load
from prejit.runtime.errors import BuildError, ManifestError, StoreError, UsageError


def score(params, x):
    return jnp.tanh(x @ params["layer"]["weight"]) + params["bias"]


def tree():
    random = np.random.default_rng(0)
    weight = random.standard_normal((4, 3), dtype=np.float32)
    return {"layer": {"weight": weight}, "bias": jnp.ones(3, jnp.float32)}


def scoring(params=None, **changes):
    given = {"fn": score, "args": {"x": "float32[{batch}, 4]"}}
    given |= {"buckets": {"batch": [2, 1]}, "params": tree() if params is None else params}
    return Program("score", **{**given, **changes})


@pytest.fixture
def options(tmp_path):
    return {"cache": tmp_path / "cache", "workers": 1, "quiet": True}


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    """A module as those of equinox: a pytree that can be called."""

    factor: Any

    def __call__(self, x):
        return x * self.factor


def test_functions_get_the_pytrees_that_were_given(tmp_path, options):
    def add(params, x):
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


def test_python_and_toml_give_the_same_bundle(tmp_path, options):
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


DOTTED = {"a.b": np.ones(1, np.float32), "a": {"b": np.ones(1, np.float32)}}


def test_a_mistake_in_python_is_told_as_in_a_file(tmp_path, options):
    no_dtype = "program[0].args.x: expected a dtype (did you"
    for given, problems in (
        (
            scoring(buckets={"batch": [0]}),
            ["program[0].buckets.batch[0]: expected an integer from"],
        ),
        (scoring(args={"x": "float33[4]"}), [no_dtype]),
        (scoring(fn=3), ['[0].function: expected "package.module:attribute", or the']),
        (Model("no-such-directory"), ["generate: missing", "model.source: expected a directory"]),
        (Model(module=scoring, params={}), ["generate: missing"]),
        (scoring(DOTTED), ["params: expected different names of leaves, found 'a.b'"]),
        (scoring({"a": object()}), ["params: a: expected an array of one of"]),
    ):
        what = {"model": given} if isinstance(given, Model) else {"programs": [given]}
        targets = [] if problems == [no_dtype] else ["cpu-host"]
        problems = problems if targets else ["target: missing; expected at least one", no_dtype]
        manifest = Manifest("s", targets=targets, **what)
        with pytest.raises(ManifestError) as caught:
            prejit.compiler.build(manifest, tmp_path / "out", **options)
        text = str(caught.value)
        assert all(problem in text for problem in problems)
        assert len(text.splitlines()) == len(problems)
        assert text.startswith("manifest '")
        assert caught.value.hint
    assert not (tmp_path / "out").exists()


def test_a_missing_file_target_or_name_is_an_error(tmp_path, options):
    with pytest.raises(StoreError, match=r"missing\.toml: cannot read the manifest"):
        prejit.compiler.plan(tmp_path / "missing.toml", cache=options["cache"])
    manifest = Manifest("score", programs=[scoring()], targets=["cpu-host"])
    with pytest.raises(UsageError, match="expected a target of manifest 'score', one of cpu-host"):
        prejit.compiler.build(manifest, tmp_path, targets=("cpu-hots",), **options)
    one = prejit.compiler.program(score, tree(), "float32[2,4]")
    with pytest.raises(UsageError, match="there are 2 programs"):
        prejit.compiler.build([one, one], tmp_path, **options)
    unfit = dataclasses.replace(one, name="trainStep")
    with pytest.raises(
        UsageError, match="name: expected the bundle's name, because 'trainStep' is"
    ):
        prejit.compiler.build(unfit, tmp_path, **options)
    with pytest.raises(UsageError, match="expected a manifest or programs, found function at 0"):
        prejit.compiler.build([score], tmp_path, **options)
    with pytest.raises(UsageError, match="the manifest has the name"):
        prejit.compiler.build(tmp_path / "m.toml", tmp_path, name="other", **options)


def keyed(x, *, y, mode="sum"):
    return x + y if mode == "sum" else x - y


def leaves(tree):
    return jax.tree.leaves(tree)


def test_a_program_has_the_arguments_of_an_example_call(tmp_path):
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
    jitted = jax.jit(keyed, static_argnames="mode")
    for value in (Settings(), 2.5, None, (1, 2), nnx.graphdef(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))):
        found = prejit.compiler.program(jitted, "float32[3]", y="float32[3]", mode=value)
        assert found.static == {"mode": (value,)}
        prejit.compiler.plan(found, cache=tmp_path)
    generator = (each for each in ())
    args = {"x": "float32[3]", "y": "float32[3]"}
    for value, expected in (
        (generator, "another process can compare.*found <generator .*a builtins.generator"),
        ([1, 2], r"Python hashes, as jax.jit does; found \[1, 2\]"),
    ):
        by_hand = prejit.compiler.Program("keyed", fn=keyed, args=args, static={"mode": (value,)})
        with pytest.raises(
            ManifestError, match=rf"static.mode\[0\]: expected a value that {expected}"
        ):
            prejit.compiler.plan(by_hand, cache=tmp_path)


@dataclasses.dataclass(frozen=True)
class Settings:
    factor: int = 2


def test_what_no_bundle_can_hold_is_an_error(tmp_path, options):
    for key in (1.5, (1, 2), b"a", None):
        one = prejit.compiler.program(leaves, {"a": {key: "float32[2]"}})
        with pytest.raises(BuildError, match=r"keys are texts or integers, found the k") as caught:
            prejit.compiler.build(one, tmp_path, **options)
        assert repr(key) in str(caught.value)
    shape = jax.ShapeDtypeStruct((1,) * 65, np.float32)
    with pytest.raises(BuildError, match="expected at most 64 dimensions, found 65"):
        prejit.compiler.build(prejit.compiler.program(leaves, shape), tmp_path, **options)
    assert not (tmp_path / "leaves").exists()

    def placed(a, /, *, b):
        return a + b

    missing = "args: missing a required argument: "
    for function, named, problem in (
        (lambda x: x, {"x": "float32[]"}, "expected a function with a name"),
        (score, {"x": "float32[]"}, f"'score': {missing}'params'"),
        (keyed, {"z": 1}, f"'keyed': {missing}'x'"),
    ):
        with pytest.raises(ManifestError, match=problem) as refused:
            prejit.compiler.program(function, **named)
        assert "Program(" in str(refused.value.hint)
    with pytest.raises(ManifestError, match="all arrays by position or all by name"):
        prejit.compiler.program(placed, "float32[]", b="float32[]")
