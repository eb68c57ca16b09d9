"""Functions and flax modules of the user's own: built through the command line, called from a bundle."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from prejit.runtime import UsageError, load

from .conftest import Run

MODULE = """
import jax
import jax.numpy as jnp
from flax import linen, nnx

def dense(params, x):
    return jnp.tanh(x @ params["dense"]["kernel"] + params["dense"]["bias"])

def several(params, x):
    y = dense(params, x)
    return {"y": y, "moments": (y.mean(), y.std())}

def train_step(params, batch):
    def loss(params):
        return jnp.mean((dense(params, batch["x"]) - batch["y"]) ** 2)

    return jax.value_and_grad(loss)(params)

def cholesky(a):
    return jnp.linalg.cholesky(a)

def half(x):
    return x.astype(jnp.bfloat16) * 2

class Norm(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))

module = Norm(nnx.Rngs(0))
linen_dense = linen.Dense(16)
Class = Norm
not_callable = 3
"""

MANIFEST = """
[bundle]
name = "mine"
[[program]]
name = "several"
function = "users_model:several"
params = "params.safetensors"
args = { x = "float32[{batch}, 8]" }
buckets = { batch = [1, 3] }
[[program]]
name = "train"
function = "users_model:train_step"
params = "params-orbax"
args = { batch = { x = "float32[5, 8]", y = "float32[5, 16]" } }
[[program]]
name = "cholesky"
function = "users_model:cholesky"
args = ["float32[4, 4]"]
[[program]]
name = "half"
function = "users_model:half"
args = { x = "float32[3]" }
[[program]]
name = "nnx"
function = "users_model:module"
args = ["float32[2, 4]"]
[[program]]
name = "linen"
function = "users_model:linen_dense"
params = "linen.safetensors"
args = ["float32[2, 8]"]
[[target]]
name = "cpu-host"
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import orbax.checkpoint

    directory = tmp_path_factory.mktemp("mine")
    (directory / "users_model.py").write_text(MODULE)
    (directory / "mine.toml").write_text(MANIFEST)
    random = np.random.default_rng(0)
    kernel = random.standard_normal((8, 16), dtype=np.float32)
    bias = random.standard_normal(16, dtype=np.float32)
    save_file({"dense.kernel": kernel, "dense.bias": bias}, directory / "params.safetensors")
    save_file({"kernel": kernel, "bias": bias}, directory / "linen.safetensors")
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "params-orbax", {"dense": {"kernel": kernel, "bias": bias}})
    return directory


@pytest.fixture(scope="module")
def bundle(run: Run, directory: Path) -> Path:
    run("build", directory / "mine.toml", "-o", directory / "out", quick=True)
    return directory / "out" / "mine"


@pytest.fixture(scope="module")
def expected(python: Run, directory: Path) -> dict[str, object]:
    """What plain JAX gives, in a process of its own."""
    script = """
import json, sys
sys.path.insert(0, sys.argv[1])
import jax, numpy as np, users_model as m
from safetensors.numpy import load_file
flat = load_file(sys.argv[1] + "/params.safetensors")
params = {"dense": {"kernel": flat["dense.kernel"], "bias": flat["dense.bias"]}}
x = np.linspace(-1, 1, 40, dtype=np.float32).reshape(5, 8)
loss, grads = jax.jit(m.train_step)(params, {"x": x, "y": np.zeros((5, 16), np.float32)})
print(json.dumps({
    "y": np.asarray(m.dense(params, x[:3])).tolist(),
    "loss": float(loss),
    "grad": np.asarray(grads["dense"]["kernel"]).tolist(),
    "nnx": np.asarray(m.module(x[:2, :4])).tolist(),
    "linen": np.asarray(m.linen_dense.apply({"params": params["dense"]}, x[:2])).tolist(),
}))
"""
    result: dict[str, object] = json.loads(python(script, directory).stdout.splitlines()[-1])
    return result


X = np.linspace(-1, 1, 40, dtype=np.float32).reshape(5, 8)


