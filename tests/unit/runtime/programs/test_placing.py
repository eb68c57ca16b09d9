"""Results lie where jax.jit leaves them, or the call is refused by name."""

import inspect

import pytest

from prejit.compiler import Program

CODE = """
import sys
import jax, jax.numpy as jnp, numpy as np, pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from prejit.runtime import UsageError, load
from prejit.server import Engine
one, two = jax.devices()
host = np.arange(4, dtype="f")
bundle = load(sys.argv[1], on_mismatch="error")
def stepped(way, state, x):
    bound = bundle.bind("step", state=state)
    bound(x=host)
    return bound(x=x) if way == "call" else bound.call_async(x=x).result()
def same(found, expected):
    for name, mine in found.items():
        theirs = expected[name]
        assert isinstance(mine, jax.Array), (name, type(mine))
        assert mine.devices() == theirs.devices(), (name, mine.devices(), theirs.devices())
        assert mine.committed == theirs.committed, (name, mine.committed, theirs.committed)
        assert (mine.dtype, mine.weak_type) == (theirs.dtype, theirs.weak_type), name
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
        assert (mine + 1).devices() == theirs.devices()
added, drawn_by_jax, stepped_by_jax = jax.jit(add), jax.jit(drawn), jax.jit(step)
engine = Engine(bundle)
ways = {
    "call": bundle.call,
    "call_async": lambda *args: bundle.call_async(*args).result(),
    "engine": engine.call,
    "submit": lambda *args: engine.submit_call(*args).result(),
}
first, second = jax.device_put(host, one), jax.device_put(host, two)
for _ in range(2):
    for default in (None, two):
        with jax.default_device(default):
            for x in (jnp.asarray(host), first, second):
                key = jax.device_put(jax.random.key(1), x.sharding if x.committed else None)
                wanted = {y is x: (added(x, y), added(y, x)) for y in (x, host)}
                noisy = drawn_by_jax(key, x), drawn_by_jax(key, host)
                for call in ways.values():
                    for name in ("add", "padded"):
                        for y in (x, host):
                            same(call(name, x, y), wanted[y is x][0])
                            same(call(name, y, x), wanted[y is x][1])
                    same(call("drawn", key, x), noisy[0])
                    same(call("drawn", key, host), noisy[1])
                for way in ("call", "call_async"):
                    same(stepped(way, host, x), stepped_by_jax(host, x))
            for way, call in ways.items():
                assert not isinstance(call("add", host, host)["sum"], jax.Array)
def refuses(text, call, *args, **kwargs):
    with pytest.raises(UsageError, match=text) as caught:
        call(*args, **kwargs)
    assert caught.value.hint
mesh = Mesh(np.array([one, two]), "x")
shardings = [NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["x"], [])]
for _ in range(2):
    for way, call in ways.items():
        call("add", first, host)
        for sharding in shardings:
            x = jax.device_put(host, sharding)
            refuses("1: expected an array on one device, found it over", call, "add", host, x)
        refuses("committed to one device, found 0 on", call, "add", first, second)
    bound = bundle.bind("step", state=host)
    bound(x=first)
    for sharding in shardings:
        refuses("x: expected an array on one device", bound, x=jax.device_put(host, sharding))
    same(bound(x=second), stepped_by_jax(host, second))
engine.close()
"""


def add(x, y):
    return {"sum": x + y, "weak": 3}


def drawn(key, x):
    import jax

    return {"sum": jax.random.normal(key, x.shape) + x, "weak": 3}


def step(state, x):
    return {"state": state + x, "sum": x * 2, "weak": 3}


@pytest.fixture(scope="module")
def path(build_programs):
    rows, four = "float32[{batch}]", "float32[4]"
    padded = {"buckets": {"batch": (8,)}, "pad": ["batch"]}
    programs = [
        Program("add", fn=add, args=[four, four]),
        Program("padded", fn=lambda x, y: {"sum": x + y}, args=[rows, rows], **padded),
        Program("drawn", fn=drawn, args=["key[]", four]),
        Program("step", fn=step, args={"state": four, "x": four}),
    ]
    return build_programs(programs)


@pytest.mark.thorough
def test_results_lie_where_those_of_jax_do(path, run_python):
    functions = "".join(map(inspect.getsource, (add, drawn, step)))
    run_python(f"from typing import Any\n{functions}{CODE}", path, env={"JAX_NUM_CPU_DEVICES": "2"})
