"""Programs of every kind: training steps, modules, static arguments, random keys, files from elsewhere."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.manifests import functions_manifest

from prejit.runtime import UsageError, load

MODULE = """
import functools
from typing import Any, NamedTuple
import equinox
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx, struct
class Metrics(NamedTuple):
    loss: Any
    norm: Any
@struct.dataclass
class State:
    params: Any
    optimizer: Any
    step: Any
    key: Any
    name: str = struct.field(pytree_node=False, default="adam")
adam = optax.adam(1e-2)
def first_state():
    params = {"w": jnp.ones((8, 4)), "b": jnp.zeros((4,))}
    return State(params, adam.init(params), jnp.int32(0), jax.random.key(0))
def example(batch):
    return {"state": first_state(), "x": jnp.zeros((batch, 8)), "y": jnp.zeros((batch, 4))}
def loss(params, x, y, mode):
    out = x @ params["w"] + params["b"]
    return jnp.mean(((jnp.tanh(out) if mode == "tanh" else out) - y) ** 2)
def train_step(state, x, y, *, mode):
    key, noise = jax.random.split(state.key)
    x = x + 0.01 * jax.random.normal(noise, x.shape)
    value, grads = jax.value_and_grad(loss)(state.params, x, y, mode)
    updates, optimizer = adam.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    state = state.replace(params=params, optimizer=optimizer, step=state.step + 1, key=key)
    return state, Metrics(value, jnp.linalg.norm(grads["w"]))
def walk(position, velocity):
    return {"velocity": velocity * 0.5, "position": position + velocity}
def rows(x):
    return {"double": x * 2, "sum": x.sum(1)}
def mean(tokens, valid):
    return jnp.where(valid, tokens, 0).sum() / valid.sum()
def open_rows(x, scale):
    return {"scaled": x * scale, "order": jnp.argsort(x, 0), "flat": jnp.cumsum(x.reshape(-1))}
def encode(text):
    return {"latent": jnp.outer(text, text)}
def denoise(latent, text):
    latent = latent * 0.9 + 0.1 * text
    return latent, latent.mean()
def decode(latent):
    return jnp.tanh(latent)
