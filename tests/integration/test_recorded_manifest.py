"""The manifest of a recording builds as it is, and its programs answer as jax.jit does."""

import importlib
import inspect
import sys

import jax
import numpy as np
import pytest

from prejit.compiler.manifest.reading import read_manifest
from prejit.runtime import load

pytestmark = pytest.mark.thorough

IMPORTED = """
from typing import Any, NamedTuple
import jax
import jax.numpy as jnp
class Point(NamedTuple):
    x: Any
    y: Any
@jax.jit
def distance(point):
    return jnp.hypot(*point)
squared = jax.jit(lambda x: x * x)
"""
MODULE = """
from functools import partial
from typing import Any, NamedTuple
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from recorded_module import Point, distance, squared
class Carry(NamedTuple):
    total: Any
    key: Any
def ones(*shape):
    return jnp.arange(1, 1 + int(np.prod(shape)), dtype=jnp.float32).reshape(shape) / 10
@jax.jit
def plain(x, scale):
    return jnp.tanh(x * scale).sum(axis=0)
@jax.jit
def dicts(params, x):
    return jnp.tanh(x @ params["dense"]["kernel"]) + params["bias"]
@jax.jit
def nested(parts, pair):
    return {"sum": parts["layers"][0] + pair[0], "rest": (pair[1], None)}
@partial(jax.jit, static_argnums=1, static_argnames="mode")
def by_static(x, steps, mode="fast"):
    return x * steps + (1 if mode == "fast" else 2)
@partial(jax.jit, static_argnames=("epsilon", "shape"))
def by_literal(x, epsilon, shape):
    return x.reshape(shape) + epsilon
@jax.jit
def default(x, scale=2.0, *, shift=None):
    return x * scale if shift is None else x * scale + shift
def raw(x):
    return x + 1
def share(x):
    return x / x.sum()
vectorized = jax.jit(jax.vmap(share, in_axes=1, out_axes=1))
class Scaler:
    def __init__(self):
        self.scale = ones(4)
    @partial(jax.jit, static_argnums=0)
    def apply(self, x):
        return x * self.scale
scaler = Scaler()
dense = linen.Dense(3)
variables = dense.init(jax.random.key(0), jnp.zeros((1, 4)))
linen_apply = jax.jit(dense.apply)
network = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
graph, state = nnx.split(network)
@nnx.jit
def by_nnx(network, x):
    return network(x)
@jax.jit
def by_state(state, x):
    return nnx.merge(graph, state)(x)
@partial(jax.jit, donate_argnums=0)
def scan(carry, xs):
    def body(carry, x):
        return Carry(carry.total + x, jax.random.fold_in(carry.key, 1)), x.sum()
    carry, sums = jax.lax.scan(body, carry, xs)
    return carry, sums
adam = optax.adam(1e-2)
@partial(jax.jit, donate_argnames=("params", "optimizer"))
def train(params, optimizer, x):
    loss, gradient = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
    updates, optimizer = adam.update(gradient, optimizer)
    return optax.apply_updates(params, updates), optimizer, loss
def initial():
    params = {"w": ones(4, 2)}
    return {"params": params, "optimizer": adam.init(params)}
"""

CALLS = """
CALLS = {
    "plain": (plain, [lambda n=n, m=m: ((ones(n, m), np.float32(2)), {}) for n in (1, 8) for m in (4, 6)]),
    "dicts": (dicts, [
        lambda n=n: (({"dense": {"kernel": ones(4, 3)}, "bias": ones(3)}, np.ones((n, 4), np.float32)), {})
        for n in (2, 5)
    ]),
    "nested": (nested, [lambda: (({"layers": [ones(3)]}, (ones(3), jnp.arange(2))), {})]),
    "static": (by_static, [
        *(lambda n=n: ((ones(3), n), {}) for n in (2, 3)),
        lambda: ((ones(5), 3), {"mode": "slow"}),
    ]),
    "literal": (by_literal, [lambda: ((ones(6), 1e-3), {"shape": (2, 3)})]),
    "default": (default, [
        lambda: ((ones(3),), {}),
        lambda: ((ones(3), 3.0), {}),
        lambda: ((ones(3),), {"shift": ones(3)}),
    ]),
    "call": (jax.jit(raw), [lambda: ((ones(3),), {}), lambda: ((ones(7),), {})]),
    "vmap": (vectorized, [lambda: ((ones(2, 3),), {})]),
    "module": (distance, [lambda: ((Point(ones(3), ones(3)),), {})]),
    "lambda": (squared, [lambda: ((ones(3),), {})]),
    "method": (scaler.apply, [lambda: ((ones(4),), {})]),
    "linen": (linen_apply, [lambda: ((variables, ones(2, 4)), {})]),
    "nnx": (by_nnx, [lambda: ((network, ones(2, 4)), {})]),
    "nnx state": (by_state, [lambda: ((state, ones(2, 4)), {})]),
    "scan": (scan, [lambda: ((Carry(jnp.zeros(3), jax.random.key(1)), ones(5, 3)), {})]),
    "train": (train, [lambda: ((), {**initial(), "x": ones(6, 4)})]),
}
"""
RUN = """
if __name__ == "__main__":
    for function, calls in CALLS.values():
        for each in calls:
            args, kwargs = each()
            function(*args, **kwargs)
    jax.jit(lambda x: x + 1)(1.0)
"""
PROGRAMS = {
    **{"plain": ["plain"] * 4, "dicts": ["dicts"] * 2, "nested": ["nested"]},
    **{"static": ["by_static", "by_static", "by_static-2"], "literal": ["by_literal"]},
    **{"default": ["default", "default-2", "default-3"], "call": ["raw", "raw"]},
    **{"vmap": ["vectorized"], "module": ["distance"], "lambda": ["squared"], "method": ["apply"]},
    **{"linen": ["linen_apply"], "nnx": ["by_nnx"], "nnx state": ["by_state"], "scan": ["scan"]},
    "train": ["train"],
}
"""The program of each call."""


