"""`program` and `jit` with the values that people's code has: results of jax.jit, or a refusal by name."""

import contextlib
import enum
import functools
import importlib
import itertools
import json
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState
from tests.manifests import functions_manifest

from prejit.compiler import Program, build, program
from prejit.runtime import UsageError, jit, load
from prejit.runtime.device import _jit_dispatch
from prejit.runtime.errors import FallbackWarning, ManifestError, RejectError
from prejit.runtime.format.checks.call_programs import check_static
from prejit.runtime.format.constants import encode, forget_functions, same

X = jnp.arange(4.0)
IGNORED = "ignore::prejit.runtime.errors.FallbackWarning"


class Color(enum.Enum):
    RED = 2
    BLUE = 3


class Level(enum.IntEnum):
    LOW = 1


@dataclass(frozen=True)
class Config:
    width: int = 2
    color: Color = Color.RED
    activation: Any = jnp.tanh


class Pair(NamedTuple):
    first: int
    second: float


class Held:
    def __init__(self, k):
        self.k = k


class ByIdentity(Held):
    def scaled(self, x):
        return x * self.k


class Slotted:
    __slots__ = ("k",)

    def __init__(self, k):
        self.k = k

    def __hash__(self):
        return hash(self.k)

    def __eq__(self, other):
        return type(other) is Slotted and other.k == self.k


class Net(nnx.Module):
    def __init__(self, width):
        self.linear = nnx.Linear(4, width, rngs=nnx.Rngs(0))
        self.width = width


def twice(v):
    return v * 2


def thrice(v):
    return v * 3


def number(c):
    """Return a number that tells values of all kinds apart."""
    match c:
        case Config():
            return c.activation(c.width / 4.0) * number(c.color)
        case nnx.GraphDef():
            return float(np.log2(len(str(c))))
        case None:
            return 7
        case enum.Enum():
            return c.value
        case tuple() | frozenset():
            return sum(map(number, c))
        case str():
            return len(c)
        case np.dtype():
            return c.itemsize
        case type():
            return np.dtype(c).itemsize
        case ByIdentity() | Slotted():
            return c.k
    return c(0.5) if callable(c) else c


def use(x, c):
    return x * number(c)


STATIC = {
    "none": (None, 7),
    "float": (0.5, 0.25),
    "zero": (0.0, 1.0),
    "integer": (1, 2),
    "bool": (True, False),
    "complex": (1 + 2j, 2 + 1j),
    "tuple": ((1, 2.5, None), (1, 2.5, 3)),
    "frozenset": (frozenset({1, 2}), frozenset({1, 3})),
    "enum": (Color.RED, Color.BLUE),
    "integer-enum": (Level.LOW, 2),
    "dataclass": (Config(), Config(color=Color.BLUE)),
    "dataclass-function": (Config(activation=twice), Config(activation=thrice)),
    "named-tuple": (Pair(1, 2.0), Pair(2, 2.0)),
    "slots": (Slotted(2), Slotted(3)),
    "identity": (ByIdentity(2), ByIdentity(3)),
    "function": (twice, thrice),
    "lambda": (lambda v: v * 2, lambda v: v * 3),
    "partial": (functools.partial(pow, 2), functools.partial(pow, 3)),
    "jitted": (jnp.tanh, jnp.sin),
    "dtype": (np.dtype("float32"), np.dtype("float16")),
    "scalar-type": (jnp.float32, jnp.float16),
    "numpy-scalar": (np.float32(2), np.float32(3)),
    "graphdef": tuple(nnx.split(Net(width))[0] for width in (2, 3000)),
}
"""Values of a static argument: what the bundle is built with, and another one."""


@pytest.fixture(scope="module")
def static_bundle(build_programs):
    return build_programs(
        program(jit(use, bundle="none", name=name, static_argnames="c"), X, c)
        for name, (c, _) in STATIC.items()
    )


@pytest.fixture(scope="module")
def loaded(static_bundle):
    return load(static_bundle, on_mismatch="error")