class Norm(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))
of_equinox = equinox.nn.MLP(4, 2, 8, 1, key=jax.random.key(1))
of_nnx = Norm(nnx.Rngs(0))
of_linen = linen.Dense(16)
not_callable = 3
"""
PROGRAMS = {
    "train": 'function = "users_code:train_step"; args = "users_code:example"; donate = ["state"]; '
    'buckets = { batch = [2, 4] }; static = { mode = ["tanh", "linear"] }',
    "normal": 'function = "jax.random:normal"; args = ["key[]"]',
    "walk": 'function = "users_code:walk"; args = ["float32[3]", "float32[3]"]; donate = [0]',
    "named_walk": 'function = "users_code:walk"; donate = ["position"]; '
    'args = { position = "float32[3]", velocity = "float32[3]" }',
    "equinox": 'function = "users_code:of_equinox"; args = ["float32[4]"]',
    "nnx": 'function = "users_code:of_nnx"; args = ["float32[2, 4]"]',
    "linen": 'function = "users_code:of_linen"; params = "params-orbax"; args = ["float32[2, 8]"]',
    "rows": 'function = "users_code:rows"; args = { x = "float32[{batch}, 3]" }; '
    'buckets = { batch = [2, 8] }; pad = ["batch"]',
    "mean": 'function = "users_code:mean"; mask = 1; pad = ["batch", "length"]; '
    'args = ["float32[{batch}, {length}]", "bool[{batch}, {length}]"]; '
    "buckets = { batch = [2, 4], length = [4, 8] }",
    "open_rows": 'function = "users_code:open_rows"; open_sizes = ["batch", "width"]; '
    'args = { x = "float32[{batch}, {width}]", scale = "float32[]" }; '
    "buckets = { batch = [4], width = [3] }",
    "encode_text": 'function = "users_code:encode"; args = ["float32[4]"]',
    "denoise": 'function = "users_code:denoise"; args = ["float32[4, 4]", "float32[4]"]; '
    "repeat = [1, 20]; carry = [0]; donate = [0]",
    "decode_image": 'function = "users_code:decode"; args = ["float32[4, 4]"]',
    "exported": 'function = "exported.bin"',
    "symbolic": 'function = "symbolic.bin"; args = ["float32[{batch}, 3]"]; buckets = { batch = [1, 5] }',
    "stablehlo": 'function = "model.mlir"',
}
STABLEHLO = """
module @from_another_framework {
  func.func @main(%x: tensor<2x3xf32>, %y: tensor<3xf32>) -> (tensor<2x3xf32>, tensor<2xf32>) {
    %b = stablehlo.broadcast_in_dim %y, dims = [1] : (tensor<3xf32>) -> tensor<2x3xf32>
    %sum = stablehlo.add %x, %b : tensor<2x3xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %rows = stablehlo.reduce(%sum init: %zero) applies stablehlo.add across dimensions = [1]
        : (tensor<2x3xf32>, tensor<f32>) -> tensor<2xf32>
    return %sum, %rows : tensor<2x3xf32>, tensor<2xf32>
  }
}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint

    directory = tmp_path_factory.mktemp("any")
    (directory / "users_code.py").write_text(MODULE)
    functions_manifest(directory / "any.toml", PROGRAMS)
    (directory / "model.mlir").write_text(STABLEHLO)

    def scaled(x, *, by):
        return {"scaled": x * by}

    export = jax.export.export
    shape = jax.ShapeDtypeStruct((3,), np.float32)
    by_name = export(jax.jit(lambda **given: scaled(given["x"], by=given["by"])))(x=shape, by=shape)
    (directory / "exported.bin").write_bytes(by_name.serialize())
    (batch,) = jax.export.symbolic_shape("batch")
    sizes = jax.ShapeDtypeStruct((batch, 3), np.float32)
    (directory / "symbolic.bin").write_bytes(export(jax.jit(jnp.cumsum))(sizes).serialize())
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "params-orbax", PARAMS)
    return directory


@pytest.fixture(scope="module")
def users_code(directory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory))
        import users_code

        yield users_code
        del sys.modules["users_code"]


@pytest.fixture(scope="module")
def path(run, directory):
    run("build", directory / "any.toml", "-o", directory / "out", quick=True)
    return directory / "out" / "any"


@pytest.fixture(scope="module")
def bundle(path, users_code):
    return load(path, on_mismatch="error", types=[users_code.State, users_code.Metrics])


RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((9, 4, 8), np.float32), RANDOM.standard_normal((9, 4, 4), np.float32)
PARAMS = {
    "kernel": RANDOM.standard_normal((8, 16), np.float32),
    "bias": RANDOM.standard_normal(16, np.float32),
}
"""The parameters of the layer of flax.linen."""


def test_many_steps_on_the_device_have_the_bits_of_jit(bundle, users_code):
    import jax

    jitted = jax.jit(users_code.train_step, static_argnames="mode", donate_argnums=0)
    expected = users_code.first_state()
    step = bundle.bind("train", state=users_code.first_state(), mode="tanh")
    for number in range(300):
        x, y = X[number % 9], Y[number % 9]
        metrics = step(x=x, y=y)
        expected, expected_metrics = jitted(expected, x, y, mode="tanh")
        assert metrics == expected_metrics, number
    assert isinstance(metrics, users_code.Metrics)
    state = step.read()["state"]
    assert isinstance(state, users_code.State)
    assert (state.name, state.step) == ("adam", 300)
    for name in ("w", "b"):
        np.testing.assert_array_equal(state.params[name], expected.params[name])
    np.testing.assert_array_equal(state.key, jax.random.key_data(expected.key))
    assert {report.source for report in bundle.report()} == {"loaded", "unused"}


