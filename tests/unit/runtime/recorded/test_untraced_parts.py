"""The texts, trees and inputs by which calls are told apart, and brought to another process."""

import contextlib
import copy
import enum
import functools
import importlib
import io
import itertools
import json
import logging
import os
import sys
import tempfile
import time
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prejit.runtime.recorded.hook import process_inputs
from prejit.runtime.recorded.hook.input_facts import (
    FILES_OF_MEMORY,
    file_of,
    identity_of,
    initial_environment,
    is_of_library,
    listing_digest,
    order_digest,
    packages_digest,
)
from prejit.runtime.recorded.hook.jax_calls import JaxCall
from prejit.runtime.recorded.hook.jaxpr_texts import jaxpr_text
from prejit.runtime.recorded.hook.kept_calls import given_values, tree_json, tree_of
from prejit.runtime.recorded.hook.kept_shardings import NotKeptError
from prejit.runtime.recorded.hook.plain_texts import text_of
from prejit.runtime.recorded.hook.process_inputs import InputComparison, file_digest
from prejit.runtime.recorded.hook.watch import StartClock

KEYS = st.text(max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
)


@given(VALUES, VALUES)
def test_texts_are_equal_where_values_are(one, other):
    assert text_of(one) == text_of(copy.deepcopy(one))
    assert (text_of(one) == text_of(other)) == (repr(one) == repr(other))


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


class Holder:
    def __init__(self, value):
        self.value = value

    def method(self):
        return self.value


class Cached(Holder):
    @functools.cached_property
    def twice(self):
        return 2 * self.value


SCALE = [1.0]


def scaled(x):
    return x * SCALE[0]


def closing(value):
    return lambda x: x + value


def test_texts_have_values_of_globals(monkeypatch):
    before = text_of(scaled)
    monkeypatch.setitem(globals(), "SCALE", [2.0])
    assert text_of(scaled) != before


class Rate(float):
    pass


class Table(dict):
    pass


class Slotted:
    __slots__ = ("__value",)

    def __init__(self, value):
        self.__value = value


class Wrapping(Holder):
    def __init__(self, function, value):
        functools.update_wrapper(self, function)
        self.value = value


def with_attribute(value, made):
    made.value = value
    return made


def of_class(value):
    class Base:
        rate = value

    class Child(Base):
        twice = property(lambda self: 2 * value)

        def __getitem__(self, place):
            return place * value

    return Child, Base, Child.twice, Child.__getitem__


def clipped(value):
    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, t: (jnp.minimum(t, value),))
    return identity


def of_metaclass(value):
    kind = type("Kind", (type,), {"rate": property(lambda _: value), "__module__": __name__})
    return kind("Rated", (), {"__module__": __name__})


def of_enumeration(value):
    class Rate(enum.Enum):
        LOW = value

    return Rate


def member_with_attribute(value):
    member = of_enumeration(1).LOW
    member.rate = value
    return member


def of_module(value):
    module = ModuleType("rates")
    module.rate = value
    return lambda x: x * module.rate


MAKERS = [
    *(Rate, Slotted, iter, memoryview, io.BytesIO, ValueError, MappingProxyType),
    *(lambda value: np.full(3, value), lambda value: jnp.full(2000, value)),
    lambda value: closing([*Mode][value]),
    lambda value: functools.partial(closing, 1) if value else functools.partial(closing, value=1),
    *(lambda value: Holder(value).method, lambda value: Holder(Holder(np.full(1, value))).method),
    *(lambda value: jax.jit(closing(value)), lambda value: [value].index),
    lambda value: lambda x, by=value: x * by,
    lambda value: lambda x, by=(str.upper, str.lower)[value]: x,
    lambda value: Cached(value).method,
    lambda value: with_attribute(value, Table()),
    lambda value: with_attribute(value, closing(1)),
    lambda value: defaultdict(lambda: value),
    *(lambda value, place=place: of_class(value)[place] for place in range(4)),
    lambda value: Wrapping(scaled, value),
    clipped,
    lambda value: type(
        "Calls", (), {"__call__": jax.jit(closing(value)), "__module__": __name__}
    )(),
    lambda value: (each * value for each in "ab"),
    lambda value: np.ma.array([1, 2], mask=[value, 0]),
    jax.random.key,
    lambda value: jnp.asarray(2.0) if value else jnp.float32(2.0),
    lambda value: eval("lambda *a: a" if value else "lambda a: a"),
    *(of_module, of_metaclass, member_with_attribute, lambda value: of_enumeration(value).LOW),
    lambda value: np.frompyfunc(lambda x: x * value, 1, 1),
    lambda value: jax.jit(scaled, static_argnums=0 if value else None),
    lambda value: jax.jit(scaled, donate_argnums=0 if value else None),
]
ARGUMENTS = {iter: ([1], [2]), MappingProxyType: ({"a": 1}, {"a": 2})}
ARGUMENTS |= dict.fromkeys((memoryview, io.BytesIO), (b"1", b"2"))


