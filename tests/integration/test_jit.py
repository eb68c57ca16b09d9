"""`jit`: the same results as jax.jit, from the executables of a bundle where they fit."""

import contextlib
import copy
import json
import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax import monitoring
from tests.threads import in_threads

from prejit.compiler import Manifest, Mesh, Program, build, program
from prejit.runtime import Fingerprint, MismatchError, UsageError, fallback_counts, jit, load
from prejit.runtime.device import _jit_dispatch
from prejit.runtime.errors import FallbackWarning

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
TRACE = "/jax/core/compile/jaxpr_trace_duration"


class Metrics(NamedTuple):
    loss: Any
    norm: Any


@struct.dataclass
class State:
    params: Any
    key: Any
    name: str = struct.field(pytree_node=False, default="sgd")


@struct.dataclass
class Trained:
    params: Any
    apply: Callable[..., Any] = struct.field(pytree_node=False)


def score(x):
    return jnp.tanh(x) * 2


def scaled(x, mode="double"):
    return x * 2 if mode == "double" else x * 3


def affine(z, a):  # not in the order of the alphabet
    return z * 2 + a


def step(state, x):
    key, noise = jax.random.split(state.key)
    x = x + jax.random.normal(noise, x.shape)
    loss = jnp.mean((x @ state.params["w"]) ** 2)
    params = {"w": state.params["w"] - 0.1 * loss}
    return state.replace(params=params, key=key), Metrics(loss, None)


def linear(params, x):
    return x @ params


def scaled_by(factor):
    def apply(params, x):
        return x @ params * factor

    return apply


def train(state, x):
    return state.replace(params=state.params - state.apply(state.params, x).mean())


def renewed(state, x):
    return train(state, x).replace(apply=scaled_by(3))


def weak(x, rate):
    return {"x": x * rate, "rate": rate * 2}


def accumulate(total, x):
    return total + x


def difference(metrics):
    return metrics.loss - metrics.norm


def share(x):
    return x / x.sum()


columns = jax.vmap(share, in_axes=1)


def first_state():
    return State({"w": jnp.ones((4, 2))}, jax.random.key(3))


def first_trained():
    return Trained(jnp.ones((4, 2)), linear)


@pytest.fixture(scope="module")
def bundle_path(build_programs):
    x = jnp.ones((3, 4))
    programs = [
        program(score, jnp.ones(8)),
        Program("bucketed", fn=score, args=["float32[{n}]"], buckets={"n": (2, 4)}),
        Program("open", fn=score, args=["float32[{n}]"], buckets={"n": (2,)}, open_sizes=["n"]),
        Program("scaled", fn=scaled, args=[x], static={"mode": ("double", "triple")}),
        Program("affine", fn=affine, args={"z": "float32[4]", "a": "float32[4]"}),
        program(step, first_state(), x),
        program(train, first_trained(), x),
        Program("closed", fn=train, args=[Trained(jnp.ones((4, 2)), scaled_by(2)), x]),
        program(renewed, Trained(jnp.ones((4, 2)), scaled_by(3)), x),
        program(weak, jnp.ones(4), 0.5),
        program(jax.jit(accumulate, donate_argnums=0), jnp.ones(1024), jnp.ones(1024)),
        program(difference, Metrics(jnp.ones(2), jnp.ones(2))),
        Program("placed", fn=columns, args=["float32[3,3]"]),
        Program("trained", train, lambda n: [first_trained(), jnp.ones((n, 4))], {"n": (1, 2)}),
        Program("weighted", fn=linear, args={"x": "float32[3,4]"}, params=np.ones((4, 2), "f")),
    ]
    return build_programs(programs, "jit")


@pytest.fixture
def strict(bundle_path):
    """Makes functions of the bundle that compile nothing: `strict(score, name="open")`."""
    return partial(jit, bundle=bundle_path, on_miss="error")


@pytest.fixture
def events():
    """Names of what jax does from here on: traces, compiles."""
    found = []

    def listen(event, _, **__):
        found.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    yield found
    monitoring.unregister_event_duration_listener(listen)


