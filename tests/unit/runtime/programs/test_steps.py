"""A bound or repeated function goes on from the result that is meant, or is refused where several may be."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prejit.compiler import ManifestError, Program, build
from prejit.runtime import UsageError, load

FUNCTIONS = {
    "in_a_tuple": (lambda a, b: (a + 1, b * 2), "0, 1"),
    "in_a_list": (lambda a, b: [b * 2, a + 1], "0, 1"),
    "of_other_names": (lambda a, b: {"x": a + 1, "y": b * 2}, "'x', 'y'"),
    "of_its_name": (lambda a, b: {"b": b * 2, "a": a + 1}, ""),
    "of_its_name_and_another": (lambda a, b: {"Z": b * 2, "a": a + 1}, ""),
    "of_no_other_argument": (lambda a, b: {"b": b * 2, "next": a + 1}, ""),
    "of_another_dtype": (lambda a, b: (b.astype("int32"), a + 1), ""),
    "of_another_shape": (lambda a, b: (b[:1], a + 1), ""),
    "alone": (lambda a, b: a + 1, ""),
    "in_two": (lambda a, b: ({"n": b}, a + 1), ""),
}
"""Functions of two arrays, each with the results that may be the next `a`; "" where only `a + 1` may be."""
A, B = np.zeros(2, "f"), np.ones(2, "f")
UNCLEAR = [name for name, (_, several) in FUNCTIONS.items() if several]
CLEAR = [name for name in FUNCTIONS if name not in UNCLEAR]


@pytest.fixture(scope="module")
def bundle(build_programs):
    programs, given = [], {"a": A, "b": B}
    for name, (function, several) in FUNCTIONS.items():
        programs.append(Program(name, fn=function, args=given))
        placed = lambda a, b, function=function: function(a, b)  # noqa: E731
        programs.append(Program(f"placed_{name}", fn=placed, args=[A, B]))
        if not several:
            repeated = Program(f"repeated_{name}", function, given, repeat=(3,), carry=("a",))
            programs.append(repeated)
    return load(build_programs(programs))


@pytest.mark.parametrize("name", UNCLEAR)
def test_a_state_in_doubt(name, bundle, tmp_path, build_cache):
    function, several = FUNCTIONS[name]
    several = f"expected one result .* can be the next 'a', found {several} with the same"
    with pytest.raises(UsageError, match=several) as caught:
        bundle.bind(name, a=A)
    assert "whose key 'a' is the next value of 'a'" in str(caught.value.hint)
    with pytest.raises(UsageError, match=several.replace("'a'", "0")) as caught:
        bundle.bind(f"placed_{name}", A)
    assert "give the arguments names" in str(caught.value.hint)
    repeated = Program("r", fn=function, args={"a": A, "b": B}, repeat=(3,), carry=("a",))
    with pytest.raises(ManifestError, match=f"repeat: {several}"):
        build([repeated], tmp_path, name="r", cache=build_cache, quiet=True)


@pytest.mark.parametrize("name", CLEAR)
def test_a_state_whose_next_value_is_clear(name, bundle):
    is_placed = "name" not in name and "no_" not in name
    for step in (
        bundle.bind(name, a=A),
        *([bundle.bind(f"placed_{name}", A)] if is_placed else []),
    ):
        for _ in range(3):
            step(**{"b": B}) if "a" in step.read() else step(B)
        with pytest.raises(UsageError, match="missing"):  # not what came last
            step()
        (state,) = step.read().values()
        np.testing.assert_array_equal(state, A + 3)
    found = bundle.call(f"repeated_{name}", a=A, b=B, repeat=3)
    assert any(np.array_equal(part, A + 3) for part in jax.tree.leaves(found))


@jax.tree_util.register_dataclass
@dataclass
class Trainer:
    """As a train state of flax: no bundle holds the function, and results refer to the argument's."""

    weights: Any
    rate: Any = field(metadata={"static": True})


def trained(state, x):
    return replace(state, weights=state.weights + state.rate(x))


def test_a_state_that_holds_a_function(build_programs):
    state = Trainer(A, lambda x: x * 0.5)
    step = load(build_programs([Program("trained", trained, [state, B])])).bind("trained", state)
    for _ in range(2):
        step(B)
    np.testing.assert_array_equal(step.read()[0].weights, A + 1)


def test_two_arguments_of_one_type(bundle):
    """Both are kept: each name has its own result."""
    step = bundle.bind("of_its_name", b=B, a=A)
    for _ in range(2):
        assert step() is None
    state = step.read()
    np.testing.assert_array_equal(state["a"], A + 2)
    np.testing.assert_array_equal(state["b"], B * 4)
    step.write(a=B)
    step()
    np.testing.assert_array_equal(step.read()["a"], B + 1)
    assert isinstance(bundle.bind("of_its_name", a=A)(b=jnp.ones(2)), jnp.ndarray)