@pytest.mark.parametrize("make", MAKERS)
def test_texts_have_what_values_hold(make):
    """Else a call without a trace gives the results of another rate, key or rule of a gradient."""
    one, other = ARGUMENTS.get(make, (1, 0))
    held = make(one), make(one), make(other)
    texts = [text_of(closing(each)) for each in held]
    assert texts[0] == texts[1] != texts[2]
    assert "0x" not in texts[0]


@pytest.mark.parametrize(
    "iterator",
    [
        itertools.cycle([1, 2]),
        itertools.chain([1], [2]),
        itertools.islice([1, 2], 1),
        itertools.zip_longest([1], [2]),
        np.ones(2).flat,
    ],
    ids=lambda iterator: type(iterator).__name__,
)
def test_an_iterator_whose_place_nobody_sees_is_never_left_untraced(iterator):
    """Else a call without a trace gives the results of another step of the iterator."""
    with pytest.raises(NotKeptError, match=rf"it holds a \w+\.{type(iterator).__name__}, .*where"):
        text_of(closing(iterator))


def test_texts_have_globals_of_modules_inside_packages(tmp_path, monkeypatch):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "inner.py").write_text("RATE = 1.0")
    monkeypatch.syspath_prepend(tmp_path)
    inner = importlib.import_module("pack.inner")
    names = {"__name__": __name__, "pack": sys.modules["pack"]}
    function = eval("lambda x: x * pack.inner.RATE", names)
    before = text_of(function)
    monkeypatch.setattr(inner, "RATE", 2.0)
    assert text_of(function) != before
    for name in ("pack", "pack.inner"):
        monkeypatch.delitem(sys.modules, name)


def test_a_trace_does_not_change_the_text_of_a_schedule():
    """The text of a trainer has that of its schedule: a call without a trace must not change later ones."""
    schedule = optax.cosine_decay_schedule(0.1, 100)
    before = text_of(schedule)
    jax.jit(schedule)(3)
    assert text_of(schedule) == before != text_of(optax.cosine_decay_schedule(0.1, 101))


def test_values_that_hold_themselves_or_their_places_have_texts():
    value = Holder(None)
    value.value = [value]
    assert text_of(value) == text_of(copy.deepcopy(value))

    def cached():
        value = np.ones(2)
        return {"cache": {(id(value), "x"): 1}, "value": value}

    first, second = cached(), cached()
    assert text_of(first) == text_of(second)
    assert text_of({1 << 40: 1}) != text_of({1 << 41: 1})
    shapes = [jax.ShapeDtypeStruct((2,), "float32", weak_type=weak) for weak in (False, True)]
    assert text_of(shapes[0]) != text_of(shapes[1])
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    before = text_of(sharding)
    assert isinstance(hash(sharding), int)  # it keeps this one, which is of a place
    assert text_of(sharding) == before
    loggers = [logging.getLogger(name) for name in ("one", "other")]
    before = [*map(text_of, loggers)]
    assert before[0] != before[1]
    loggers[0].setLevel(logging.DEBUG)
    assert text_of(loggers[0]) != before[0]


HELD = """
import logging, os, random, sys, threading
import jax, numpy as np, scipy.stats
from absl import flags
from prejit.runtime.recorded.hook.plain_texts import text_of
if len(sys.argv) > 1:  # as the hook of prejit does
    os.environ["PREJIT_HOOK"] = "orders"
    logging.getLogger("jax._src.cache_key").setLevel(logging.DEBUG)
flags.DEFINE_float("rate", 0.1, "")
thread = threading.Thread(target=print)
thread.start()
thread.join()
held = [os.environ, logging.getLogger("mine"), logging.getLogger(), flags.FLAGS, thread, random.random]
held += [jax.ShapeDtypeStruct((2,), "float32"), jax.typeof(2.0), scipy.stats.norm, np.random.rand]
for each in held:
    print(text_of(each))
"""