def same(one, other):
    """Fail if two pytrees of jax's arrays differ in anything that a program can see."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for mine, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert jax.typeof(mine) == jax.typeof(theirs)
        assert mine.committed == theirs.committed
        assert mine.sharding == theirs.sharding
        if jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, theirs = jax.random.key_data(mine), jax.random.key_data(theirs)
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-6)


def test_a_call_that_fits_compiles_nothing(bundle_path, events):
    x, on_device = jnp.arange(8.0), jax.device_put(jnp.arange(8.0), jax.devices()[0])
    host = np.arange(8, dtype=np.float64)  # jax makes it float32
    scored = jit(score, bundle=bundle_path)
    events.clear()
    results = [scored(each) for each in (x, on_device, host, x, on_device, host)]
    assert events == []
    assert scored.stats() == type(scored.stats())(("score",), (), ())
    for result, each in zip(results, (x, on_device, host) * 2, strict=True):
        same(result, jax.jit(score)(each))


def test_buckets_of_a_loaded_bundle_without_what_it_compiled_here(bundle_path):
    bundle = load(bundle_path)
    bucketed = jit(score, bundle=bundle, name="bucketed", on_miss="error")
    for size in (2, 4):
        same(bucketed(jnp.ones(size)), score(jnp.ones(size)))
    assert bucketed.stats().loaded == ("bucketed/n2", "bucketed/n4")
    with pytest.raises(UsageError, match=r"x: expected float32\[2\], found float32\[3\]; .*\[4\]"):
        bucketed(jnp.ones(3))
    with pytest.warns(match="no bucket has the sizes of open/n3"):
        bundle.call("open", np.ones(3, "f"))
    opened = jit(score, bundle=bundle, name="open", on_miss="error")
    same(opened(jnp.ones(2)), jax.jit(score)(jnp.ones(2)))
    with pytest.raises(UsageError, match=r"x: expected float32\[2\], found float32\[3\]"):
        opened(jnp.ones(3))


@pytest.mark.parametrize(
    ("x", "axis", "reason"),
    [
        (np.ones(9, "f"), "shape", r"x: expected float32\[8\], found float32\[9\]"),
        (np.ones(8, "i"), "dtype", r"x: expected float32\[8\], found int32\[8\]"),
        ([np.ones(8, "f")], "structure", r"x: expected an array, found "),
    ],
)
def test_what_does_not_fit_is_compiled_and_said_once(bundle_path, events, x, axis, reason):
    scored = jit(lambda x: score(jnp.asarray(x)), bundle=bundle_path, name="score")
    before = fallback_counts().get(axis, 0)
    with pytest.warns(match=f"jit: jax compiles 'score' here, .*: {reason}") as warned:
        results = [scored(x) for _ in range(3)]
    assert [each.filename for each in warned] == [__file__]
    assert fallback_counts()[axis] == before + 1
    assert events.count(BACKEND_COMPILE) >= 1
    assert scored.stats().loaded == ()
    (why,) = scored.stats().compiled
    assert why in str(warned[0].message)
    same(results[-1], jax.jit(score)(jnp.asarray(x)))


def test_a_named_tuple_whose_fields_moved_does_not_fit(strict, monkeypatch):
    moved = namedtuple("Metrics", "norm loss", module=__name__)
    jitted = strict(difference)
    same(jitted(Metrics(jnp.ones(2), jnp.zeros(2))), jnp.ones(2))
    with pytest.raises(UsageError, match="found another class of this name"):
        jitted(moved(jnp.zeros(2), jnp.ones(2)))
    monkeypatch.setitem(globals(), "Metrics", moved)
    with pytest.raises(UsageError, match="expected the keys 'loss', 'norm', found 'norm', 'loss'"):
        jitted(moved(jnp.zeros(2), jnp.ones(2)))


def test_static_values_choose_the_program(events, strict):
    x, jitted = jnp.ones((3, 4)), strict(scaled, static_argnames="mode")
    events.clear()
    found = [jitted(x), jitted(x, mode="triple"), jitted(x, "triple")]
    assert events == []
    same(found, [x * 2, x * 3, x * 3])
    with pytest.raises(UsageError, match=r"mode: expected 'double', found 'half'"):
        jitted(x, mode="half")


@pytest.mark.parametrize("call", [lambda f, z, a: f(z, a), lambda f, z, a: f(a=a, z=z)])
def test_arguments_by_place_and_by_name(call, events, strict):
    z, a = jnp.arange(4.0), jnp.ones(4)
    jitted = strict(affine)
    events.clear()
    results = [call(jitted, z, a) for _ in range(3)]
    assert events == []
    for result in results:
        same(result, jnp.asarray(np.arange(4, dtype="f") * 2 + 1))
    with pytest.raises(UsageError, match=r"z: expected float32\[4\], found float32\[5\]"):
        call(jitted, jnp.ones(5), a)
    same(jax.vmap(jitted)(jnp.stack([z, z]), jnp.stack([a, a])), jnp.stack(results[:2]))
    with pytest.raises(TypeError, match="argument"):
        jitted(z, b=a)


def test_a_wrapper_may_treat_names_otherwise_than_places(bundle_path):
    """`in_axes` of jax.vmap is of arguments by position: the same by name is another function."""
    x = jnp.arange(9.0).reshape(3, 3)
    for call, fits in ((lambda f: f(x), True), (lambda f: f(x=x), False)):
        jitted = jit(columns, bundle=bundle_path, name="placed")
        warns = pytest.warns(FallbackWarning)
        with contextlib.nullcontext() if fits else warns:
            same(call(jitted), call(jax.jit(columns)))
        assert jitted.stats().loaded == ("placed",) * fits
    assert program(columns, x).args == [x]
    assert program(columns, x=x).args == {"x": x}


def test_state_with_random_keys_comes_back_as_the_applications_classes(bundle_path, events, strict):
    stepped, state, x = jit(step, bundle=bundle_path), first_state(), jnp.ones((3, 4))
    expected_state, expected_metrics = jax.jit(step)(state, x)
    events.clear()
    found_state, found_metrics = stepped(state, x)
    again, _ = stepped(found_state, x)  # what it returns fits it
    assert events == []
    assert stepped.stats().compiled == ()
    assert isinstance(found_state, State)
    assert type(found_metrics) is Metrics
    same((found_state, found_metrics), (expected_state, expected_metrics))
    same(again, jax.jit(step)(expected_state, x)[0])
    renamed = strict(step)
    with pytest.raises(UsageError, match=r"state\['name'\]: expected 'sgd', found 'adam'"):
        renamed(state.replace(name="adam"), x)
    with pytest.raises(UsageError, match=r"state\['key'\]: expected a random key of threefry2x32"):
        renamed(state.replace(key=jnp.zeros(2, "uint32")), x)
    with pytest.raises(UsageError, match=r"expected a random key of threefry2x32, found .* rbg"):
        renamed(state.replace(key=jax.random.key(0, impl="rbg")), x)


def test_functions_in_constant_fields_are_part_of_the_signature(bundle_path, events, strict):
    trained, state, x = jit(train, bundle=bundle_path), first_trained(), jnp.ones((3, 4))
    expected = jax.jit(train)(state, x)
    events.clear()
    found = trained(state, x)
    assert events == []
    assert found.apply is linear
    same(found, expected)
    other = state.replace(apply=lambda params, x: x @ params * 2)
    with pytest.warns(match=r"\['apply'\]: expected .*linear"):
        same(trained(other, x).params, jax.jit(train)(other, x).params)
    # Also for a first call, and for that of each bucket.
    two, again = jnp.ones((2, 4)), strict(train, name="trained")
    for given in (two, two[:1]):
        same(again(state, given), jax.jit(train)(state, given))
    second = strict(train, name="trained")
    second(state, two)
    for function, given in ((strict(train), x), (second, two[:1])):
        with pytest.raises(UsageError, match=r"expected .*linear"):
            function(other, given)


def test_functions_without_a_name_are_compared_by_what_they_are_made_of(events, strict):
    closed, x = strict(train, name="closed"), jnp.ones((3, 4))
    state = Trained(jnp.ones((4, 2)), scaled_by(2))
    expected = jax.jit(train)(state, x)
    events.clear()
    found = closed(state, x)
    assert events == []
    assert found.apply is state.apply
    same(found, expected)
    with pytest.raises(UsageError, match=r"\['apply'\]: expected .*scaled_by.*, found .*scaled_by"):
        closed(state.replace(apply=scaled_by(3)), x)
    # A function that is made anew is another one, and only a trace makes it.
    state, jitted = state.replace(apply=scaled_by(3)), strict(renewed)
    found = jitted(state, x)
    assert BACKEND_COMPILE not in events
    assert TRACE in events
    assert jitted.stats().traced == ("renewed",)
    assert found.apply is not state.apply
    same(found.params, jax.jit(renewed)(state, x).params)
    changed = wraps(renewed)(lambda state, x: x)
    with pytest.raises(UsageError, match="renewed: place in its file: expected "):
        strict(changed)(state, x)
    place = {"co_name": "renewed", "co_firstlineno": renewed.__code__.co_firstlineno}
    changed.__code__ = changed.__code__.replace(**place)
    with pytest.raises(UsageError, match="it has changed since the build"):
        strict(changed)(state, x)


def test_weak_types_are_those_of_jax(bundle_path, events, strict):
    jitted, x = jit(weak, bundle=bundle_path), jnp.ones(4)
    expected = jax.jit(weak)(x, 0.25)
    events.clear()
    found = [jitted(x, 0.25) for _ in range(2)]
    assert events == []
    assert found[1]["rate"].weak_type
    for each in found:
        same(each, expected)
    exact = strict(weak)
    with pytest.raises(UsageError, match=r"rate: expected weak float32\[\], found float32\[\]"):
        exact(x, np.float32(0.25))
    with pytest.raises(UsageError, match=r"x: expected float32\[4\], found weak float32\[4\]"):
        exact(jax.jit(lambda: jnp.full(4, 2.0))(), 0.25)


def test_donated_arguments_are_deleted(strict):
    donating = strict(accumulate, donate_argnums=0)
    total, x = jnp.zeros(1024), jnp.ones(1024)
    for _ in range(3):
        before, total = total, donating(total, x)
        assert before.is_deleted()
        assert not x.is_deleted()
    np.testing.assert_array_equal(total, np.full(1024, 3))
    host = np.zeros(1024, "f")
    for _ in range(2):
        donating(host, x)
        np.testing.assert_array_equal(host, np.zeros(1024))
    first_call = strict(accumulate, donate_argnums=0)
    for function in (donating, first_call):
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            function(before, x)
    keeping = strict(accumulate)
    with pytest.raises(UsageError, match="total: expected it donated, found it kept"):
        keeping(total, x)


def test_transformations_use_the_function_itself(strict):
    scored, x = strict(score), jnp.arange(8.0)
    rows = jnp.ones((2, 8))
    same(jax.grad(lambda x: scored(x).sum())(x), jax.grad(lambda x: score(x).sum())(x))
    same(jax.vmap(scored)(rows), jax.vmap(jax.jit(score))(rows))
    same(jax.jit(lambda: scored(x))(), jax.jit(lambda: score(x))())
    same(
        jax.lax.scan(lambda c, _: (scored(c), c), x, length=3),
        jax.lax.scan(lambda c, _: (score(c), c), x, length=3),
    )
    assert scored.stats() == type(scored.stats())((), (), ())
    scored(x)  # the bundle's, after all of them
    same(jax.grad(lambda x: scored(x).sum())(x), jax.grad(lambda x: score(x).sum())(x))
    assert scored.stats().loaded == ("score",)
    with jax.disable_jit():
        same(scored(x), score(x))


def test_it_is_a_function_of_jax_jit(bundle_path):
    scored, x = jit(score, bundle=bundle_path), jnp.ones(8)
    assert scored.__name__ == "score"
    assert "tanh" in scored.lower(x).as_text()
    assert scored.eval_shape(x).shape == scored.trace(x).out_info.shape == (8,)

    class Model:
        @jit(bundle=bundle_path, name="score", static_argnums=0)
        def __call__(self, x):
            return score(x)

    model = Model()
    with pytest.warns(match="score: expected 1 arguments by position, found x"):  # and `self`
        same(model(x), jax.jit(score)(x))
    scored.clear_cache()
    same(scored(x), jax.jit(score)(x))
    trainer = {"step": scored}  # `dataclasses.asdict` copies such fields deeply, too
    same(copy.deepcopy(trainer)["step"](x), jax.jit(score)(x))


def test_arrays_elsewhere_and_settings_that_executables_cannot_obey(bundle_path, strict):
    scored, mesh = strict(score), jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with pytest.raises(UsageError, match=r"x: expected it on cpu:0, found NamedSharding"):
        scored(jax.device_put(jnp.ones(8), place))
    with jax.set_mesh(mesh), pytest.raises(UsageError, match=r"jax.set_mesh has set a mesh"):
        scored(jnp.ones(8))
    scored = jit(score, bundle=bundle_path)
    with jax.debug_nans(True), pytest.warns(match="jax_debug_nans is on"):
        scored(jnp.ones(8))
    assert scored.stats().loaded == ()
    scored.clear_cache()
    scored(jnp.ones(8))
    assert scored.stats().loaded == ("score",)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        scored(jnp.full(8, jnp.nan))
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with pytest.raises(UsageError, match="jax_disable_most_optimizations is on"):
            strict(score)(jnp.ones(8))
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def test_many_threads_share_a_function(events, strict):
    scored, x = strict(score), jnp.arange(8.0)
    expected, found = np.asarray(score(x)), []
    events.clear()
    in_threads(4, lambda _: found.extend([np.asarray(scored(x)) for _ in range(50)]))
    assert len(found) == 200
    np.testing.assert_allclose(np.stack(found), np.broadcast_to(expected, (200, 8)), rtol=1e-6)
    assert events == []


def test_a_machine_that_does_not_match_compiles_everything(bundle_path):
    machine = replace(Fingerprint.current(), cpu_features=("sse2",))
    with pytest.warns(match="matches none of the bundle's targets"):
        bundle = load(bundle_path, fingerprint=machine)
    scored = jit(score, bundle=bundle)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # `load` has said it
        same(scored(jnp.ones(8)), jax.jit(score)(jnp.ones(8)))
    assert scored.stats().loaded == ()
    assert "cpu_features" in scored.stats().compiled[0]
    with pytest.raises(MismatchError, match="cpu_features"):
        jit(score, bundle=bundle, on_miss="error")(jnp.ones(8))


def test_mistakes_of_the_caller(bundle_path, strict):
    scored = strict(score, name="other")
    with pytest.raises(UsageError, match=r"no program 'other'.*; its programs are: accumulate"):
        scored(jnp.ones(8))
    with pytest.warns(match="x: expected what jax takes"):
        with pytest.raises(TypeError, match="Error interpreting argument"):  # that of jax.jit
            jit(score, bundle=bundle_path)("text")
    with pytest.raises(UsageError, match="on_miss: expected"):
        jit(score, bundle=bundle_path, on_miss="never")
    weighted = strict(linear, name="weighted")
    with pytest.raises(UsageError, match="weighted has its weights in the bundle"):
        weighted(jnp.ones((4, 2)), jnp.ones((3, 4)))
    exact = strict(score)
    for _ in range(3):  # a call that raised raises again
        with pytest.raises(UsageError, match="found float32"):
            exact(jnp.ones(9))
    same(exact(jnp.ones(8)), jax.jit(score)(jnp.ones(8)))


def test_a_jax_without_its_private_parts(bundle_path, monkeypatch, events, strict):
    monkeypatch.setattr(_jit_dispatch.Dispatch, "of", lambda jitted: None)
    x = jnp.arange(8.0)
    scored = copy.deepcopy(copy.copy(jit(score, bundle=bundle_path)))
    events.clear()
    results = [scored(x) for _ in range(2)]
    assert events == []
    assert scored.stats().loaded == ("score",)
    same(results[1], jax.jit(score)(x))
    same(jax.grad(lambda x: scored(x).sum())(x), jax.grad(lambda x: score(x).sum())(x))
    assert scored.eval_shape(x).shape == (8,)
    with pytest.warns(match="found float32"):
        same(scored(jnp.ones(9)), jax.jit(score)(jnp.ones(9)))
    z, a = jnp.arange(4.0), jnp.ones(4)
    same(strict(affine)(z, a), jax.jit(affine)(z, a))


def test_caches_of_jax_may_be_cleared(events, strict):
    scored, x = strict(score), jnp.ones(8)
    first = scored(x)
    jax.clear_caches()
    events.clear()
    same(scored(x), first)
    assert BACKEND_COMPILE not in events


STEP = """
import jax, jax.numpy as jnp
def step(state, x):
    def loss(w):
        return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)
    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value
