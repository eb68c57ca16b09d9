"""The Python API: manifests made in Python build, and have the mistakes of a file.

What callers give `build`, `plan` and `program` works as in jax.jit, or an error says what to give.
"""

import dataclasses
from collections import namedtuple
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tests.manifests import functions_manifest

from prejit.compiler import Manifest, Model, Program, build, plan, program
from prejit.runtime import FallbackWarning, jit, load
from prejit.runtime.errors import BuildError, ManifestError, StoreError, UsageError

X = np.arange(4, dtype=np.float32)
DOTTED = {"a.b": np.ones(1, np.float32), "a": {"b": np.ones(1, np.float32)}}


def score(params, x):
    return jnp.tanh(x @ params["layer"]["weight"]) + params["bias"]


def tree():
    random = np.random.default_rng(0)
    weight = random.standard_normal((4, 3), dtype=np.float32)
    return {"layer": {"weight": weight}, "bias": jnp.ones(3, jnp.float32)}


def scoring(params=None, **changes):
    given = {"fn": score, "args": {"x": "float32[{batch}, 4]"}, "buckets": {"batch": [2, 1]}}
    return Program("score", **{**given, "params": tree() if params is None else params, **changes})


def double(x):
    return x * 2


@pytest.fixture
def options(tmp_path):
    return {"output": tmp_path / "out", "cache": tmp_path / "cache", "workers": 1, "quiet": True}


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


Renamed = namedtuple("Renamed", ["class", "kept", "def"], rename=True)


def scaled(by, x):
    return x if by["factor"] is None else x * by["factor"]


def renamed(pair):
    return Renamed(pair[0] + 1, {"a": pair.kept}, pair[2])


def told_apart(x, k):
    factors = {int: 5, bool: 10, str: 7}
    return x * (factors[type(k)] + len(str(k)))