def test_steps_may_follow_each_other_without_waiting(bundle, users_code):
    one, other = (bundle.bind("train", state=users_code.first_state(), mode="tanh") for _ in "ab")
    batch, pending = X[0].copy(), []
    for x, y in zip(X, Y, strict=True):
        batch[...] = x
        pending.append(one.call_async(x=batch, y=y))
        batch[...] = np.nan  # the call has its own copy
    expected = [other(x=x, y=y) for x, y in zip(X, Y, strict=True)]
    assert [each.result() for each in pending] == expected
    assert all(each.done() for each in pending)


@pytest.mark.parametrize("name", ["state.safetensors", "state-orbax"])
def test_a_saved_state_goes_on_where_it_was(name, bundle, users_code, tmp_path):
    step = bundle.bind("train", state=users_code.first_state())
    step(x=X[0], y=Y[0], mode="linear")
    step.save(tmp_path / name)
    after = step(x=X[1], y=Y[1], mode="linear")
    other = bundle.bind("train", state=users_code.first_state())
    other.restore(tmp_path / name)
    assert other(x=X[1], y=Y[1], mode="linear") == after
    smaller = bundle.bind("named_walk", position=np.zeros(3, np.float32))
    with pytest.raises(Exception, match="of this program, found no 'position'") as caught:
        smaller.restore(tmp_path / name)
    assert type(caught.value).__name__ == "StoreError"
    assert smaller.read() == {"position": pytest.approx(np.zeros(3))}


def test_a_call_leaves_donated_arguments_as_they_were(bundle):
    position, velocity = np.ones(3, np.float32), np.full(3, 2, np.float32)
    moved = bundle.call("walk", position, velocity)
    assert (moved["position"].tolist(), position.tolist()) == ([3] * 3, [1] * 3)
    step = bundle.bind("named_walk", position=position, velocity=velocity)
    assert [step() for _ in range(3)] == [None] * 3
    state = {key: value.tolist() for key, value in step.read().items()}
    assert state == {"position": [4.5] * 3, "velocity": [0.25] * 3}


def test_modules_bring_their_parameters(bundle, users_code):
    x = np.linspace(-1, 1, 4, dtype=np.float32)
    np.testing.assert_allclose(bundle.call("equinox", x), users_code.of_equinox(x), rtol=1e-6)
    two = np.stack([x, x * 2])
    np.testing.assert_allclose(bundle.call("nnx", two), users_code.of_nnx(two), rtol=1e-5)
    given = X[0, :2]
    expected = given @ PARAMS["kernel"] + PARAMS["bias"]
    np.testing.assert_allclose(bundle.call("linen", given), expected, rtol=1e-4, atol=1e-6)
    (entry,) = (entry for entry in bundle.config.programs if entry.name == "equinox")
    assert entry.weights is not None
    assert entry.portable.raw_size < 5000, "no weights in the program"


def test_programs_that_were_exported_elsewhere_run(bundle):
    x, by = np.arange(3, dtype=np.float32), np.full(3, 2, np.float32)
    assert bundle.call("exported", x=x, by=by)["scaled"].tolist() == [0, 2, 4]
    for batch in (1, 5):
        rows = np.ones((batch, 3), np.float32)
        assert bundle.call("symbolic", rows).tolist() == list(range(1, 3 * batch + 1))
    total, rows = bundle.call("stablehlo", np.ones((2, 3), np.float32), x)
    assert total.tolist() == [[1, 2, 3], [1, 2, 3]]
    assert rows.tolist() == [6, 6]


