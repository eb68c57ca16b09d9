"""Lowering functions of the user's: what cannot be in a bundle is refused, with its line."""

import pytest

from prejit.compiler.lowering.user.found_function import find_function
from prejit.compiler.lowering.user.function_lowering import lower_function
from prejit.compiler.lowering.user.modules import UserModules
from prejit.compiler.manifest.manifest import Program
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.runtime.errors import BuildError
from prejit.runtime.machine.fingerprint import PLATFORMS

HEAD = """\
import collections
import dataclasses
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
"""
LINES = HEAD.count("\n")


def lower(directory, module, platforms=("cpu",), args=None):
    """Lowers `f` of a module, whose first line is line `LINES + 1` of its file."""
    (directory / "mymodel.py").write_text(HEAD + module)
    at = directory / "m.toml"
    program = Program("p", "mymodel:f", {"x": "float32[8, 128]"} if args is None else args)
    user = find_function(program, at, None, UserModules(directory))
    return lower_function(user, program, ProgramSpec("p", "call", {}, "p"), at, platforms)


def test_a_callback_is_refused_by_its_name_and_line(tmp_path):
    printing = "jax.debug.print('{}', x)"
    for line, name, around in (
        (printing, "jax.debug.print", "f = g"),
        ("jax.debug.callback(print, x)", "jax.debug.callback", "f = g"),
        ("jax.debug.breakpoint()", "jax.debug.callback", "f = g"),
        ("x = jax.pure_callback(np.sin, x, x)", "jax.pure_callback", "f = g"),
        ("x = io_callback(np.sin, x, x, ordered=True)", "jax.experimental.io_callback", "f = g"),
        (printing, "jax.debug.print", "def f(x): return lax.fori_loop(0, 3, lambda i, x: g(x), x)"),
        (printing, "jax.debug.print", "def f(x): return lax.cond(x[0, 0] > 0, g, lambda x: x, x)"),
        (printing, "jax.debug.print", "f = jax.jit(jax.vmap(g))"),
        (printing, "jax.debug.print", "f = jax.checkpoint(g)"),
    ):
        with pytest.raises(BuildError) as caught:
            lower(tmp_path, f"def g(x):\n    {line}\n    return x\n{around}\n")
        message = str(caught.value)
        assert f"{name} at {tmp_path / 'mymodel.py'}:{LINES + 2}" in message
        assert message.startswith(f"{tmp_path / 'm.toml'}: program p: cannot lower mymodel:f: ")
        assert "no Python" in str(caught.value.hint)


HIDDEN = """
from jax.extend.core import Primitive
from jax.interpreters import mlir
hidden = Primitive("hidden")
hidden.def_abstract_eval(lambda x: x)
call = mlir.lower_fun(lambda x: jax.pure_callback(np.sin, x, x), multiple_results=False)
mlir.register_lowering(hidden, call)
def f(x):
    return hidden.bind(x)
"""


def test_a_callback_that_only_the_lowered_program_shows_is_refused(tmp_path):
    with pytest.raises(BuildError, match="without Python, found a callback that") as caught:
        lower(tmp_path, HIDDEN)
    assert "EQX_ON_ERROR=nan" in str(caught.value.hint)


KERNEL = """
def kernel(x, y):
    y[...] = x[...] + 1
def f(x):
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype){})(x)
"""


def test_a_function_is_lowered_for_the_platforms_that_have_it(tmp_path):
    assert lower(tmp_path, KERNEL.format(""), ("tpu",)).platforms == ("tpu",)
    assert lower(tmp_path, KERNEL.format(", interpret=True")).platforms == PLATFORMS
    for platforms in (("cpu",), ("cpu", "tpu")):
        with pytest.raises(BuildError) as caught:
            lower(tmp_path, KERNEL.format(""), platforms)
        said = "program p: cannot lower mymodel:f for cpu: ValueError: Only interpret"
        assert said in str(caught.value)
        hint = str(caught.value.hint)
        assert f"pallas_call at {tmp_path / 'mymodel.py'}:{LINES + 5} has no kernel for cpu" in hint
        assert "interpret=True" in hint
    module = """
def f(x):
    return lax.platform_dependent(x, cpu=lambda x: x + 1, cuda=lambda x: x + 2)
"""
    one, both = lower(tmp_path, module, ("cpu",)), lower(tmp_path, module, ("cuda", "cpu"))
    assert one.platforms == both.platforms == ("cpu", "cuda")
    assert one.portable == both.portable, "another target compiles all again"
    with pytest.raises(BuildError, match="cannot lower mymodel:f for tpu: ") as caught:
        lower(tmp_path, module, ("cpu", "tpu"))
    assert "platform_dependent" in str(caught.value.hint)


def test_a_result_keeps_its_structure(tmp_path):
    rng, empty = "jax.random.key(0)", "collections.namedtuple('EmptyState', '', module='m')()"
    for returned, tree in (
        (rng, '"key:threefry2x32"'),
        (f"{{'rng': {rng}, 'x': x}}", '["dict",[["rng","key:threefry2x32"],["x","*"]]]'),
        ("[x, {'a': {5: x}}]", '["list",["*",["dict",[["a",["dict",[[5,"*"]]]]]]]]'),
        ("None", "null"),
        ("(None, x)", '["tuple",[null,"*"]]'),
        ("{'x': x, 'more': {}}", '["dict",[["more",["dict",[]]],["x","*"]]]'),
        (f"(x, {empty})", '["tuple",["*",["namedtuple","m:EmptyState",[]]]]'),
    ):
        module = f"import collections\ndef f(x):\n    return {returned}\n"
        assert lower(tmp_path, module).results_tree == tree


MAPPING = """
@jax.tree_util.register_pytree_with_keys_class
class Mapping(dict):
    def tree_flatten_with_keys(self):
        return [(jax.tree_util.DictKey("a"), self["a"])], twice
    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(a=children[0])
def twice(x):
    return x * 2
def f(x):
    return twice(x["a"])
def example():
    return {"x": Mapping(a=np.ones(2))}
"""


def test_constants_of_arguments_keep_the_names_that_they_have_in_the_code(tmp_path):
    tree = lower(tmp_path, MAPPING, args="mymodel:example").arguments_tree
    assert '["name","mymodel:Mapping"],["name","mymodel:twice"]' in tree


def test_an_odd_result_is_refused(tmp_path):
    dtypes = r"expected one of bool, .*, found"
    for returned, message, hint in (
        ("{('a', 'b'): x}", r"found the key \('a', 'b'\)", "a list"),
        ("{True: x}", "found the key True", "a list"),
        ("{None: x}", "found the key None", "a list"),
        ("(x, x.astype('int1'))", rf"result\[1\]: {dtypes} int1", "astype"),
        ("jax.grad(lambda n: x[n, 0], allow_int=True)(0)", f"{dtypes} .*float0", "astype"),
    ):
        with pytest.raises(BuildError, match=message) as caught:
            lower(tmp_path, f"def f(x):\n    return {returned}\n")
        place = f"{tmp_path / 'm.toml'}: program p: cannot lower mymodel:f: "
        assert str(caught.value).startswith(place)
        assert hint in str(caught.value.hint)