NONES = {"none": {"factor": None}, "array": {"factor": np.float32(3)}}
STATIC = {
    **{"bools": [1, True, 0], "texts": ["1", 1, True, "True"]},
    **{"signs": [-1, 0, 1], "spaces": ["a b", "0"]},
}
BY_SIZES = {  # functions, sizes whose number an integer holds, and others
    "power": (lambda x: x.sum() * x.shape[0] ** 4, (215, 1), (216, 1)),
    "product": (lambda x: x.sum() * (x.size * 65536), (4, 4095), (4, 8192)),
    "sum": (lambda x: x.sum() * (x.shape[0] ** 2 + x.shape[1] * 10**6), (3, 1000), (3, 2200)),
    "mean": (lambda x: x.mean() * (x.shape[0] // 2), (300, 3), (0, 0)),
}


@pytest.fixture(scope="module")
def path(build_programs):
    """A bundle of all functions that a test calls: one build for all tests."""
    opened = {"buckets": {"n": (2,), "m": (2,)}, "open_sizes": ("n", "m")}
    sized = {"args": ["float32[{n}, {m}]"], **opened}
    programs = [
        program(double, X),
        *(Program(name, fn=scaled, args=[each, X]) for name, each in NONES.items()),
        Program("whole", fn=lambda a, x: x, args=[None, X]),
        program(renamed, Renamed(X, X + 1, X + 2)),
        *(Program(n, fn=told_apart, args=[X], static={"k": each}) for n, each in STATIC.items()),
        *(Program(name, fn=each[0], **sized) for name, each in BY_SIZES.items()),
        Program("drawn", fn=jax.random.bits, args=["key[]"]),
    ]
    return build_programs(programs)


@pytest.fixture(scope="module")
def bundle(path):
    return load(path, on_mismatch="error")


def test_functions_get_the_pytrees_that_were_given(options):
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
    loaded = load(build(programs, name="m", **options).path, on_mismatch="error")
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
    keys = 'function = "model:score"; args = { x = "float32[{batch}, 4]" }; '
    keys += 'buckets = { batch = [1, 2] }; params = "params.safetensors"'
    manifest = functions_manifest(tmp_path / "score.toml", {"score": keys})
    ours = build(Manifest("score", programs=[scoring()], targets=["cpu-host"]), **options)
    theirs = build(manifest, **{**options, "output": tmp_path / "toml"})
    assert (ours.digest, theirs.compiled) == (theirs.digest, 0)


def test_a_mistake_in_python_is_told_as_in_a_file(options):
    no_size = "program[0].buckets.batch[0]: expected an integer from"
    no_dtype = "program[0].args.x: expected a dtype (did you"
    for given, problems in (
        (scoring(buckets={"batch": [0]}), [no_size]),
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
        with pytest.raises(ManifestError) as caught:
            build(Manifest("s", targets=targets, **what), **options)
        text = str(caught.value)
        assert all(problem in text for problem in problems)
        assert len(text.splitlines()) == len(problems)
        assert text.startswith("manifest '")
        assert caught.value.hint
    assert not options["output"].exists()


def test_a_missing_file_target_or_name_is_an_error(tmp_path, options):
    with pytest.raises(StoreError, match=r"missing\.toml: cannot read the manifest"):
        plan(tmp_path / "missing.toml", cache=options["cache"])
    manifest = Manifest("score", programs=[scoring()], targets=["cpu-host"])
    one = program(score, tree(), "float32[2,4]")
    unfit = dataclasses.replace(one, name="trainStep")
    for given, more, said in (
        (manifest, {"targets": ("cpu-hots",)}, "a target of manifest 'score', one of cpu-host"),
        ([one, one], {}, "there are 2 programs"),
        (unfit, {}, "name: expected the bundle's name, because 'trainStep' is"),
        ([score], {}, "expected a manifest or programs, found function at 0"),
        (tmp_path / "m.toml", {"name": "other"}, "the manifest has the name"),
    ):
        with pytest.raises(UsageError, match=said):
            build(given, **options, **more)


def test_a_function_needs_examples(options):
    for given in (double, jax.jit(double), 3, None):
        for step, more in ((build, options), (plan, {})):
            with pytest.raises(UsageError, match="expected a manifest or programs") as caught:
                step(given, **more)
            name = "double" if callable(given) else "function"
            assert f"build(program({name}, " in str(caught.value.hint)


def keyed(x, *, y, mode="sum"):
    return x + y if mode == "sum" else x - y


@dataclasses.dataclass(frozen=True)
class Settings:
    factor: int = 2


def test_a_program_has_the_arguments_of_an_example_call(tmp_path):
    x, y = np.ones(3, np.float32), "float32[3]"
    by_place = program(score, tree(), x)
    assert (by_place.name, by_place.fn, len(by_place.args)) == ("score", score, 2)
    assert by_place.args[1] is x
    jitted = jax.jit(keyed, static_argnames="mode", donate_argnames="y")
    by_name = program(jitted, x, y=y, mode="difference")
    assert (by_name.fn, [*by_name.args], by_name.donate) == (keyed, ["x", "y"], ["y"])
    assert by_name.static == {"mode": ("difference",)}
    both = program(jax.jit(score, donate_argnums=1), x=x, params=tree())
    assert ([*both.args], both.donate) == (["params", "x"], ["x"])
    decorated = jit(score, bundle="none", name="other", donate_argnums=1)
    renamed = program(decorated, tree(), x)
    assert (renamed.name, renamed.fn, renamed.donate) == ("other", score, [1])
    jitted = jax.jit(keyed, static_argnames="mode")
    for value in (Settings(), 2.5, None, (1, 2), nnx.graphdef(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))):
        found = program(jitted, "float32[3]", y="float32[3]", mode=value)
        assert found.static == {"mode": (value,)}
        plan(found, cache=tmp_path)
    generator = (each for each in ())
    for value, expected in (
        (generator, "another process can compare.*found <generator .*a builtins.generator"),
        ([1, 2], r"Python hashes, as jax.jit does; found \[1, 2\]"),
    ):
        by_hand = Program("keyed", fn=keyed, args={"x": y, "y": y}, static={"mode": (value,)})
        said = rf"static.mode\[0\]: expected a value that {expected}"
        with pytest.raises(ManifestError, match=said):
            plan(by_hand, cache=tmp_path)


def leaves(tree):
    return jax.tree.leaves(tree)


def test_what_no_bundle_can_hold_is_an_error(options):
    for key in (1.5, (1, 2), b"a", None):
        with pytest.raises(BuildError, match=r"keys are texts or integers, found the k") as caught:
            build(program(leaves, {"a": {key: "float32[2]"}}), **options)
        assert repr(key) in str(caught.value)
    shape = jax.ShapeDtypeStruct((1,) * 65, np.float32)
    with pytest.raises(BuildError, match="expected at most 64 dimensions, found 65"):
        build(program(leaves, shape), **options)
    assert not options["output"].exists()

    def placed(a, /, *, b):
        return a + b

    missing = "args: missing a required argument: "
    for function, named, problem in (
        (lambda x: x, {"x": "float32[]"}, "expected a function with a name"),
        (score, {"x": "float32[]"}, f"'score': {missing}'params'"),
        (keyed, {"z": 1}, f"'keyed': {missing}'x'"),
    ):
        with pytest.raises(ManifestError, match=problem) as refused:
            program(function, **named)
        assert "Program(" in str(refused.value.hint)
    with pytest.raises(ManifestError, match="all arrays by position or all by name"):
        program(placed, "float32[]", b="float32[]")


def test_trees_and_static_values_that_look_alike_are_told_apart(bundle, path):
    for name, each in NONES.items():
        function = jit(scaled, bundle=bundle, name=name, on_miss="error")
        for found in (bundle.call(name, each, X), function(each, X)):
            np.testing.assert_array_equal(found, scaled(each, X))
    np.testing.assert_array_equal(bundle.call("whole", None, X), X)
    given = Renamed(X, X + 1, X + 2)
    found = bundle.call("renamed", given)
    assert found._fields == ("_0", "kept", "_2")
    np.testing.assert_array_equal(found[0], X + 1)
    np.testing.assert_array_equal(found.kept["a"], X + 1)
    assert type(load(path, types=[Renamed]).call("renamed", given)) is Renamed
    assert type(jit(renamed, bundle=path, on_miss="error")(given)) is Renamed
    for name, values in STATIC.items():
        function = jit(told_apart, bundle=bundle, name=name, on_miss="error", static_argnames="k")
        for value in (*values, *values):
            expected = told_apart(X, value)
            for x in (X, jnp.asarray(X)):
                np.testing.assert_array_equal(bundle.call(name, x, k=value), expected)
                np.testing.assert_array_equal(function(x, k=value), expected)


def drifting(state, x):
    return {"state": jnp.asarray(state, jnp.float32) * 1.001, "y": x * state}


def test_a_size_that_xla_does_not_index_and_a_carry_of_another_type_are_refused(options):
    """The second step of jax.jit has other types than the first."""
    args = {"state": "weak float32[]", "x": "bfloat16[2]"}
    sizes, found = r"sizes of at most 2,147,483,647, found", "structure, shapes and dtypes of"
    large = program(double, jax.ShapeDtypeStruct((2**31,), np.int8))
    inner = Program("f", fn=lambda x: jnp.zeros(2**31, jnp.int8) + x, args=["int8[]"])
    drifts = Program("step", fn=drifting, args=args, repeat=(1, 2), carry=("state",))
    for one, said in ((large, sizes), (inner, sizes), (drifts, f"repeat: .* with the {found}")):
        kind = ManifestError if one is drifts else BuildError
        with pytest.raises(kind, match=said) as caught:
            build(one, **options)
        assert caught.value.hint
    assert not options["output"].exists()


def test_a_ref_that_no_bundle_changes_is_refused(bundle, options):
    ref = jax.new_ref(jnp.asarray(X))

    def adding(x):
        ref[...] += x
        return x

    with pytest.raises(ManifestError, match=r"args\[0\]: expected an array, found a Ref") as caught:
        build(program(double, ref), **options)
    assert "return it anew" in str(caught.value.hint)
    with pytest.raises(BuildError, match="found a Ref that it changes"):
        build(program(adding, X), **options)
    with pytest.raises(UsageError, match="found Ref") as unread:
        bundle.call("double", ref)
    assert "ref[...]" in str(unread.value.hint)
    function = jit(lambda x: x[...] * 2, bundle=bundle, name="double")
    with pytest.warns(FallbackWarning, match="expected an array, found a Ref"):
        np.testing.assert_array_equal(function(ref), X * 2)


class Dropping(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(4, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs, deterministic=True)

    def __call__(self, x):
        return self.dropout(self.linear(x))


def test_params_that_no_bundle_has_can_be_left_out(options):
    kernel, ones = np.ones((4, 3), np.float32), np.ones(3, np.float32)
    kept, other = {"kernel": kernel, "bias": ones}, {"kernel": kernel, "scale": ones}
    of_params = {"linear": kept, "dropout": {"rngs": {"count": np.uint32(0)}}}
    both = r"linear\.bias is in the module alone; linear\.scale is in params alone"
    masked = {"linear": {"kernel": kernel, "bias": np.ma.masked_array(ones, [0, 1, 0])}}
    key, dropping = "dropout.rngs.key: expected an array, found a random key", "Not(nnx.RngState)"
    for params, problem, hint in (
        (nnx.state(Dropping()), key, dropping),
        (of_params, "dropout.rngs.count is in params alone", dropping),
        (masked, r"linear\.bias: .* found a masked array", "filled()"),
        ({"linear": other}, both, "nnx.Param alone leaves out"),
    ):
        with pytest.raises(ManifestError, match=problem) as caught:
            build(Program("m", fn=Dropping(), args=[X], params=params), **options)
        assert hint in str(caught.value.hint)
    module = Dropping()
    module.train()
    with pytest.raises(BuildError) as training:
        build(Program("m", fn=module, args=[X]), **options)
    assert ".eval()" in str(training.value.hint)


def test_a_number_of_open_sizes_that_no_integer_holds_is_refused(path):
    """jax.jit refuses it too."""
    bundle = load(path)
    for name, (fn, fits, wraps) in BY_SIZES.items():
        with pytest.warns(FallbackWarning, match="no bucket has the sizes"):
            found = bundle.call(name, np.ones(fits, np.float32))
        expected = jax.jit(fn)(np.ones(fits, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        if any(wraps):
            with pytest.raises(OverflowError):
                jax.jit(fn)(np.ones(wraps, np.float32))
            with pytest.raises(BuildError, match="work for these sizes: Input shapes do not"):
                bundle.call(name, np.ones(wraps, np.float32))
    drawn = bundle.call("drawn", jax.random.key(7))  # a random key is an argument
    assert drawn == jax.random.bits(jax.random.key(7))