@pytest.fixture(scope="module")
def recorded(run, tmp_path_factory):
    """The manifest of a recorded script. Its bundle and the recording are beside it."""
    here = tmp_path_factory.mktemp("recorded")
    script, manifest = here / "recorded_script.py", here / "recorded_script.toml"
    (here / "recorded_module.py").write_text(IMPORTED)
    script.write_text(f"{MODULE}{CALLS}{RUN}")
    recording = here / "artifacts" / "recorded-script"
    done = run("record", "-o", recording, "--manifest", manifest, "--", sys.executable, script)
    assert "left out jit__lambda at" in done.stderr
    before = (recording / "index.json").read_bytes()
    run("plan", manifest, "--cache", here / "none", status=8)
    run("build", manifest, "-o", here / "artifacts", quick=True)
    assert (recording / "index.json").read_bytes() == before
    return manifest


@pytest.fixture(scope="module")
def bundle(recorded):
    module = module_of(recorded)
    found = recorded.parent / "artifacts" / "recorded-script-functions"
    return load(found, on_mismatch="error", types=[module.Carry])


def module_of(recorded):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(recorded.parent)
        return importlib.import_module(recorded.stem)


# flax warns who reads a Param by the name that it has in its pytree.
@pytest.mark.filterwarnings("ignore:'.value' access is now deprecated:DeprecationWarning")
def test_a_recorded_call_has_a_program_that_answers_as_jax(recorded, bundle):
    sections = {each.name: each for each in read_manifest(recorded).programs}
    assert {*sections} == {program for each in PROGRAMS.values() for program in each}
    assert dict(sections["plain"].buckets) == {"batch": (1, 8), "length": (4, 6)}
    for shape, (function, calls) in module_of(recorded).CALLS.items():
        for call, program in zip(calls, PROGRAMS[shape], strict=True):
            args, kwargs = call()
            expected = function(*args, **kwargs)
            args, kwargs = call()  # donated ones are gone
            given = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
            given.update(given.pop("kwargs", {}))
            if shape == "literal":  # they are in the program
                del given["epsilon"], given["shape"]
            if shape not in ("linen", "vmap"):  # *args, and wrappers
                args, kwargs = (), given
            found = bundle.call(program, *args, **kwargs)
            for one, other in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
                assert one.dtype == other.dtype
                if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
                    one, other = jax.random.key_data(one), jax.random.key_data(other)
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=shape)


def test_a_manifest_that_cannot_be_written_is_refused_before_the_run(recorded, run, tmp_path):
    before, ran = recorded.read_bytes(), tmp_path / "ran"
    # Of other people; without a directory.
    for manifest in (recorded, tmp_path / "sub" / "app.toml"):
        command = ("record", "-o", tmp_path / "b", "--manifest", manifest, "--", sys.executable)
        done = run(*command, "-c", f"open({str(ran)!r}, 'w')", status=2)
        assert f"found {manifest}; nothing was recorded" in done.stderr
    assert recorded.read_bytes() == before
    assert not ran.exists()


CHANGED = """
import os
import jax
import jax.numpy as jnp
CONFIG = {"scale": 1.0}
SIGN = 1.0
jnp.ones(3).sum()  # jax compiles at the import, too
@jax.jit
def by_global(x):
    return x * SIGN
@jax.jit
def by_entry(x):
    return x * CONFIG["scale"]
@jax.jit
def by_variable(x):
    return x * float(os.environ.get("FACTOR", "1"))
@jax.jit
def unchanged(x):
    return x * 3
if __name__ == "__main__":
    unchanged(jnp.ones(3))
    by_global(jnp.ones(3))
    SIGN, CONFIG["scale"], os.environ["FACTOR"] = -1.0, 2.0, "7"
    for function in (by_global, by_entry, by_variable, unchanged):
        function(jnp.ones(4))
"""
WIDE = """
import jax
import numpy as np
@jax.jit
def wide(x):
    return x / 3
if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    wide(np.ones(5))
"""


def record(run, directory, script):
    """Record a script; return its manifest and what was said."""
    path, manifest = directory / "changed.py", directory / "changed.toml"
    path.write_text(script)
    bundle = directory / "artifacts" / "changed"
    done = run("record", "-o", bundle, "--manifest", manifest, "--", sys.executable, path)
    return manifest, done.stderr


def test_a_call_that_the_program_changed_something_for_is_left_out(run, tmp_path):
    """A build imports the module anew, where the global, the entry and the variable are as at first."""
    manifest, said = record(run, tmp_path, CHANGED)
    programs = {each.name: dict(each.args) for each in read_manifest(manifest).programs}
    assert programs == {
        "unchanged": {"x": "float32[{batch}]"},
        "by_global": {"x": "float32[3]"},  # the call after SIGN changed is none of it
    }
    why = "at changed.py:25: imported anew, it compiles to another"
    for name in ("by_global", "by_entry", "by_variable"):
        assert f"left out jit_{name} {why}" in said


def test_a_program_of_64_bits_says_what_its_build_needs(run, tmp_path):
    manifest, said = record(run, tmp_path, WIDE)
    assert "build it with JAX_ENABLE_X64=1" in said
    assert "# Build it with JAX_ENABLE_X64=1" in manifest.read_text()
    for command in ("plan", "build"):
        refused = run(command, manifest, status=2).stderr
        assert "expected a dtype of at most 32 bits, found 'float64[5]'" in refused