def test_what_programs_often_hold_has_one_text_in_all_processes(run_python):
    """No other text of it, and so no call without a trace: a module-level logger is in most functions."""
    texts = [run_python(HELD, *more).stdout.splitlines() for more in ([], ["watched"])]
    assert texts[0] == texts[1]
    assert len({*texts[0]}) == len(texts[0])


def test_a_jaxpr_has_a_text_that_no_earlier_trace_changes():
    """The function of a primitive outside jax.jit, such as `lax.scan`, holds one."""

    def made(factor, size=2):
        table = np.full(size, factor)
        return jax.make_jaxpr(lambda x: jax.nn.relu(x * table).sum() * factor)(np.ones(size))

    before = text_of(made(2.0))
    jax.make_jaxpr(jnp.sin)(1.0)
    assert text_of(made(2.0)) == before
    assert text_of(made(3.0)) != before
    assert text_of(made(2.0, 3)) != before


def negated(scale, x):
    @jax.custom_jvp
    def rule(x):
        return -x * scale

    rule.defjvps(lambda t, *_: t)
    return rule(x)


@jax.custom_vjp
def by_hand(x):
    return jnp.sin(x)


by_hand.defvjp(lambda x: (jnp.sin(x), x), lambda x, t: (t * jnp.cos(x),))
LIKE = (
    (lambda x, by: x * by, (2.0, -0.0, 0.0, float("nan"), np.float64(2), np.int32(2))),
    (lambda x, by: x + by, (np.arange(3.0), np.arange(3), jnp.arange(3.0) + 1, 1, True)),
    (lambda x, to: x.astype(to), ("int32", "bfloat16", bool)),
    (lambda x, axis: jnp.stack([x, x], axis), (0, 1)),
    (lambda x, count: jax.lax.scan(lambda c, _: (c * 2, c), x, length=count), (2, 3)),
    (lambda x, by: jax.lax.cond(x[0] > 0, lambda: x, lambda: x * by), (2, 3)),
    (lambda x, by: jax.lax.while_loop(lambda x: x[0] < by, lambda x: x + 1, x), (2, 3)),
    (lambda x, scale: negated(scale, x), (1.0, 2.0)),
    (lambda x, order: x[jnp.array(order)], ((0, 1), (1, 0))),
    (lambda x, mode: x.at[5].add(1.0, mode=mode), ("drop", "clip")),
    (lambda x, impl: jax.random.normal(jax.random.key(1, impl=impl), 3), ("rbg", None)),
    (lambda x, precision: jnp.dot(x, x, precision=precision), (None, "highest")),
    (lambda x, inner: jax.jit(inner)(x), (jnp.sin, jnp.cos, jax.nn.relu, by_hand)),
    (lambda x, y: y(x), (lambda x: x - x[::-1], lambda x: x[::-1] - x)),
    (lambda x, y: y(x), (lambda x: {"a": x}, lambda y: {"a": y})),
)
"""Functions, and the values that make each of them into several programs."""


@pytest.mark.thorough
def test_jaxprs_with_one_text_are_lowered_alike():
    """And a jaxpr that is traced anew has the text that it had."""

    def lowered(function, x, value):
        jax.clear_caches()
        traced = jax.jit(lambda x: function(x, value)).trace(x)
        return jaxpr_text(traced.jaxpr), traced.lower().as_text()

    for x in (jnp.ones(3), jnp.ones(3, "bfloat16")):
        programs = {}
        for function, value in ((each, value) for each, values in LIKE for value in values):
            text, program = lowered(function, x, value)
            assert lowered(function, x, value)[0] == text
            assert programs.setdefault(text, program) == program
        assert len(programs) == len(set(programs.values())) > 30


def test_what_has_no_exact_text_is_not_kept():
    def printing(x):
        jax.debug.print("{}", x)
        return x

    for function in (printing, lambda x: jax.pure_callback(np.sin, x, x)):
        with pytest.raises(NotKeptError, match=r"it has effects|it holds a"):
            jaxpr_text(jax.make_jaxpr(function)(1.0))