@pytest.mark.parametrize("name", STATIC)
def test_a_static_value_of_any_kind_chooses_its_program(loaded, name):
    same, other = STATIC[name]
    function = jit(use, bundle=loaded, name=name, static_argnames="c")
    plain = jax.jit(use, static_argnames="c")
    np.testing.assert_array_equal(function(X, same), plain(X, same))
    np.testing.assert_array_equal(loaded.call(name, X, c=same), plain(X, same))
    (found,) = function.stats().loaded
    assert found.startswith(f"{name}/c=")
    with pytest.warns(FallbackWarning, match=f"{name}/c=.*: c: expected .*, found "):
        np.testing.assert_array_equal(function(X, other), plain(X, other))
    assert function.stats().loaded == (found,)


@pytest.mark.filterwarnings(IGNORED)
def test_a_function_is_compared_with_what_it_closes_over_by_now(build_programs):
    def closed(factor):
        held = [factor]
        return held, lambda v: v * held[0]

    example, (held, function) = closed(2.0)[1], closed(2.0)
    made = Program("use", use, ["float32[{n}]"], {"n": (2, 4)}, static={"c": [example]})
    ours = jit(use, bundle=build_programs([made]), static_argnames="c")
    plain = jax.jit(use, static_argnames="c")
    for changed, x in ((2.0, jnp.ones(2)), (3.0, jnp.ones(2)), (3.0, jnp.ones(4))):
        held[0] = changed
        np.testing.assert_array_equal(ours(x, function), plain(x, function))
    assert ours.stats().loaded == ("use/n2-c=0",)


@pytest.mark.filterwarnings(IGNORED)
def test_a_method_whose_object_is_static(build_programs):
    example = jax.jit(ByIdentity.scaled, static_argnums=0)
    path = build_programs([program(example, ByIdentity(3), X)])
    for k, loaded in ((3, 1), (4, 0)):
        function = jit(ByIdentity.scaled, bundle=path, static_argnums=0, name="scaled")
        np.testing.assert_array_equal(function(ByIdentity(k), X), X * k)
        assert len(function.stats().loaded) == loaded


class Scale(Held):
    def __call__(self, x):
        return x * self.k


class Trainer:
    """An object that holds arrays, an optimizer and its own jitted method, as trainers do."""

    def __init__(self, k):
        self.weights, self.optimizer = jnp.full(4, k), optax.adam(1e-2)
        self.jitted = jit(self.step, bundle="none", name="trainer")

    def step(self, x):
        return x * self.weights


def closed_over(held, use=lambda x, held: x * held):
    def closed(x):
        return use(x, held)

    return closed


class Lowerable(Scale):
    """An object with the attributes of what jax.jit returns."""

    lower, __wrapped__ = None, staticmethod(twice)


def shifted(a, b, x):
    return a * x - b


def in_order(x, **factors):
    for name, factor in factors.items():
        x = x * factor - len(name)
    return x


def partial_of_method(k):
    if k == 2:
        return functools.partial(types.MethodType(shifted, 2.0), 3.0)
    return types.MethodType(functools.partial(shifted, 3.0), 2.0)