"""
ON_A_MESH = """
import json, sys
sys.path.insert(0, sys.argv[2])
import jax, jax.numpy as jnp, numpy as np
from jax import monitoring
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from mesh_step import step
from prejit.runtime import UsageError, jit
compiles = []
monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiles.append(event))
grid = Mesh(np.array(jax.devices()).reshape(2, 2), ("rows", "columns"))
split = lambda array, *axes: jax.device_put(array, NamedSharding(grid, P(*axes)))
random = np.random.default_rng(0)
up, down, x = (random.standard_normal(shape, np.float32) for shape in ((8, 16), (16, 4), (4, 8)))
make = lambda: {"up": split(up, None, "columns"), "down": split(down, "columns")}
ours = jit(step, bundle=sys.argv[1], on_miss="error", donate_argnames="state")
plain = jax.jit(step, donate_argnames="state")
mine, theirs, given = make(), make(), split(x, "rows")
expected, found, before = [], [], 0
for number in range(4):
    theirs, loss = plain(state=theirs, x=given)
    expected.append(float(loss))
before = len([each for each in compiles if "backend_compile" in each])
for number in range(4):
    kept = mine
    mine, loss = ours(state=mine, x=given)
    found.append(float(loss))
    assert kept["up"].is_deleted()
after = len([each for each in compiles if "backend_compile" in each])
told = ""
try:
    ours(state=make(), x=split(x, None, "columns"))
