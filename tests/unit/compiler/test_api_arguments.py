"""What callers give `build`, `plan` and `program`: it works as in jax.jit, or an error says what to give."""

from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from prejit.compiler import Program, build, plan, program
from prejit.runtime import FallbackWarning, jit, load
from prejit.runtime.errors import BuildError, ManifestError, UsageError

X = np.arange(4, dtype=np.float32)
Renamed = namedtuple("Renamed", ["class", "kept", "def"], rename=True)


def double(x):
    return x * 2


def scaled(by, x):
    return x if by["factor"] is None else x * by["factor"]


def renamed(pair):
    return Renamed(pair[0] + 1, {"a": pair.kept}, pair[2])


def told_apart(x, k):
    factors = {int: 5, bool: 10, str: 7}
    return x * (factors[type(k)] + len(str(k)))


@pytest.fixture
def options(tmp_path):
    return {"output": tmp_path / "out", "cache": tmp_path / "cache", "workers": 1, "quiet": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory, build_cache):
    """A bundle of all functions that a test calls: one build for all tests."""
    output = tmp_path_factory.mktemp("functions")
    opened = {"buckets": {"n": (2,), "m": (2,)}, "open_sizes": ("n", "m")}
    programs = [
        program(double, X),
        *(Program(name, fn=scaled, args=[each, X]) for name, each in NONES.items()),
        Program("whole", fn=lambda a, x: x, args=[None, X]),
        program(renamed, Renamed(X, X + 1, X + 2)),
        *(Program(n, fn=told_apart, args=[X], static={"k": each}) for n, each in STATIC.items()),
        *(
            Program(n, fn=fn, args=["float32[{n}, {m}]"], **opened)
            for n, (fn, *_) in BY_SIZES.items()
        ),
        Program("drawn", fn=jax.random.bits, args=["key[]"]),
    ]
    return build(programs, output, name="all", cache=build_cache, workers=1, quiet=True).path


@pytest.fixture(scope="module")
def bundle(path):
    return load(path, on_mismatch="error")


def test_a_function_needs_examples(options):
    for given in (double, jax.jit(double), 3, None):
        for step, more in ((build, options), (plan, {})):
            with pytest.raises(UsageError, match="expected a manifest or programs") as caught:
                step(given, **more)
            name = "double" if callable(given) else "function"
            assert f"build(program({name}, " in str(caught.value.hint)


NONES = {"none": {"factor": None}, "array": {"factor": np.float32(3)}}


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


STATIC = {
    **{"bools": [1, True, 0], "texts": ["1", 1, True, "True"]},
    **{"signs": [-1, 0, 1], "spaces": ["a b", "0"]},
}


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


BY_SIZES = {
    "power": (lambda x: x.sum() * x.shape[0] ** 4, (215, 1), (216, 1)),
    "product": (lambda x: x.sum() * (x.size * 65536), (4, 4095), (4, 8192)),
    "sum": (lambda x: x.sum() * (x.shape[0] ** 2 + x.shape[1] * 10**6), (3, 1000), (3, 2200)),
    "mean": (lambda x: x.mean() * (x.shape[0] // 2), (300, 3), (0, 0)),
}


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