STATE = {
    "closure": (closed_over, "closure held: expected 2.0, found 3.0"),
    "array": (lambda k: closed_over(jnp.full(4, k)), "closure held: expected jax"),
    "host": (lambda k: closed_over(np.full(8, k)[::-2]), "closure held: expected numpy:ndarray"),
    "key": (
        lambda k: closed_over(jax.random.key(int(k)), lambda x, key: x + jax.random.normal(key)),
        "closure held: expected jax",
    ),
    "nested": (lambda k: closed_over(None, lambda x, _: closed_over(k)(x)), "closure use"),
    "nnx": (
        lambda k: closed_over(Net(int(k)), lambda x, net: net.linear(x).sum()),
        "closure held: expected .*:Net",
    ),
    "default": (lambda k: lambda x, k=k: x * k, "default k: expected 2.0, found 3.0"),
    "keyword": (lambda k: lambda x, *, k=k: x * k, "default k: expected 2.0, found 3.0"),
    "wrapper": (
        lambda k: functools.wraps(twice)(lambda *args, k=k: twice(*args) * k),
        "keywords: expected {'k': 2.0}, found {'k': 3.0}",
    ),
    "method": (lambda k: ByIdentity(k).scaled, "self: expected .*:ByIdentity"),
    "trainer": (lambda k: Trainer(k).jitted, "self: expected .*:Trainer"),
    "partial": (lambda k: functools.partial(use, c=k), "default c: expected 2.0, found 3.0"),
    "placed": (lambda k: functools.partial(pow, k), "partial 0: expected 2.0, found 3.0"),
    "keywords": (
        lambda k: functools.partial(
            in_order, **dict(sorted({"a": 1, "bb": 2}.items(), reverse=k > 2))
        ),
        "partial keywords: expected {'a': 1, 'bb': 2}, found {'bb': 2, 'a': 1}",
    ),
    "inside": (
        lambda k: functools.partial(jax.jit(functools.partial(shifted, 4.0)), k),
        "partial 0: expected 2.0, found 3.0",
    ),
    "order": (partial_of_method, "inner self: expected 2.0, found none"),
    "object": (Scale, "object: expected .*:Scale"),
    "lowerable": (Lowerable, "object: expected .*:Lowerable"),
    "vmap": (lambda k: jax.vmap(closed_over(k)), "closure fun: expected .*vmap"),
    "jitted": (
        lambda k: jax.jit(closed_over(jax.jit(closed_over(k)), twice_called)),
        "closure held",
    ),
}
"""How to make a function that holds a number, and why one that holds 3 is refused the program of 2."""


class Lazily(Held):
    @functools.cached_property
    def factor(self):
        return [self.k, self.k]

    @functools.cached_property
    def me(self):
        return [self]


@dataclass
class LazyFields(Lazily):
    k: float


class LazilyReduced(Lazily):
    def __reduce__(self):
        return type(self), (self.k,)


def clipped_adamw(steps):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), schedule


def test_a_schedule_of_optax_stays_the_same_when_its_first_call_makes_its_steps_a_float():
    held, schedule = clipped_adamw(50)
    before = encode(closed_over(held))
    forget_functions()
    schedule(10)
    assert same(before, encode(closed_over(held)))
    assert not same(before, encode(closed_over(clipped_adamw(51)[0])))


def test_a_weak_reference_counts_as_what_it_refers_to():
    held = [Lazily(2.0), Lazily(2.0), Lazily(3.0)]
    two, again, three = (encode(closed_over(weakref.ref(k))) for k in held)
    assert same(two, again)
    assert not same(two, three)
    dead = weakref.ref(Lazily(2.0))
    assert not same(two, encode(closed_over(dead)))


@pytest.mark.parametrize("kind", [Lazily, LazyFields, LazilyReduced])
def test_a_cached_property_counts_where_the_object_would_not_compute_it(kind):
    filled, forged = kind(2.0), kind(2.0)
    assert (filled.factor, filled.me) == ([2.0, 2.0], [filled])
    forged.factor = [2.0, 5.0]
    assert same(encode(kind(2.0)), encode(filled))
    assert not same(encode(kind(2.0)), encode(forged))


def twice_called(x, function):
    return function(function(x))


@pytest.fixture(scope="module")
def state_bundle(build_programs):
    return build_programs(Program(name, make(2.0), [X]) for name, (make, _) in STATE.items())


@pytest.mark.parametrize("name", STATE)
def test_a_program_is_for_a_function_that_holds_the_same(state_bundle, name):
    make, reason = STATE[name]
    for k, fits in ((2.0, True), (3.0, False)):
        function = jit(make(k), bundle=state_bundle, name=name)
        warns = pytest.warns(FallbackWarning, match=f"{name}: {reason}")
        with contextlib.nullcontext() if fits else warns:
            found = function(X)
        np.testing.assert_array_equal(found, jax.jit(make(k))(X))
        assert function.stats().loaded == (name,) * fits