except UsageError as error:
    told = str(error)
host, loss = ours(state={"up": up, "down": down}, x=x)
print(json.dumps({
    "found": found, "expected": expected, "compiled": after - before, "told": told, "host": float(loss),
    "split": str(mine["up"].sharding.spec), "loaded": ours.stats().loaded,
}))
"""


@pytest.mark.thorough
def test_a_program_on_a_mesh_takes_arrays_split_for_it(tmp_path, build_cache, python, monkeypatch):
    (tmp_path / "mesh_step.py").write_text(STEP)
    monkeypatch.syspath_prepend(tmp_path)
    from mesh_step import step

    state = {"up": "float32[8,16]", "down": "float32[16,4]"}
    split = {"x": ["data"], "state.up": ["", "tensor"], "state.down": ["tensor"]}
    args = {"state": state, "x": "float32[4,8]"}
    stepped = Program("step", step, args, donate=["state"], shardings=split)
    manifest = Manifest("mesh", targets=["cpu-host"], mesh=Mesh(2, 2), programs=[stepped])
    path = build(manifest, tmp_path, cache=build_cache, quiet=True).path
    said = python(ON_A_MESH, path, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    result = json.loads(said.stdout.splitlines()[-1])
    np.testing.assert_allclose(result["found"], result["expected"], rtol=1e-6)
    assert result["compiled"] == 0
    assert result["loaded"] == ["step"]
    assert result["host"] == pytest.approx(result["expected"][0], rel=1e-6)
    assert "tensor" in result["split"]
    assert "x: expected it split as" in result["told"]

    here = jit(step, bundle=path, on_miss="error", donate_argnames="state")
    with pytest.raises(UsageError, match="expected 4 devices for its mesh, found 1"):
        here(state={"up": jnp.ones((8, 16)), "down": jnp.ones((16, 4))}, x=jnp.ones((4, 8)))
