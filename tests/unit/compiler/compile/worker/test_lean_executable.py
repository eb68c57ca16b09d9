"""A lean executable gives the same bits, and a load of it reads next to no HLO."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from prejit.compiler.compile.worker.lean_executable import lean, with_kept_hlo
from prejit.compiler.compile.worker.xla import CompileFor, compile_portable
from prejit.runtime.device._jax_parts import hlo_module_cost, kept_hlo
from prejit.runtime.device.device import Device

X = np.linspace(-2, 2, 48, dtype=np.float32).reshape(6, 8)
KEYS = np.array([1, 2], np.uint32)


def loop(x):
    return lax.while_loop(lambda s: s[1] < 5, lambda s: (jnp.sin(s[0]) + 1, s[1] + 1), (x, 0))


def branches(x):
    return lax.cond(x[0, 0] < 0, lambda x: (x + 1, x), lambda x: (x, x * 2), x)


def forwards(x):
    return lax.cond(x[0, 0] < 0, lambda x, y: (y, x), lambda x, y: (x, y), x, x + 1)


def rows(x):
    return lax.scan(lambda carry, row: (carry + row, jnp.outer(carry, row)), x[0], x)


def network(x):
    hidden = jax.nn.gelu(x @ jnp.asarray(X.T @ X)) @ jnp.ones((8, 3))
    return jax.nn.softmax(hidden), hidden.max(axis=0), jnp.argmax(hidden, axis=1)


def images(x):
    image = x.reshape(1, 1, 6, 8)
    return lax.conv_general_dilated(image, jnp.ones((2, 1, 3, 3)), (1, 1), "SAME")


FUNCTIONS = {
    "one result": lambda x: jnp.tanh(x),
    "an argument, a constant, nothing": lambda x: (x, jnp.arange(3), jnp.zeros((0, 2)), 1.5, x.T),
    "the argument alone": lambda x: x,
    "a constant alone": lambda x: jnp.arange(12.0),
    "one value twice": lambda x: (y := x * 2, y, y[0]),
    "a loop": loop,
    "branches": branches,
    "branches that give an argument": forwards,
    "a scan": rows,
    "products": network,
    "a convolution": images,
    "sorts": lambda x: (jnp.sort(x, axis=1), jnp.argsort(x, axis=0), lax.top_k(x, 3)),
    "random numbers": lambda x: x + jax.random.normal(jax.random.wrap_key_data(KEYS), x.shape),
    "a Fourier transform": lambda x: jnp.abs(jnp.fft.fft(x)),
    "gathers and scatters": lambda x: (x[jnp.array([3, 0])], x.at[1].set(0).at[2, 3].add(x[0, 0])),
    "sums": lambda x: (x.sum(), x.cumsum(axis=0), (x > 0).all(axis=1), x.astype(jnp.bfloat16).sum()),
    "a gradient": jax.grad(lambda x: jnp.sum(network(x)[0] ** 2)),
    "loops in branches in a loop": lambda x: lax.fori_loop(0, 3, lambda n, x: branches(loop(x)[0])[0], x),
}  # fmt: skip


def compiled(function, *arguments, **options):
    exported = jax.export.export(jax.jit(function, keep_unused=True, **options), platforms=["cpu"])
    portable = exported(*arguments).mlir_module_serialized
    return compile_portable(portable, CompileFor(device_count=1)).serialized


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_lean_executable_gives_the_same_bits(name):
    serialized = compiled(FUNCTIONS[name], X)
    device = Device()
    loaded = [device.load(each, "file", ()).loaded for each in (serialized, lean(serialized))]
    expected, found = ([np.asarray(x) for x in each.execute([device.put(X)])] for each in loaded)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in expected]
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    # By this XLA decides whether the caller's thread runs the program.
    costs = [hlo_module_cost(each.hlo_modules()[0]).get("flops", 0) for each in loaded]
    assert len({cost < 1000 for cost in costs}) == 1


def test_donated_arguments_and_the_signature_stay():
    serialized = compiled(lambda x, y: (x + y, y * 2), X, X, donate_argnums=0)
    both = (serialized, lean(serialized))
    [signature] = {Device().load(each, "file").signature() for each in both}
    assert signature.donated


SPLIT = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from prejit.compiler.compile.worker.lean_executable import lean
from prejit.runtime.device._jaxlib import device_list

x = np.linspace(-2, 2, 48, dtype=np.float32).reshape(6, 8)
mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,))
halves, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
function = jax.jit(
    lambda x: (x * 2, (x @ x.T).sum()), in_shardings=halves, out_shardings=(halves, whole)
)
executable = function.lower(x).compile().runtime_executable()
loaded = jax.devices()[0].client.deserialize_executable(
    lean(bytes(executable.serialize())), device_list(jax.devices()), None
)
for of in ("get_output_shardings", "get_parameter_shardings"):
    assert str(getattr(loaded, of)()) == str(getattr(executable, of)())
expected, found = (
    [np.asarray(part).tobytes() for parts in results for part in parts]
    for results in (
        each.execute_sharded([jax.device_put(x, halves)]).disassemble_into_single_device_arrays()
        for each in (executable, loaded)
    )
)
assert found == expected and len(found) == 4
"""


def test_a_program_on_two_devices_stays_split(run_python):
    run_python(SPLIT)


def test_a_build_keeps_the_hlo_behind_the_executable():
    serialized = compiled(network, X)
    kept = with_kept_hlo(serialized)
    device = Device()
    [module] = device.load(serialized, "file").loaded.hlo_modules()
    assert kept_hlo(kept).to_string() == module.to_string()
    assert kept_hlo(serialized) is None
    [short] = device.load(kept, "file").loaded.hlo_modules()
    assert len(short.to_string()) < len(module.to_string()) / 2
    for other in (serialized[:40], b"\0" + serialized, b""):  # of another form
        assert lean(other) is None