@pytest.mark.thorough
def test_another_process_finds_equal_values_and_functions(static_bundle, state_bundle, run_python):
    code = f"""
import json, sys
sys.path[:0] = {sys.path!r}
from {__name__} import STATE, STATIC, X, jit, load, use
results, loaded, bundle = {{}}, {{}}, load(sys.argv[1], on_mismatch="error")
for name, (c, _) in STATIC.items():
    function = jit(use, bundle=bundle, name=name, static_argnames="c", on_miss="error")
    results[name] = [str(each) for each in function(X, c)]
for name, (make, _) in STATE.items():
    functions = [jit(make(k), bundle=sys.argv[2], name=name) for k in (2.0, 3.0)]
    loaded[name] = [(function(X), function.stats().loaded)[1] for function in functions]
print(json.dumps([results, loaded]))
"""
    done = run_python(code, static_bundle, state_bundle, env={"PYTHONHASHSEED": "7"})
    results, loaded = json.loads(done.stdout)
    for name, found in results.items():
        assert found == [str(each) for each in use(X, STATIC[name][0])], name
    assert loaded == {name: [[name], []] for name in STATE}


HELD = """
def make(rate):
    def step(x):
        return x * rate
    return step
step, other = make(0.5), make(0.25)
def scaled(x, k=2.0, *, mode="double"):
    return x * k if mode == "double" else x
"""


def test_a_function_that_the_manifest_names_holds_what_it_held(tmp_path, build_cache, monkeypatch):
    (tmp_path / "held.py").write_text(HELD)
    programs = {
        "step": 'function = "held:step"\nargs = ["float32[4]"]',
        "scaled": 'function = "held:scaled"\nargs = ["float32[4]"]\nstatic = { mode = ["double"] }',
    }
    manifest = functions_manifest(tmp_path / "held.toml", programs)
    bundle = load(build(manifest, tmp_path, cache=build_cache, quiet=True).path)
    again = build(manifest, tmp_path / "again", cache=build_cache, quiet=True)  # of a stored trace
    assert again.digest == bundle.digest
    monkeypatch.syspath_prepend(tmp_path)
    held = importlib.import_module("held")
    del sys.modules["held"]  # this file, which other programs come from, mentions it
    strict = functools.partial(jit, bundle=bundle, on_miss="error")
    np.testing.assert_array_equal(strict(held.step)(X), X * 0.5)
    with pytest.raises(UsageError, match=r"step: closure rate: expected 0.5, found 0.25"):
        strict(held.other)(X)
    options = {"static_argnames": "mode"}
    np.testing.assert_array_equal(strict(held.scaled, **options)(X), X * 2)
    with pytest.raises(UsageError, match=r"default k: expected 2.0, found 3.0"):
        strict(functools.partial(held.scaled, k=3.0), name="scaled", **options)(X)
    np.testing.assert_array_equal(bundle.call("step", X), X * 0.5)
    damaged = replace(bundle.config.programs[0], state={"self": "[ 1]"})
    with pytest.raises(RejectError, match="'self': expected a constant, found"):
        check_static(damaged, "config")


def test_what_no_process_can_compare_is_said_at_the_build(tmp_path, build_cache, capsys):
    made = Program("locked", closed_over(threading.Lock(), lambda x, lock: x), [X])
    path = build(made, tmp_path, cache=build_cache).path
    assert "locked: no process can compare what its function holds as closure held" in (
        capsys.readouterr().err
    )
    function = jit(made.fn, bundle=path, name="locked", on_miss="error")
    with pytest.raises(UsageError, match=r"held: expected _thread:lock, .* no other process can"):
        function(X)
    np.testing.assert_array_equal(load(path).call("locked", X), X)