Pair = namedtuple("Pair", "left right")


class Sorted(tuple):
    __slots__ = ()

    def __new__(cls, text):
        return super().__new__(cls, sorted(text))


@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, child, beside):
        self.child, self.beside = child, beside

    def tree_flatten(self):
        return (self.child,), self.beside

    @classmethod
    def tree_unflatten(cls, beside, children):
        return cls(*children, beside)


@dataclass(frozen=True)
class Beside:
    name: str
    more: tuple = ()
    none: object = None


class Turned(NamedTuple):
    """A named tuple that jax takes apart in another order, such as OptimizerState of jax itself."""

    first: Any
    second: Any
    about: str = "turned"


jax.tree_util.register_pytree_node(
    Turned,
    lambda turned: ((turned.second, turned.first), turned.about),
    lambda about, parts: Turned(*reversed(parts), about),
)


def called(function=None, *arguments, static=()):
    leaves, tree = jax.tree.flatten(arguments)
    return JaxCall(function, None, (tree,), (), static, (), leaves, ())


def moved(tree, call=None, there=None):
    """Return a tree as another process makes it, whose call is `there`."""
    call = called() if call is None else call
    described = json.loads(json.dumps(tree_json(tree, given_values(call))))
    return tree_of(described, lambda: given_values(there or call))


KINDS = (Mode.FAST, Pair(1, None), Sorted("ba"), frozenset("ab"), Node, OrderedDict(b=1))
BESIDES = VALUES.map(lambda value: Beside("name", (value, *KINDS)))
TREES = st.recursive(
    st.just(0) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Turned, inner, inner)
        | st.builds(Node, inner, BESIDES)
    ),
)


@given(TREES)
def test_trees_of_results_arrive_as_they_were(value):
    tree = jax.tree.structure(value)
    found = moved(tree)
    assert repr(found) == repr(tree)
    assert repr(jax.tree.structure(found.unflatten(range(found.num_leaves)))) == repr(tree)


class Alone:
    """Equals no other object."""


SHARED = {"steps": 1}


def test_a_tree_has_what_the_call_was_given_and_the_objects_of_the_program():
    """Such as the functions of a train state, which have no name."""

    def here():
        function = closing(1)
        return function, called(closing(function), Node(0, {"apply": function}))

    function, call = here()
    other, there = here()
    found = moved(jax.tree.structure(Node(0, function)), call, there)
    assert found.node_data()[1] is other
    assert moved(jax.tree.structure(Node(0, SHARED))).node_data()[1] is SHARED
    for strange, kind in ((closing(3), "builtins"), (Alone(), "Alone, which equals itself alone")):
        with pytest.raises(NotKeptError, match=f"its results hold a {kind}"):
            moved(jax.tree.structure(Node(0, strange)), call, there)


def test_a_hostile_tree_calls_nothing():
    harmful = ["os", "system"], ["builtins", "eval"]
    named = [{"object": [{"named": name}, []]} for name in harmful]
    for first in (*named, {"named": ["no_such_module", "name"]}):
        with pytest.raises(NotKeptError):
            tree_of([first, {"is": None}, []], list)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "listed").mkdir()
    (tmp_path / "listed" / "one").touch()
    (tmp_path / "link").symlink_to("listed")
    return tmp_path


def compared(files, *entries):
    """Return the comparison with what the files are now, and with entries of others."""
    a, absent, listed = (str(files / name) for name in ("a.txt", "absent.txt", "listed"))
    inputs = {
        "environment": {k: v for k, v in initial_environment().items() if is_of_library(k)},
        "files": [[a, 1, identity_of(a), file_digest(a)], *entries, [absent, 2, None, None]],
        "listings": [[listed, 1, listing_digest(listed)]],
        "orders": [[str(files), 3, order_digest(str(files))]],
        "packages": [[str(files), 1, packages_digest(files)]],
        "links": [[str(files / "link"), 1, "listed"]],
        "absent": [["no_such_module", 1, None], ["no_such_parent.module", 1, None]],
        "modules": {name: file_of(module) for name, module in sys.modules.items()},
        **{"variables": [], "kinds": [], "prefix": sys.prefix},
    }
    return InputComparison(json.loads(json.dumps(inputs)), files / "receipts.json")