def test_fewer_rows_are_padded_and_cut_and_a_mask_says_what_is_padding(bundle):
    import jax

    for size, bucket, padding in ((1, 2, 0.5), (3, 8, 0.625), (8, 8, 0)):
        x = RANDOM.standard_normal((size, 3), np.float32)
        pending = bundle.call_async("rows", x=x)
        assert (pending.program, pending.padding) == (f"rows/batch{bucket}", padding)
        found = pending.result()
        np.testing.assert_array_equal(found["double"], x * 2)
        np.testing.assert_allclose(found["sum"], x.sum(1), rtol=1e-5, atol=1e-6)
    for shape in ((1, 3), (3, 5), (4, 8)):
        tokens = RANDOM.standard_normal(shape, np.float32)
        assert bundle.call("mean", tokens) == pytest.approx(tokens.mean(), rel=1e-5, abs=1e-6)
        valid = np.arange(tokens.size).reshape(shape) % 2 == 0
        expected = pytest.approx(tokens[valid].mean(), rel=1e-5, abs=1e-6)
        assert bundle.call("mean", tokens, valid) == expected
    assert isinstance(bundle.call("mean", jax.numpy.asarray(tokens)), jax.Array)


def test_a_pipeline_keeps_its_arrays_on_the_device(bundle, users_code):
    text = np.linspace(-1, 1, 4, dtype=np.float32)
    encoded = bundle.call_on_device("encode_text", text)["latent"]
    latent, means = bundle.call_on_device("denoise", encoded, text, repeat=20)
    image = bundle.call("decode_image", latent)
    expected, step = np.outer(text, text), bundle.bind("denoise", encoded, repeat=1)
    for number in range(20):
        expected, mean = users_code.denoise(expected, text)
        np.testing.assert_allclose(np.asarray(means)[number], mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(step(text), [mean], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(image, np.tanh(expected), rtol=1e-5, atol=1e-6)
    again = bundle.bind("denoise", encoded)
    np.testing.assert_array_equal(again(text, repeat=20), means)
    np.testing.assert_array_equal(again.read()[0], latent)
    with pytest.raises(UsageError, match="repeat: expected 1, found 7"):
        again(text, repeat=7)
    # Its memory was donated to no call.
    np.testing.assert_array_equal(np.asarray(encoded), np.outer(text, text))


ROW, THREE, FOUR = (np.zeros(size, np.float32) for size in ((1, 3), 3, 4))
WRONG_USES = [
    (lambda b: b.call("train", x=X[0], y=Y[0], mode="relu"), "state.* is missing"),
    (lambda b: b.call("rows", x=np.ones((9, 3), np.float32)), r"float32\[<=8, 3\], found"),
    (lambda b: b.call("mean", ROW, np.ones((2, 3), bool)), r"1: expected bool"),
    (lambda b: b.bind("train"), "expected an argument of 'train' to keep, found none"),
    (lambda b: b.bind("train", states=1), "'train' has no argument 'states'"),
    (lambda b: b.bind("train", state=0, mode="relu"), "bind: mode: .*'tanh', found 'relu'"),
    (lambda b: b.bind("train", x=X[0]), "nothing with the structure, shapes and dtypes of 'x'"),
    (lambda b: b.bind("normal", np.zeros(2, np.uint32)), "returns nothing with the structure"),
    (lambda b: b.bind("walk", THREE), "one result of walk that can .* 'position', 'velocity'"),
    (lambda b: b.bind("named_walk", position=FOUR), r"position: .*\[3\], found float32\[4\]"),
    (lambda b: b.bind("named_walk", position=THREE)(), r"velocity is missing"),
    (lambda b: b.bind("named_walk", position=THREE).write(x=1), "'x' is no part of the state"),
    (lambda b: b.call("open_rows", x=X[0], scale=THREE[0]), r"x: .*\[4, 3\], .*32\[4, 8\]"),
]


def test_a_wrong_use_says_what_was_expected(bundle, users_code):
    given = {"state": users_code.first_state(), "x": X[0], "y": Y[0]}
    of_mode = [
        (lambda b: b.call("train", **given, mode="relu"), "mode: expected 'tanh', found 'relu'"),
        (lambda b: b.call("train", **given), "mode is missing: expected 'linear'"),
    ]
    for call, message in (*WRONG_USES, *of_mode):
        with pytest.raises(UsageError, match=message):
            call(bundle)


def test_the_command_line_shows_how_to_call_and_takes_static_values(path, tmp_path, ran, said):
    lines = [" ".join(line.split()) for line in said("inspect", path).splitlines()]
    at = lines.index(next(line for line in lines if line.startswith("train state State(params=")))
    told = ["x float32[2, 8]", "y float32[2, 4]", 'mode "tanh" or "linear"']
    assert lines[at + 1 : at + 4] == told
    state = "State(params={'b': float32[4], 'w': float32[8, 4]}, optimizer=("
    assert lines[at + 4].startswith(f"-> ({state}")
    assert {"rows x float32[batch, 3]", "normal 0 random key"} <= {*lines}
    np.save(tmp_path / "key.npy", np.array([0, 7], np.uint32))
    call = ["call", str(path), "normal", "-o", str(tmp_path), "--json"]
    results = json.loads(said(*call, "--arg", f"0={tmp_path / 'key.npy'}"))["results"]
    assert results == {"result": {"dtype": "float32", "shape": []}}
    train = ["call", str(path), "train", "-o", str(tmp_path)]
    for begun, static, problem in (
        (call, "mode=1", "expected a name of a static argument of 'normal', found 'mode'"),
        (train, "mdoe=1", "found 'mdoe' (did you mean 'mode'?)"),
        (train, "mode", "--static: expected NAME=VALUE, found 'mode'"),
        (train, "=1", "--static: expected NAME=VALUE, found '=1'"),
    ):
        assert problem in ran(*begun, "--static", static, status=2).err
    for name, output, problem in (
        ("key.npy", "key.npy", "key.npy: cannot write results: File exists\n"),
        ("none.npy", "results", "none.npy: cannot read an array: No such file or directory\n"),
    ):
        call = ["call", str(path), "normal", "-o", str(tmp_path / output)]
        assert problem in ran(*call, "--arg", f"0={tmp_path / name}", status=6).err


MLIR = "module {{ func.func @main(%x: {0}) -> {0} {{ return %x : {0} }} }}"
BAD_FILES = [
    ("bad.bin", b"\0nothing of the kind", "", "expected a jax.export artifact or StableHLO"),
    ("bad.mlir", b"module { func.func @main( }", "", "MLIR cannot read it"),
    ("bad.mlir", b"module { func.func @f() { return } }", "", "expected a function named main"),
    ("bad.mlir", MLIR.format("tensor<?xf32>"), "", "expected a tensor with a static shape"),
    ("bad.mlir", MLIR.format("tensor<2xf32>"), 'args = ["float32[2]"]', "no 'args' for StableHLO"),
]


PADDED = 'args = ["float32[{batch}, 3]"]\nbuckets = { batch = [2] }\npad = ["batch"]'
BAD_FUNCTIONS = [
    ("users_code:Norm", 'args = ["float32[3]"]', "found the class"),
    ("users_code:not_callable", 'args = ["float32[3]"]', "expected something to call"),
    ("users_code:train_step", 'args = ["float32[3]"]', "cannot lower"),
    ("users_code:keeps_no_batch", PADDED, "'batch', and dimension 0 of result 0 is 6"),
]


def test_programs_that_cannot_be_built_are_named_with_the_reason_and_others_built(run, tmp_path):
    keeps_no_batch = "\ndef keeps_no_batch(x):\n    return x.reshape(-1)\n"
    (tmp_path / "users_code.py").write_text(MODULE + keeps_no_batch)
    functions = [*BAD_FUNCTIONS, ("users_code:rows", 'args = ["float32[1, 3]"]', "")]
    for place, (name, content, keys, message) in enumerate(BAD_FILES):
        file = tmp_path / f"{place}{name}"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        functions.insert(0, (file.name, keys, message))
    manifests = []
    for place, (function, keys, _) in enumerate(functions):
        program = {"p": f'function = "{function}"\n{keys}'}
        manifests.append(functions_manifest(tmp_path / f"m{place}.toml", program))
    done = run("build", *manifests, "-o", tmp_path / "out", "--json", status=1, quick=True)
    [built] = json.loads(done.stdout)
    assert Path(built["path"]).name == manifests[-1].stem
    assert f"{len(manifests) - 1} of {len(manifests)} bundles were not built" in done.stderr
    for manifest, (_, _, message) in zip(manifests[:-1], functions[:-1], strict=True):
        assert message in done.stderr
        assert f"{manifest.stem} ({manifest}):\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_parameters_of_64_bits_become_those_of_32_as_in_jit(run, tmp_path):
    table, scale = np.arange(5), np.linspace(0, 1, 2)
    code = "def f(params, x):\n    return params['table'][x] * params['scale']\n"
    (tmp_path / "wide.py").write_text(code)
    keys = 'function = "wide:f"; args = { x = "int32[2]" }; params = "wide.safetensors"'
    manifest = functions_manifest(tmp_path / "wide.toml", {"f": keys})
    build = ("build", manifest, "-o", tmp_path, "--cache", tmp_path / "cache")
    save_file({"table": table, "scale": scale}, tmp_path / "wide.safetensors")
    said = run(*build, quick=True).stderr
    assert "['params']['scale'] as float32 and not float64" in said
    assert "no golden answer" not in said
    found = load(tmp_path / "wide", on_mismatch="error").call("f", x=np.array([1, 4], np.int32))
    np.testing.assert_array_equal(found, (table[[1, 4]] * scale).astype(np.float32), strict=True)
    save_file({"table": table + 2**40, "scale": scale}, tmp_path / "wide.safetensors")
    error = run(*build, status=2).stderr
    assert "'f': params: table: expected int64 whose values are in the range of int32" in error


SHARDED = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
def mlp(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]
def step(params, state, x):
    value, grads = jax.value_and_grad(lambda w: jnp.mean(mlp(w, x) ** 2))(state["w"])
    w = jax.tree.map(lambda p, g: p - 0.1 * g, state["w"], grads)
    return {"w": w, "n": state["n"] + 1}, value
def total(x):
    return jax.shard_map(lambda part: jax.lax.psum(part.sum(), "data"), in_specs=P("data"), out_specs=P())(x)
def turned(state):
    return state + 1
"""
SHARDED_PROGRAMS = {
    "mlp": 'function = "sharded_code:mlp"; args = { x = "float32[{batch}, 8]" }; '
    'buckets = { batch = [2, 4] }; params = "w.safetensors"; shardings = { x = ["data"], '
    '"params.up" = ["", "tensor"], "params.down" = ["tensor"], result = ["data"] }',
    "step": 'function = "sharded_code:step"; params = "w.safetensors"; donate = ["state"]; '
    'args = { x = "float32[4, 8]", state = { w = { up = "float32[8, 16]", '
    'down = "float32[16, 4]" }, n = "int32[]" } }; shardings = { x = ["data"], '
    '"state.w.up" = ["", "tensor"], "state.w.down" = ["tensor"] }',
    "total": 'function = "sharded_code:total"; args = ["float32[6]"]; shardings = { "0" = ["data"] }',
    "turned": 'function = "sharded_code:turned"; args = { state = "float32[4, 8]" }; '
    'shardings = { state = ["data"], result = ["", "data"] }',
}
MESH = "[mesh]\ndata = 2\ntensor = 2\n"


@pytest.fixture(scope="module")
def sharded(run, tmp_path_factory):
    directory = tmp_path_factory.mktemp("sharded")
    (directory / "sharded_code.py").write_text(SHARDED)
    random = np.random.default_rng(1)
    up, down = (random.standard_normal(shape, np.float32) for shape in ((8, 16), (16, 4)))
    save_file({"up": up, "down": down}, directory / "w.safetensors")
    manifest = functions_manifest(directory / "sharded.toml", SHARDED_PROGRAMS, more=MESH)
    run("build", manifest, "-o", directory / "out", quick=True)
    return directory


def test_a_mesh_splits_a_function_its_parameters_and_its_state(sharded):
    bundle = load(sharded / "out" / "sharded", on_mismatch="error")
    weights = load_file(sharded / "w.safetensors")
    x = np.random.default_rng(0).standard_normal((4, 8), np.float32)
    expected = np.tanh(x @ weights["up"]) @ weights["down"]
    np.testing.assert_allclose(bundle.call("mlp", x=x), expected, rtol=1e-5, atol=1e-5)
    assert bundle.call("total", np.arange(6, dtype=np.float32)) == 15
    step = bundle.bind("step", state={"w": weights, "n": np.int32(0)})
    losses = [float(step(x=x)) for _ in range(4)]
    np.testing.assert_allclose(losses[0], np.mean(expected**2), rtol=1e-5)
    assert losses == sorted(losses, reverse=True)
    assert step.read()["state"]["n"] == 4
    step.save(sharded / "state.safetensors")
    following = step(x=x)
    step.restore(sharded / "state.safetensors")
    assert step(x=x) == following
    # XLA would take the parts of the result, which have as many elements, for those of the state.
    state = np.arange(32, dtype=np.float32).reshape(4, 8)
    placed = bundle.call_on_device("turned", state=state)
    np.testing.assert_array_equal(bundle.call("turned", state=placed), state + 2)
    with pytest.raises(
        UsageError, match=r"next state of turned to be split along \['data', ''\], as"
    ):
        bundle.bind("turned", state=state)
    # The new state is split as the old one is: nothing is gathered between steps.
    (entry,) = (entry for entry in bundle.config.programs if entry.name == "step")
    [split] = (text for text in entry.results if "up" in text)
    assert split == '[0,"w","up"] float32[8,16] @,tensor'


WRONG_SHARDINGS = (
    (('x = ["data"], "params', 'y = ["data"], "params'), "found 'y'"),
    (("data = 2", "data = 3"), "expected x to have a multiple of 3"),
    (('x = ["data"], "p', 'x = ["data", "", "tensor"], "p'), "expected at most 2 axes for x"),
    ((MESH, ""), "expected a [mesh] beside them"),
)


def test_shardings_that_do_not_fit_are_errors(sharded, run):
    manifests = [sharded / f"wrong{place}.toml" for place in range(len(WRONG_SHARDINGS))]
    for manifest, (change, _) in zip(manifests, WRONG_SHARDINGS, strict=True):
        functions_manifest(manifest, SHARDED_PROGRAMS, more=MESH)
        manifest.write_text(manifest.read_text().replace(*change))
    error = run("build", *manifests, "-o", sharded / "wrong", status=2).stderr
    for _, message in WRONG_SHARDINGS:
        assert message in error
    assert error.count("program 'mlp': shardings") == len(WRONG_SHARDINGS)


OPEN = """
import sys, warnings
import numpy as np
from prejit.runtime import fallback_counts, load
bundle = load(sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for batch, width in ((4, 3), (7, 2), (7, 2), (1, 1)):
        x = np.random.default_rng(batch).standard_normal((batch, width), np.float32)
        found = bundle.call("open_rows", x=x, scale=np.float32(2))
        np.testing.assert_array_equal(found["scaled"], x * 2)
        np.testing.assert_array_equal(found["order"], np.argsort(x, 0))
        np.testing.assert_allclose(found["flat"], np.cumsum(x), rtol=1e-5, atol=1e-5)
said = [str(each.message) for each in caught if each.filename == "<string>"]
assert len(said) == 2, said
assert "no bucket has the sizes of open_rows/batch7-width2" in said[0]
assert fallback_counts() == {"bucket": 2}
assert "jax.numpy" not in sys.modules
sources = {r.program: r.source for r in bundle.report() if r.program.startswith("open_rows")}
print(sources)
assert sources["open_rows/batch4-width3"] == "loaded"
assert {sources[n] for n in sources if n != "open_rows/batch4-width3"} == {sys.argv[2]}
"""


def test_open_sizes_are_compiled_from_the_bundle_once(python, path):
    python(OPEN, path, "compiled")
    python(OPEN, path, "kept")