@pytest.mark.parametrize("is_kept", [True, False])
def test_state_that_changes_counts_for_the_next_signature(build_programs, is_kept, monkeypatch):
    if not is_kept:  # a jax without its private parts
        monkeypatch.setattr(_jit_dispatch.Dispatch, "of", lambda jitted: None)
    scale = Scale(2.0)
    path = build_programs([Program("scale", scale, ["float32[{n}]"], {"n": (2, 4)})])
    function, plain = jit(scale, bundle=path, name="scale"), jax.jit(scale)
    for k, n, reason in ((2.0, 2, ""), (3.0, 2, ""), (3.0, 4, "object")):
        scale.k = k
        with pytest.warns(match=reason) if reason else contextlib.nullcontext():
            np.testing.assert_array_equal(function(jnp.ones(n)), plain(jnp.ones(n)))
    assert function.stats().loaded == ("scale/n2",)


class Layer(eqx.Module):
    rank: ClassVar[int] = 1
    weight: Any
    activation: Any = eqx.field(static=True)


@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    def __init__(self, values, about):
        self.values, self.about = values, about

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("values"), self.values),), self.about

    @classmethod
    def tree_unflatten(cls, about, children):
        return cls(children[0], about)


def train_step(state, x):
    def loss(params):
        return (state.apply_fn({"params": params}, x) ** 2).mean()

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def keyed_step(keyed, x):
    return {"next": Keyed(keyed.values + x, keyed.about), "new": Keyed(x, ("new", 2.5))}


def layer_step(layer, x):
    return eqx.tree_at(lambda each: each.weight, layer, layer.activation(layer.weight) + x)


class Turned(NamedTuple):
    """A named tuple that jax takes apart in another order, such as OptimizerState of jax itself."""

    values: Any
    mean: Any


jax.tree_util.register_pytree_node(
    Turned, lambda turned: ((turned.mean, turned.values), ()), lambda _, parts: Turned(*parts[::-1])
)


def turned_step(turned, x):
    return Turned(turned.values + x, turned.mean * 0.5)


def adam_step(state, x):
    return optax.adam(1e-2).update(x, state)


def mapping_step(mappings, x):
    return jax.tree.map(lambda v: v + x, mappings), [mappings["ordered"]]


def first_mappings():
    return {
        "frozen": freeze({"a": X}),
        "default": defaultdict(int, a=X),
        "ordered": OrderedDict(b=X, a=X),
        "state": nnx.State({"layer": {"w": nnx.Param(X)}, "mean": nnx.BatchStat(X)}),
    }


