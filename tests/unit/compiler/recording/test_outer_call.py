"""The calls that made jax compile, as the hook finds them in the frames of the installed jax."""

import os
import sys

from tests.processes import ran

from prejit.compiler.recording.jax_cache_packing import RECORDER
from prejit.runtime.recorded.hook.watch import Orders
from prejit.runtime.recorded.watched_command import cache_settings, environment_for, read_events

LIBRARY = """
import jax
import jax.numpy as jnp
values = jnp.ones(3)
named = jax.jit(lambda x: x * 7)
def plain(x): return x + 1
def chosen(x, n): return x * n
def shares(x, y): return x / y.sum()
def local():
    def inner(x): return x * 5
    return jax.jit(inner)
@jax.jit
def keywords(x, **rest): return x + rest["y"]
@jax.jit
def places(x, /, *rest): return x + sum(rest)
columns = jax.jit(jax.vmap(shares, in_axes=1))
"""
PROGRAM = """
import functools, os, sys
import jax, jax.numpy as jnp, numpy as np
from package import library
@functools.partial(jax.jit, static_argnums=(1,), static_argnames=("how",), donate_argnums=(0,))
def own(x, n, scale=1.0, how=None):
    return x * n * scale
class Odd:
    def __init__(self, x): self.x = x
    def __eq__(self, other): raise ValueError("no comparing")
    __hash__ = None
jax.tree_util.register_pytree_node(Odd, lambda odd: ((odd.x,), None), lambda _, parts: Odd(*parts))
@jax.jit
def odd(value):
    return value.x + 1
if __name__ == "__main__":
    x = np.ones((2, 3), np.float32)
    own(jnp.ones((2, 3)), 2, scale=3.0, how=(1, 2.5))
    own_places = {"static_argnums": 1, "static_argnames": (), "donate_argnums": (), "donate_argnames": "x"}
    jax.jit(library.chosen, **own_places)(x, n=x)
    jax.jit(library.plain)(x)
    jax.jit(jax.vmap(library.plain))(x)
    guarded = jax.jit(lambda x: x - 4)
    guarded(x)
    library.named(x)
    library.local()(x)
    library.keywords(x, y=library.values)
    library.places(x, x, x)
    square = np.ones((3, 3))
    library.columns(square, square)
    library.columns(x=square, y=square)
    library.columns(square, y=square)
    odd(Odd(x))
    jnp.tanh(x)
    os.write(1, b"done")
"""


def test_calls_have_the_trees_names_and_functions_of_the_program(tmp_path):
    """A transformed function is not taken for the one that it wraps; only what an import makes has a name."""
    for name in ("cache", "events", "package"):
        (tmp_path / name).mkdir()
    (tmp_path / "package" / "library.py").write_text(LIBRARY)
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = cache_settings(tmp_path / "cache", write=True)
    orders = Orders(settings, str(tmp_path / "events"), recorder=RECORDER)
    done = ran(sys.executable, tmp_path / "program.py", env=environment_for(orders, os.environ))
    assert (done.stdout, done.stderr) == ("done", "")
    [process] = read_events(tmp_path / "events")
    assert process.failure is None
    by_name = {}  # names of jax and calls in their order, without what jax compiles for itself
    for each in process.requests:
        if each.call is not None:
            by_name.setdefault(each.name, []).append(each.call)
    [own] = by_name["jit_own"]
    assert own.pop("home") == str(tmp_path)
    assert own == {
        "name": "program:own",
        "arguments": [
            ["x", {"kind": "array", "of": "float32[2,3]"}],
            ["scale", {"kind": "number", "of": "float"}],
        ],
        "by_place": False,
        "static": {"n": 2},
        "fixed": {"how": "=(1, 2.5)"},
        "donated": ["x"],
        "lowering": {"placed": ["x", "n"], "keep_unused": False, "x64": False},
        "trouble": "",
    }
    [chosen] = by_name["jit_chosen"]
    assert [name for name, _ in chosen["arguments"]] == ["x", "n"]
    assert (chosen["static"], chosen["fixed"], chosen["donated"]) == ({}, {}, [])
    plain, mapped = by_name["jit_plain"]
    assert (plain["name"], mapped["name"]) == ("package.library:plain", None)
    assert "no name was found" in mapped["trouble"]
    guarded, named = by_name["jit__lambda"]
    assert (guarded["name"], named["name"]) == (None, "package.library:named")
    [inner] = by_name["jit_inner"]
    assert inner["name"] is None
    [keywords], [places] = by_name["jit_keywords"], by_name["jit_places"]
    assert [name for name, _ in keywords["arguments"]] == ["x", "y"]
    assert (keywords["by_place"], places["by_place"]) == (False, True)
    assert len(places["arguments"]) == 3
    assert [x.call for x in process.requests if x.name == "jit_tanh"] == [None], "a function of jax"
    # `in_axes` of jax.vmap is of arguments by position.
    placed, named, mixed = by_name["jit_shares"]
    assert [each["trouble"] for each in (placed, named)] == ["", ""]
    assert (placed["by_place"], named["by_place"]) == (True, False)
    assert "some arrays by position only and others by name only" in mixed["trouble"]
    [odd] = by_name["jit_odd"]
    assert odd["name"] == "program:odd"
    assert "value is of __main__.Odd, which only code can make" in odd["trouble"]
