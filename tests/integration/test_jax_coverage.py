"""The expressions of each family of JAX give in a bundle what they give in plain JAX."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
from tests.extent import sampled

from prejit.compiler.compile.worker.xla import CompileFor, compile_portable
from prejit.compiler.lowering.user.found_function import UserFunction
from prejit.compiler.lowering.user.function_lowering import lower_function
from prejit.compiler.lowering.user.modules import UserModules
from prejit.compiler.manifest.manifest import Program
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.runtime.device.device import Device
from prejit.runtime.device.transfer import to_numpy
from prejit.runtime.errors import BuildError
from prejit.runtime.format import trees
from prejit.runtime.machine.fingerprint import PLATFORMS
from prejit.runtime.programs import pytree

from . import jax_functions as table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "jax-coverage.md"
MODULES = (
    *("scipy.cluster.vq", "scipy.fft", "scipy.integrate", "scipy.interpolate", "scipy.ndimage"),
    *("scipy.optimize", "scipy.signal", "scipy.sparse.linalg", "scipy.spatial.transform"),
    *("image", "ops"),
)


@pytest.fixture(scope="module")
def names():
    """What expressions of the table may name."""
    import jax
    from flax import linen, nnx
    from jax import lax, nn, random, scipy
    from jax import numpy as jnp
    from jax.experimental import io_callback
    from jax.experimental import pallas as pl

    for module in MODULES:
        importlib.import_module(f"jax.{module}")

    fast = random.key(0, impl="unsafe_rbg")  # the default's bits take long to compile

    def apply(module, *arguments):
        """A layer of flax, which linen makes the weights of."""
        if isinstance(module, linen.Module):
            return module.init_with_output(fast, *arguments)[0]
        return module(*arguments)

    def apply_cell(cell, x):
        carry = cell.initialize_carry(fast, x.shape)
        return cell.init_with_output(fast, carry, x)[0]

    flax = {"linen": linen, "nnx": nnx, "apply": apply, "apply_cell": apply_cell}
    flax["rngs"] = lambda: nnx.Rngs(fast)
    of_jax = {"lax": lax, "nn": nn, "random": random, "scipy": scipy, "jnp": jnp}
    stats = importlib.import_module("jax.scipy.stats")
    others = {"np": np, "jax": jax, "stats": stats, "io_callback": io_callback, "pl": pl}
    return {**flax, **of_jax, **others}


def inputs():
    random = np.random.default_rng(0)
    arrays = {}
    for name, text in table.INPUTS.items():
        dtype, extents = text[:-1].split("[")
        shape = tuple(map(int, extents.split(",")))
        values = random.uniform(0.1, 0.9, shape)
        if dtype == "int32":
            values = random.integers(1, 8, shape)
        elif dtype == "uint32":
            values = random.integers(0, 1 << 32, shape)
        elif dtype == "bool":
            values = values < 0.6
        elif dtype == "complex64":
            values = values + 1j * random.uniform(0.1, 0.9, shape)
        elif name == "v":
            values = np.sort(values)
        elif name == "s":
            values = values @ values.T + np.eye(4)
        arrays[name] = np.asarray(values, dtype)
    return arrays


@pytest.fixture(scope="module")
def device():
    return Device()


@pytest.fixture
def lower(tmp_path, names):
    """Gives what lowers expressions, by name, as one function; with that function."""

    def lower(expressions, platforms):
        def function(weights, **arrays):
            return {
                name: eval(expression, {**names, **arrays})
                for name, expression in expressions.items()
            }

        user = UserFunction(function, table.INPUTS, {}, {}, UserModules(tmp_path))
        program = Program("p", "table:f", table.INPUTS)
        at = tmp_path / "m.toml"
        spec = ProgramSpec("p", "call", {}, "p")
        return lower_function(user, program, spec, at, platforms), function

    return lower


def check(program, function, device):
    """Compiles, stores, loads and runs a program; plain JAX gives the same."""
    import jax

    machine = CompileFor(platforms=program.platforms)
    serialized = compile_portable(program.portable, machine).serialized
    arrays = inputs()
    ran = device.load(serialized, "somewhere", program.results).run(
        [device.put(arrays[str(argument.path[0])]) for argument in program.arguments]
    )
    ours = pytree.unflatten(trees.parse(program.results_tree), map(to_numpy, ran))
    plain = jax.jit(function)
    theirs = plain(None, **arrays)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        found, leaves = jax.tree.leaves(ours[name]), jax.tree.leaves(expected)
        for value, leaf in zip(found, leaves, strict=True):
            assert value.dtype == leaf.dtype, name
            np.testing.assert_allclose(value, leaf, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("family", sampled(table.FAMILIES, table.SAMPLE.__contains__))
def test_a_family_of_functions_gives_what_jax_gives(family, lower, device):
    program, function = lower(table.FAMILIES[family], ("cpu",))
    assert program.platforms == PLATFORMS
    check(program, function, device)


@pytest.mark.thorough
def test_what_some_platforms_have_is_lowered_for_them(lower, device):
    together = {name: text for name, (text, _) in table.SOME_PLATFORMS.items()}
    check(*lower(together, ("cpu",)), device)
    for name, (text, platforms) in table.SOME_PLATFORMS.items():
        assert lower({name: text}, platforms)[0].platforms == platforms
        if name.startswith("lax."):  # the others are made of these
            with pytest.raises(BuildError, match="cannot lower"):
                lower({name: text}, PLATFORMS)


@pytest.mark.parametrize("name", table.REFUSED)
def test_what_no_bundle_can_hold_is_refused_by_name(name, lower, device):
    import jax

    expression, message, _ = table.REFUSED[name]
    if "before jax 0.12" in name and jax.__version_info__ >= (0, 12):
        check(*lower({"result": expression}, ("cpu",)), device)
        return
    with pytest.raises(BuildError, match=re.escape(message)):
        lower({"result": expression}, ("cpu",))


def test_the_page_shows_what_is_tried():
    """`python tests/integration/jax_functions.py` prints the tables."""
    text = f"{PAGE.read_text()}\n"
    for each in table.tables():
        assert f"\n\n{each}\n" in text