def first_train_state():
    dense = linen.Dense(4)
    params = dense.init(jax.random.key(0), X)["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return TrainState.create(apply_fn=dense.apply, params=params, tx=tx)


REGISTERED = {
    "train_step": (train_step, first_train_state),
    "keyed_step": (keyed_step, lambda: Keyed(X, Config(activation=twice))),
    "layer_step": (layer_step, lambda: Layer(X, lambda v: v * 2)),
    "mapping_step": (mapping_step, first_mappings),
    "turned_step": (turned_step, lambda: Turned(X, X + 1)),
    "adam_step": (adam_step, lambda: optax.adam(1e-2).init(X)),
}


@pytest.fixture(scope="module")
def registered_bundle(build_programs):
    return build_programs(program(function, make(), X) for function, make in REGISTERED.values())


@pytest.mark.thorough
@pytest.mark.parametrize("name", REGISTERED)
def test_results_of_registered_classes_need_no_trace(registered_bundle, name):
    function, make = REGISTERED[name]
    given, jitted = make(), jit(function, bundle=registered_bundle, on_miss="error")
    found, expected = jitted(given, X), jax.jit(function)(given, X)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
    assert (jitted.stats().loaded, jitted.stats().traced) == ((name,), ())
    if name not in ("adam_step", "mapping_step"):
        jitted(found["next"] if name == "keyed_step" else found, X)  # it is a next argument


class Named(enum.StrEnum):
    A = "a"


def made_by(factor):
    @jax.tree_util.register_dataclass
    @dataclass
    class Scaled:
        a: Any

        def __len__(self):
            return factor

    return Scaled(X)


def by_class(given):
    """Return a number that tells the class of a value, and those of its keys."""
    own = {dict: 2, OrderedDict: 3, defaultdict: 5, FrozenDict: 7, nnx.State: 11}.get(
        type(given), 13
    )
    keys = [*getattr(given, "keys", list)()]
    return X * own * len(given) * (len(keys) + sum(type(key) is str for key in keys))


CLASSES = {
    "dict": lambda: {"a": X},
    "ordered": lambda: OrderedDict(a=X),
    "default": lambda: defaultdict(int, a=X),
    "frozen": lambda: freeze({"a": X}),
    "state": lambda: nnx.State({"a": X}),
    "enum-key": lambda: {Named.A: X},
    "local": lambda: made_by(2),
    "other-local": lambda: made_by(3),
}


@pytest.mark.thorough
@pytest.mark.filterwarnings(IGNORED)
def test_values_that_look_alike_but_are_of_other_classes(build_programs):
    names = sorted(CLASSES.keys() - {"enum-key"})
    bundle = load(
        build_programs(program(jit(by_class, bundle="none", name=n), CLASSES[n]()) for n in names)
    )
    for name, (given, make) in itertools.product(names, CLASSES.items()):
        # Of one function jax keeps a trace for keys that are equal, whatever their classes are.
        function = jit(functools.partial(by_class), bundle=bundle, name=name)
        np.testing.assert_array_equal(function(make()), by_class(make()))
        assert bool(function.stats().loaded) == (name == given and "local" not in name)
    with pytest.raises(UsageError, match="found another class of this name, such as one that a f"):
        jit(by_class, bundle=bundle, name="local", on_miss="error")(made_by(2))


AXES = ("dp", "fsdp", "tp")
AUTO = (jax.sharding.AxisType.Auto,) * 3


def split_step(state, x):
    hidden = x @ state["w"]
    return {"w": state["w"] + 1, "step": state["step"] + 1}, hidden.sum(1), x * 2


def split_options(mesh):
    """Return options of jax.jit for `split_step` on a mesh with the axes AXES.

    The last result is whole, though the argument like it is split.
    """

    def on(*axes):
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    state = {"w": on("fsdp", "tp"), "step": on()}
    rows = on(("dp", "fsdp"))
    results = (state, rows, on())
    return {"in_shardings": (state, rows), "out_shardings": results, "donate_argnums": 0}


def split_state():
    return {"w": jnp.ones((4, 8)), "step": jnp.zeros((), jnp.int32)}


ON_A_MESH = """
import json, sys, warnings
sys.path[:0] = {path!r}
import jax, jax.numpy as jnp
from {name} import AUTO, AXES, build, jit, program, split_options, split_state, split_step, twice
from prejit.runtime.errors import BuildError
warnings.simplefilter("ignore")
X = jnp.arange(16.0).reshape(4, 4)
report = {{}}
auto = jax.make_mesh((2, 1, 2), AXES, axis_types=AUTO)
options = split_options(auto)
def compare(case, given, state, x):
    function, plain = jit(split_step, bundle=sys.argv[1], **given), jax.jit(split_step, **given)
    found, expected = function(split_state(), x), plain(state, x)
    found, expected = function(*found[:1], x), plain(*expected[:1], x)
    same = jax.tree.map(lambda a, b: a.sharding == b.sharding and (a == b).all().item(), found, expected)
    report[case] = [*function.stats().loaded], [*function.stats().compiled], all(jax.tree.leaves(same))
compare("as built", options, split_state(), X)
state, rows = options["in_shardings"]
compare("other results", options | {{"out_shardings": (state, *[state["step"]] * 2)}}, split_state(), X)
donated = {{"donate_argnums": 0}}
compare("no shardings", donated, split_state(), X)
turned = jax.make_mesh((2, 1, 2), AXES, axis_types=AUTO, devices=jax.devices()[::-1])
compare("other devices", split_options(turned), split_state(), X)
explicit = jax.make_mesh((2, 1, 2), AXES)
with jax.set_mesh(explicit):
    compare("set mesh", donated, split_state(), X)
typed = jax.device_put(X, jax.sharding.NamedSharding(explicit, rows.spec))
compare("explicit", donated, split_state(), typed)
def constrained(x):
    return jax.lax.with_sharding_constraint(x * 2, rows)
for function in (constrained, jax.pmap(twice)):
    try:
        build(program(function, X), sys.argv[2], cache=sys.argv[3], quiet=True)
    except BuildError as error:
        assert "a function for 1 device, found one for 4: it names a mesh" in str(error), error
    else:
        raise AssertionError(function)
print(json.dumps(report))
"""


@pytest.mark.thorough
def test_shardings_of_jit_on_a_mesh_with_any_axes(tmp_path, build_cache, python):
    mesh = jax.sharding.AbstractMesh((2, 1, 2), AXES, axis_types=AUTO)
    jitted = jax.jit(split_step, **split_options(mesh))
    made = program(jitted, split_state(), "float32[4,4]")
    assert str(made.mesh) == "dp=2 fsdp=1 tp=2"
    whole = {"0.w": ("fsdp", "tp"), "result.0.w": ("fsdp", "tp")}
    split = {"1": ("dp+fsdp",), "result.1": ("dp+fsdp",), "result.0.step": (), "result.2": ()}
    assert made.shardings == {**whole, **split}
    path = build(made, tmp_path, cache=build_cache, quiet=True).path
    code = ON_A_MESH.format(path=sys.path, name=__name__)
    said = python(
        code, path, tmp_path, build_cache, XLA_FLAGS="--xla_force_host_platform_device_count=4"
    )
    report = json.loads(said.stdout.splitlines()[-1])
    loaded, compiled, is_same = report.pop("as built")
    assert (loaded, compiled, is_same) == (["split_step"], [], True)
    expected = {
        "other results": "out_shardings: 2: expected NamedSharding",
        "no shardings": "",
        "other devices": "in_shardings: 0: expected NamedSharding",
        "set mesh": "expected the axes dp=2 fsdp=1 tp=2 of the type Auto",
        "explicit": "expected a mesh whose axes are of the type Auto",
    }
    assert report.keys() == expected.keys()
    for case, (_, compiled, is_same) in report.items():
        assert expected[case] in "; ".join(compiled), case
        assert is_same or case == "no shardings", case


def split_on(size, kind=AUTO[0]):
    mesh = jax.sharding.AbstractMesh((size,), ("tp",), axis_types=(kind,))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tp"))


def test_what_jit_was_given_and_no_bundle_has_is_refused():
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    explicit = split_on(2, jax.sharding.AxisType.Explicit)
    for expected, options in (
        ("without compiler_options", {"compiler_options": {"xla_cpu_enable_fast_math": True}}),
        ("NamedSharding", {"in_shardings": single}),
        ("axes are of the type Auto", {"in_shardings": explicit}),
        ("mesh of several devices", {"in_shardings": split_on(1)}),
        ("one mesh", {"in_shardings": split_on(2), "out_shardings": split_on(4)}),
    ):
        with pytest.raises(ManifestError, match=f"program 'use': .*{expected}"):
            program(jax.jit(use, **options), X, X)


def test_options_of_jit(loaded):
    function = jit(
        use, bundle=loaded, name="float", static_argnames="c", keep_unused=True, inline=True
    )
    np.testing.assert_array_equal(function(X, 0.5), X / 2)
    assert function.stats().loaded == ("float/c=0.5",)
    expected = r"in_shardings, out_shardings, .*; found compiler_options"
    with pytest.raises(UsageError, match=expected):
        jit(use, bundle=loaded, compiler_options={})
