"""Classes whose own code changes their parts: it runs as often as with jax.jit."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from prejit.compiler import Program, build, program
from prejit.runtime import jit, load
from prejit.runtime.errors import ManifestError, UsageError
from prejit.runtime.format.trees import Leaf, Node
from prejit.runtime.programs.pytree import unflatten

X = np.ones(2, np.float32)


class After(eqx.Module):
    w: Any

    def __post_init__(self):
        self.w = jnp.asarray(self.w) * 10


class Converted(eqx.Module):
    w: Any = eqx.field(converter=lambda value: value + 1)


class Sized(eqx.Module):
    """A class that is not called with its fields."""

    w: Any

    def __init__(self, size):
        self.w = jnp.ones(size)


@struct.dataclass
class Scaled:
    """A class whose own code runs whenever jax makes it."""

    w: Any

    def __post_init__(self):
        if isinstance(self.w, np.ndarray | jax.Array):
            object.__setattr__(self, "w", self.w * 7)


@struct.dataclass
class Callable(Scaled):
    def __call__(self, x):
        return x * self.w


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["k"])
@dataclasses.dataclass
class Counted:
    w: Any
    k: int = 1

    def __post_init__(self):
        self.k += 1


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=[])
@dataclasses.dataclass
class Converting:
    w: Any

    def __post_init__(self):
        if isinstance(self.w, np.ndarray | jax.Array):
            self.w = jnp.asarray(self.w)


GIVEN = (After(X), Converted(X), Sized(2), Scaled(X), Counted(X))


def name_of(given):
    return type(given).__name__.lower()


def doubled(given):
    """Return an object of the class of the argument, of all that this class holds."""
    made = jax.tree.map(lambda leaf: leaf * 2 * getattr(given, "k", 1), given)
    return made, given


@pytest.fixture(scope="module")
def bundle(build_programs):
    programs = [
        *(Program(name_of(given), fn=doubled, args=[given]) for given in GIVEN),
        Program("of_function", fn=doubled, args=lambda: [Counted(X)]),
    ]
    return load(build_programs(programs), on_mismatch="error", types=[*map(type, GIVEN)])


@pytest.mark.parametrize("given", GIVEN, ids=name_of)
def test_the_code_of_a_class_runs_as_often_as_with_jax(bundle, given):
    expected = jax.jit(lambda one: doubled(one))(given)
    names = [name_of(given), *["of_function"] * isinstance(given, Counted)]
    for name in names:
        jitted = jit(doubled, bundle=bundle, name=name, on_miss="error")
        for found in (bundle.call(name, given), jitted(given)):
            for one, other in zip(expected, found, strict=True):
                assert type(other) is type(given)
                np.testing.assert_array_equal(one.w, other.w)
                assert getattr(one, "k", None) == getattr(other, "k", None)


def test_other_classes_and_modules_that_change_themselves_are_refused(tmp_path):
    class Other:
        def __init__(self, size):
            raise NotImplementedError

    tree = Node("record", ("w",), (Leaf(),), "app:Other")
    with pytest.raises(UsageError, match="result app:Other: expected a class that takes w, found"):
        unflatten(tree, iter([X]), {"app:Other": Other})
    with pytest.raises(ManifestError, match="found a Callable whose own code changes its parts"):
        build(Program("p", fn=Callable(X), args=[X]), tmp_path, quiet=True)


def step(state):
    return jax.tree.map(lambda leaf: leaf + 1, state)


def test_other_steps_are_refused_and_converted_parts_taken(tmp_path, build_cache):
    options = {"cache": build_cache, "quiet": True}
    found = "code changes its parts each time"
    for given in (Scaled(X), Counted(X)):
        repeated = Program("step", fn=step, args=[given], repeat=(1, 2), carry=(0,))
        with pytest.raises(ManifestError, match=f"repeat: .*{found}"):
            build(repeated, tmp_path, **options)
        path = build(program(step, given), tmp_path, **options).path
        with pytest.raises(UsageError, match=f"bind: .*{found}|bind: step returns nothing"):
            load(path, on_mismatch="error").bind("step", given)
    converted = Converting(X)
    one = Program("step", fn=step, args=[converted], repeat=(1, 2), carry=(0,))
    bundle = load(build(one, tmp_path / "out", **options).path, on_mismatch="error")
    bound = bundle.bind("step", converted, repeat=1)
    bound()
    np.testing.assert_array_equal(bundle.call("step", converted, repeat=2).w, X + 2)
    np.testing.assert_array_equal(bound.read()[0].w, X + 1)
