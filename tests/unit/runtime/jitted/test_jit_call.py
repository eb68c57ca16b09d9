"""A call of a jitted function by its parameters."""

import jax
import pytest

from prejit.runtime.jitted.jit_call import Parameters


def plain(x, y=0, *, z=0, **more): ...
def static_between(x, mode, y): ...
def many(first, *others): ...
def placed(x, /, y): ...


wrapped = jax.vmap(static_between, in_axes=1)


def call(function, *args, static=(None, None), donated=(None, None), **kwargs):
    return Parameters(function, static=static, donated=donated).bind(args, kwargs)


@pytest.mark.parametrize(
    ("bound", "placed_", "order", "nameable"),
    [
        (call(plain, 1, 2), "x y", "x y", True),
        (call(plain, 1, z=3, a=4), "x", "x a z", True),
        (call(static_between, 1, "m", 2, static=(None, "mode")), "x", "x y", True),
        (call(static_between, y=2, x=1, mode="m", static=(1, None)), "x", "x y", True),
        (call(many, 1, 2, 3), "first args[0] args[1]", "first args[0] args[1]", False),
        (call(placed, 1, y=2), "x y", "x y", False),
        (call(jax.jit(plain), 1, 2), "x y", "x y", True),
        # A wrapper may treat names otherwise, as jax.vmap does: `in_axes` is of arguments by position.
        (call(wrapped, 1, 2), "args[0] args[1]", "args[0] args[1]", False),
        (call(wrapped, y=1, x=2), "", "x y", True),
        (call(wrapped, 1, y=2), "args[0]", "args[0] y", False),
        (call(wrapped, 1, mode="m", static=(1, None)), "args[0]", "args[0]", False),
    ],
)
def test_the_order_of_jax(bound, placed_, order, nameable):
    assert bound.placed == tuple(placed_.split())
    assert bound.order == tuple(order.split())
    assert bound.nameable == nameable


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnames": ["n"]},
        {"static_argnums": (1,), "static_argnames": ("k",)},
        {"static_argnums": -1},
        {"donate_argnums": (0,), "donate_argnames": ("n",)},
        {"donate_argnums": -1},
        {"static_argnums": 1, "static_argnames": "rest", "donate_argnames": ("k", "x")},
    ],
)
@pytest.mark.parametrize(
    ("args", "kwargs"), [((0, 1, 2), {}), ((0, 1), {"k": 2}), ((0,), {"n": 1, "k": 2})]
)
def test_static_and_donated_are_those_of_jax(options, args, kwargs):
    """jax tells by the argument's place or by its name, whichever the call has."""
    kinds = {}

    def function(x, n, k=0, **rest):
        kinds.update(x=type(x), n=type(n), k=type(k))
        return x, n, k

    jitted = jax.jit(function, **options)
    names = [options.get(f"{k}_arg{n}") for k in ("static", "donate") for n in ("nums", "names")]
    parameters = Parameters(function, static=(names[0], names[1]), donated=(names[2], names[3]))
    try:
        traced = jitted.trace(*args, **kwargs)
    except ValueError:
        with pytest.raises(TypeError, match="expected 2 arguments by position, found 1"):
            parameters.bind(args, kwargs)
        return
    found = parameters.bind(args, kwargs)
    assert found.static.keys() == {name for name, kind in kinds.items() if kind is int}
    by_place, by_name = traced.args_info
    donated = dict(zip(found.order, jax.tree.leaves((by_place, by_name)), strict=True))
    assert found.donated == {name for name, info in donated.items() if info.donated}


def test_the_same_call_in_other_forms_and_wrong_ones():
    bound = call(plain, 1, y=2, static=(None, ["z"]), z=3)
    assert bound.by_place() == ((1, 2), {"z": 3})
    assert bound.by_name() == ((), {"x": 1, "y": 2, "z": 3})
    parameters = Parameters(plain, static=(None, ["z"]), donated=(None, None))
    assert parameters.named([1], {"y": 2, "z": 3}) == bound.by_name()[1]
    assert call(many, 1, 2, 3, donated=(2, None)).donated == {"args[1]"}
    bound = call(many, 1, 2, 3, static=(1, None))
    assert (dict(bound.arrays), bound.static) == ({"first": 1, "args[1]": 3}, {"args[0]": 2})

    def function(x, /, **more): ...

    with pytest.raises(TypeError, match="found two of 'x'"):
        call(function, 1, x=2)
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        call(placed, 1)
    traced = jax.jit(plain).trace(1.0, z=2.0, b=3.0, a=4.0)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(traced.in_avals)[0]]
    order = call(plain, 1.0, z=2.0, b=3.0, a=4.0).order
    assert len(paths) == len(order) == 4
    assert [path[-1].key for path in paths[1:]] == list(order[1:])