def test_inputs_are_compared_up_to_the_call(files):
    comparison = compared(files)
    (files / "absent.txt").write_text("")
    assert comparison.difference(1) is None
    assert comparison.difference(2) == f"the file {files / 'absent.txt'}"


def other_kind(path):
    path.unlink()
    path.mkdir()


def linked(path):
    path.replace(path.parent.parent / "moved")
    path.symlink_to("../moved")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda at: (at / "a.txt").write_text("two"), "the file {}/a.txt"),
        (lambda at: (at / "a.txt").unlink(), "the file {}/a.txt"),
        (lambda at: (at / "listed" / "new").touch(), "{}/listed"),
        (lambda at: other_kind(at / "listed" / "one"), "{}/listed"),
        (lambda at: linked(at / "listed" / "one"), "{}/listed"),
        (lambda at: (at / "new-1.0.dist-info").mkdir(), "{}"),
        (lambda at: (at / "link").unlink(), "where the link {}/link leads"),
    ],
)
def test_a_changed_input_is_named(files, change, expected):
    comparison = compared(files)
    change(files)
    assert expected.format(files) in comparison.difference(1)


def test_another_module_or_environment_of_python_is_named(files, monkeypatch):
    there, moved, elsewhere = (compared(files) for _ in range(3))
    with monkeypatch.context() as patch:
        (files / "no_such_module.py").touch()
        patch.syspath_prepend(files)
        assert there.difference(1) == "the module no_such_module, which was not there,"
        (files / "no_such_module.py").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(json, "__file__", "/other/json.py")
        patch.setitem(sys.modules, "prejit_new", json)  # the number of modules has changed
        assert moved.difference(1) == "the imported module json, from /other/json.py,"
    monkeypatch.setattr(sys, "prefix", "/other")
    assert elsewhere.difference(1) == "the environment of Python, /other,"


def test_a_file_with_other_times_is_read_once_and_has_a_receipt(files, monkeypatch):
    first, again, without = (compared(files) for _ in range(3))
    (files / "a.txt").write_text("two")
    of_another_recording = compared(files)
    (files / "a.txt").write_text("one")
    os.utime(files / "a.txt", (1, 1))
    assert first.difference(1) is None
    first.save()
    assert str(files / "a.txt") in of_another_recording.difference(1)
    monkeypatch.setattr(process_inputs, "file_digest", lambda path: None)
    assert again.difference(1) is None
    (files / "receipts.json").unlink()
    assert str(files / "a.txt") in without.difference(1)


def test_a_trace_inside_another_is_counted_once(monkeypatch):
    clock, now = StartClock(), iter((2.0, 3.0, 5.0, 9.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    # From 1 to 2 and from 2.5 to 3, inside 0.5 to 5; from 7 to 9.
    for seconds in (1.0, 0.5, 4.5, 2.0):
        clock.traced(seconds)
    assert clock.read()["tracing"] == 6.5


def test_the_order_in_which_a_trace_listed_names_is_compared(files, monkeypatch):
    same, turned, scandir = compared(files), compared(files), os.scandir
    assert same.difference(3) is None

    @contextlib.contextmanager
    def backwards(path):
        with scandir(path) as found:
            yield reversed([*found])

    monkeypatch.setattr(os, "scandir", backwards)
    assert turned.difference(1) is None
    assert turned.difference(3) == f"the names in the directory {files}, or their order,"


@pytest.mark.parametrize("linked", [False, True])
def test_memory_that_another_process_has_mapped_is_read_at_each_start(files, linked):
    """It is written without a change of its size, times and inode."""
    with tempfile.NamedTemporaryFile(dir=FILES_OF_MEMORY) as file:
        np.save(file, np.zeros(4, np.float32))
        file.flush()
        shared = np.load(file.name, mmap_mode="r+")
        shared[0] = 1
        path = file.name
        if linked:
            path = str(files / "shared")
            os.symlink(file.name, path)
        entry = [path, 1, identity_of(path), file_digest(path)]
        same, changed = (compared(files, entry) for _ in range(2))
        assert same.difference(1) is None
        shared[0] = 7
        assert identity_of(path) == entry[2]
        assert changed.difference(1) == f"the file {path}"