def test_calls_give_what_jit_gives(bundle: Path, expected: dict[str, object]) -> None:
    loaded = load(bundle, on_mismatch="error")
    result = loaded.call("several", x=X[:3])
    np.testing.assert_allclose(result["y"], expected["y"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result["moments"][0], np.mean(expected["y"]), rtol=1e-4)
    loss, grads = loaded.call("train", batch={"x": X, "y": np.zeros((5, 16), np.float32)})
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(grads["dense"]["kernel"], expected["grad"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loaded.call("nnx", X[:2, :4]), expected["nnx"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loaded.call("linen", X[:2]), expected["linen"], rtol=1e-4, atol=1e-6)
    matrix = np.eye(4, dtype=np.float32) * 9
    np.testing.assert_allclose(loaded.call("cholesky", matrix), np.eye(4) * 3)
    half = loaded.call("half", x=np.ones(3, np.float32))
    assert str(half.dtype) == "bfloat16"
    assert half.astype(np.float32).tolist() == [2, 2, 2]
    of_jax = loaded.call("half", x=jnp.ones(3))
    assert isinstance(of_jax, jax.Array)
    assert (of_jax + 1).tolist() == [3, 3, 3]
    assert {report.source for report in loaded.report()} == {"loaded", "unused"}


def test_wrong_arguments_are_told_what_fits(bundle: Path) -> None:
    loaded = load(bundle)
    wrong: list[tuple[str, tuple[object, ...], dict[str, object], str]] = [
        ("sevral", (), {}, "no program 'sevral'"),
        ("several", (), {}, "x is missing"),
        ("several", (X[:3],), {}, "unexpected 0: its arguments are given by name"),
        ("several", (), {"x": X}, r"expected float32\[3, 8\], found float32\[5, 8\]"),
        ("several", (), {"x": X[:3].astype(np.int64)}, "found int64"),
        ("several", (), {"x": X[:3], "z": X}, "unexpected z"),
        ("cholesky", (), {"a": X}, "unexpected a: its arguments are given by position"),
    ]
    for name, args, kwargs, message in wrong:
        with pytest.raises(UsageError, match=message):
            loaded.call(name, *args, **kwargs)


def test_the_command_line_calls_on_files(run: Run, bundle: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", np.zeros((5, 16), np.float32))
    arguments = ("--arg", f"batch.x={tmp_path / 'x.npy'}", "--arg", f"batch.y={tmp_path / 'y.npy'}")
    done = run("call", bundle, "train", *arguments, "-o", tmp_path / "out", "--json")
    results = json.loads(done.stdout)["results"]
    assert results["1.dense.kernel"] == {"dtype": "float32", "shape": [8, 16]}
    assert np.load(tmp_path / "out" / "1.dense.kernel.npy").shape == (8, 16)


WIDE = """
def f(params, x):
    return params["table"][x] * params["scale"]
"""
WIDE_MANIFEST = """
[bundle]
name = "wide"
[[program]]
name = "f"
function = "wide:f"
args = { x = "int32[2]" }
params = "wide.safetensors"
[[target]]
name = "cpu-host"
"""


def test_parameters_of_64_bits_become_those_of_32_as_in_jit(run: Run, tmp_path: Path) -> None:
    table, scale = np.arange(5), np.linspace(0, 1, 2)
    (tmp_path / "wide.py").write_text(WIDE)
    manifest = tmp_path / "wide.toml"
    manifest.write_text(WIDE_MANIFEST)
    save_file({"table": table, "scale": scale}, tmp_path / "wide.safetensors")
    said = run("build", manifest, "-o", tmp_path).stderr
    assert "['params']['scale'] as float32 and not float64" in said
    assert "no golden answer" not in said
    found = load(tmp_path / "wide", on_mismatch="error").call("f", x=np.array([1, 4], np.int32))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, (table[[1, 4]] * scale).astype(np.float32))
    save_file({"table": table + 2**40, "scale": scale}, tmp_path / "wide.safetensors")
    error = run("build", manifest, "-o", tmp_path, status=2).stderr
    assert "'f': params: table: expected int64 whose values are in the range of int32" in error


BAD = {
    "users_model:denze": "did you mean 'dense'",
    "users_modle:dense": "cannot import 'users_modle'",
    "users_model:Class": "found the class",
    "users_model:not_callable": "expected something to call",
    "users_model:train_step": "cannot lower",
}


def test_functions_that_cannot_be_built_are_errors_with_their_places(
    run: Run, directory: Path
) -> None:
    manifests = [directory / f"bad{place}.toml" for place in range(len(BAD))]
    for manifest, function in zip(manifests, BAD, strict=True):
        manifest.write_text(
            f'[bundle]\nname = "{manifest.stem}"\n[[program]]\nname = "p"\nfunction = "{function}"\n'
            'args = { x = "float32[3]" }\n[[target]]\nname = "cpu-host"\n'
        )
    error = run("build", *manifests, "-o", directory / "bad", status=1).stderr
    for manifest, message in zip(manifests, BAD.values(), strict=True):
        assert message in error
        assert manifest.name in error
    assert "Traceback" not in error
