"""Executables on a device: the one module on private parts of jax and jaxlib, on every version of them."""

import gc
import os
import subprocess
import sys

import jax
import jax.export
import numpy as np
import pytest
import zstandard
from jax import lax
from jax.scipy.linalg import expm
from tests.extent import one_in

from prejit.compiler.compile.worker.disassembly import NEVER_CHOSEN, declared_features
from prejit.compiler.compile.worker.xla import CompileFor, compile_portable
from prejit.compiler.targets.build_host import cross_compiles, jaxlib_version
from prejit.runtime import load
from prejit.runtime.device import _jax_parts
from prejit.runtime.device.device import Device
from prejit.runtime.device.jax_arrays import to_jax
from prejit.runtime.device.portable import stablehlo_module
from prejit.runtime.device.transfer import aligned_zeros, dtype_of, to_numpy
from prejit.runtime.errors import BuildError, ExecutableError, MismatchError
from prejit.runtime.format.arrays import DTYPES as TABLE_DTYPES
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.checks.layers import SAFETENSORS_DTYPES
from prejit.runtime.format.names import EXECUTABLES_MEDIA_TYPE
from prejit.runtime.machine.fingerprint import PLATFORMS, Fingerprint

DTYPES = sorted({numpy for numpy, _ in SAFETENSORS_DTYPES.values()})
MANIFEST_DTYPES = sorted(set(DTYPES) | set(TABLE_DTYPES))


@pytest.fixture(scope="module")
def device():
    return Device()


def export(function, *arguments, **options):
    shapes = [jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype) for a in arguments]
    jitted = jax.jit(function, keep_unused=True, **options)
    return bytes(jax.export.export(jitted, platforms=("cpu",))(*shapes).mlir_module_serialized)


def aligned(values):
    copy = aligned_zeros(values.shape, values.dtype)
    copy[...] = values
    return copy


def address(array):
    return int(array.ctypes.data)


def same_bytes(one, other):
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def test_mapped_weights_are_taken_without_a_copy(settled_dir, device):
    """As they come from a bundle: a private map of the file."""
    bundle = load(settled_dir)
    for name, values in bundle._programs._weights.values.items():
        if name.startswith("score:"):
            assert address(to_numpy(device.put(values))) == address(values)


def test_memory_that_is_not_shared_is_copied(device):
    x = aligned(np.arange(70, dtype=np.float32).reshape(7, 10))
    unaligned = np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape)
    for values in (x[::2], x[::-1], x.T, np.broadcast_to(x[0], x.shape), unaligned):
        assert same_bytes(to_numpy(device.put(values)), np.ascontiguousarray(values))


def test_memory_outlives_the_array_it_came_from(device):
    count, noise = 1 << 18, []

    def overwrite():
        gc.collect()
        noise.extend(np.full(count, 7, np.float32) for _ in range(8))

    held = device.put(aligned(np.arange(count, dtype=np.float32)))
    overwrite()
    np.testing.assert_array_equal(to_numpy(held), np.arange(count))
    with pytest.raises(ValueError, match="read-only"):  # it is the device's own memory
        to_numpy(held)[0] = 1
    program = device.compile(export(lambda x: x + 1, np.zeros(count, np.float32)))
    read = to_numpy(program.run([device.put(aligned_zeros((count,), np.dtype(np.float32)))])[0])
    overwrite()
    assert read.min() == read.max() == 1


def test_donated_memory_is_reused_and_the_argument_is_gone(device):
    """Neither a caller's memory nor what was read changes."""
    cache, one = aligned_zeros((1 << 16,), np.dtype(np.float32)), np.float32(1)
    function = export(lambda cache, x: (cache.at[0].add(x), x), cache, one, donate_argnums=0)
    step, one = device.compile(function), device.put(one.reshape(()))
    [first, _] = step.run([device.put(cache), one])
    read = to_numpy(first)
    [second, _] = step.run([first, one])
    assert (read[0], read.sum(), to_numpy(second)[0], cache.any()) == (1, 1, 2, False)
    where = address(to_numpy(second))
    gc.collect()  # what was read of it holds on to it
    [third, _] = step.run([second, one])
    assert (address(to_numpy(third)), to_numpy(third)[0]) == (where, 3)
    for use in (lambda: to_numpy(second), lambda: step.run([second, one])):
        with pytest.raises(Exception, match=r"deleted|[Ii]nvalid buffer"):
            use()


def test_zeros_are_the_devices_own(device):
    """They are written where they lie, and the next ones are zeros again."""
    for dtype in ("float32", "bfloat16", "bool"):
        for shape in ((3, 0), (300, 70)):
            assert not to_numpy(device.zeros(shape, dtype_of(dtype))).any()
    size, float32 = 1 << 16, np.dtype(np.float32)
    step = device.compile(
        export(lambda cache: cache.at[1].set(7), np.zeros(size, float32), donate_argnums=0)
    )
    for _ in range(3):
        cache = device.zeros((size,), float32)
        where = address(to_numpy(cache))
        gc.collect()
        [result] = step.run([cache])
        found = to_numpy(result)
        assert address(found) == where
        assert (found[1], found.sum()) == (7, 7)


def test_wrong_arguments_and_bytes_are_refused_and_never_read_outside(device):
    """The program table may lie about shapes; the compiled program does not believe it."""
    x, y = (np.ones(shape, np.float32) for shape in ((4, 16), (16, 8)))
    program = device.compile(export(lambda x, y: x @ y, x, y))
    good = [device.put(x), device.put(y)]
    small = device.put(np.ones((4, 8), np.float32))
    for arguments in ([], good[:1], [*good, good[0]], [good[1], good[0]], [good[0], small]):
        with pytest.raises(Exception, match="expected"):
            program.run(arguments)
    assert to_numpy(program.run(good)[0]).max() == 16
    with pytest.raises(ExecutableError, match="somewhere: XLA cannot load this executable"):
        device.load(b"no executable", "somewhere")
    with pytest.raises(BuildError, match="XLA cannot compile"):
        device.compile(b"no StableHLO")
    with pytest.raises(BuildError, match="XLA cannot compile"):
        compile_portable(b"")


def for_all_platforms(function, *shapes, platforms=PLATFORMS):
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("nobody_has_this")]
    return jax.export.export(function, platforms=platforms, disabled_checks=unchecked)(*shapes)


def check_on_cpu(function, *arguments, device):
    """Compiles a program for all platforms here, and compares it with jax."""
    jitted = jax.jit(function, keep_unused=True)
    exported = for_all_platforms(jitted, *map(jax.typeof, map(jax.numpy.asarray, arguments)))
    expected = jax.tree.leaves(jitted(*arguments))
    portable = exported.mlir_module_serialized
    left = str(stablehlo_module(portable, exported.platforms, "cpu"))
    assert "stablehlo.composite" not in left, (
        "GPUs have a form of jnp.cumsum that XLA cannot split for CPUs"
    )
    machine = CompileFor(platforms=exported.platforms)
    for program in (
        device.compile(portable, exported.platforms),
        device.load(compile_portable(portable, machine).serialized, "somewhere"),
    ):
        results = program.run([device.put(np.asarray(each)) for each in arguments])
        for ours, theirs in zip(results, expected, strict=True):
            np.testing.assert_allclose(to_numpy(ours), theirs, rtol=1e-5, atol=1e-5)


def test_a_platform_is_chosen_and_no_branch_for_another_is_left(device):
    """There XLA looks for the custom calls of every platform, unless their branches are dropped."""

    @jax.jit
    def elsewhere(x):
        return jax.ffi.ffi_call("nobody_has_this", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def choose(x):
        """The second branch is on CPUs; a default of other places alone is never reached."""
        return lax.platform_dependent(x, cuda=elsewhere, cpu=lambda x: x + 2, default=elsewhere)

    def thrice(x):
        return lax.fori_loop(0, 3, lambda _, y: choose(y), x)

    def often(x):
        return lax.fori_loop(0, 2, lambda _, y: expm(y) / 10, x)

    x = np.arange(4, dtype=np.float32)
    # A program inside of another numbers platforms in its own order.
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    inner = for_all_platforms(jax.jit(thrice), shape, platforms=PLATFORMS[::-1])
    for function in (
        thrice,
        lambda x: (choose(x), jax.jit(choose)(x) * 2, lax.map(choose, x)),
        lambda x: inner.call(x) + choose(x),
        lambda x: lax.fori_loop(0, 3, lambda _, y: jax.numpy.cumsum(y) + choose(y), x),
    ):
        check_on_cpu(function, x, device=device)
    square = np.random.default_rng(0).random((3, 3), np.float32)
    check_on_cpu(
        lambda x, n: lax.cond(n > 1, often, lax.sin, x), square, np.int32(3), device=device
    )


def test_what_does_not_load_here_is_not_called_damaged(kernel_recipe, device):
    """The bytes are right, and a library that they call is not here: no fault of the bundle."""
    config = kernel_recipe.targets[0].config
    segment = config.programs[0].executable
    packed = kernel_recipe.content(EXECUTABLES_MEDIA_TYPE)
    raw = zstandard.ZstdDecompressor().decompress(packed[segment.offset :][: segment.size])
    name = config.kernels.digest.removeprefix("sha256:")[:16].encode()
    assert name in raw
    with pytest.raises(MismatchError) as caught:
        device.load(raw.replace(name, b"f" * 16), "somewhere")
    told = caught.value.describe()
    assert "somewhere: XLA cannot load this executable on this machine: " in told
    assert "f" * 16 in told, "XLA's own words"
    assert not {"damaged", "altered"} & {*told.split()}


def test_a_program_tells_what_it_takes_and_gives(device):
    for function, arguments, donated in (
        (lambda x: (x, x.sum()), (np.zeros(5, "bool"),), ()),
        (lambda x, y: (y * 2, x + 1), (np.zeros((2, 0), "int8"), np.zeros((), "uint16")), (0,)),
        (lambda *x: x, [np.zeros((n, 2), "float16") for n in range(60)], (3, 58)),
    ):
        program = device.compile(export(function, *arguments, donate_argnums=donated))
        gives = jax.tree.leaves(jax.eval_shape(function, *arguments))
        for one in (program, device.load(program.serialize(), "somewhere")):
            found = one.signature()
            assert found.arguments == tuple((str(x.dtype), x.shape) for x in arguments)
            assert found.results == tuple((str(x.dtype), x.shape) for x in gives)
            assert found.donated <= set(donated)


@pytest.mark.parametrize("dtype", one_in(2, MANIFEST_DTYPES))
def test_every_dtype_of_a_manifest_goes_in_and_comes_out(dtype, device):
    """Also those of less than a byte, which devices pack and DLPack does not know."""
    first = 1 if dtype == "float8_e8m0fnu" else 0  # which has no zero
    for shape in ((), (5, 7), (0, 3)):
        values = (np.arange(int(np.prod(shape))) % 2 + first).reshape(shape).astype(dtype_of(dtype))
        with jax.enable_x64(True):
            jitted = jax.jit(lambda x: (x, x.reshape(-1)), keep_unused=True)
            exported = for_all_platforms(jitted, jax.ShapeDtypeStruct(shape, values.dtype))
            assert str(exported.out_avals[0].dtype) == dtype
        machine = CompileFor(platforms=exported.platforms)
        serialized = compile_portable(exported.mlir_module_serialized, machine).serialized
        table = [Array((0,), dtype, shape), Array((1,), dtype, (values.size,))]
        for results in (table, []):
            program = device.load(serialized, "somewhere", results)
            signature = program.signature()
            assert signature.arguments == ((dtype, shape),)
            assert signature.results == ((dtype, shape), (dtype, (values.size,)))
            same, flat = program.run([device.put(values)])
            assert same_bytes(to_numpy(same), values)
            assert same_bytes(to_numpy(flat), values.reshape(-1))
            with jax.enable_x64(True):
                assert same_bytes(np.asarray(to_jax(same)), values)


def test_a_host_executable_asks_for_what_this_machine_has():
    compiled = compile_portable(export(lambda x: x + 1, np.float32(1)))
    declared = declared_features(compiled.serialized)
    assert set(declared) - set(NEVER_CHOSEN) <= set(Fingerprint.current().cpu_features)
    assert len(declared) > 5
    assert compiled.memory.argument_bytes == compiled.memory.output_bytes == 4
    assert _jax_parts.compiles_for_topology() == cross_compiles(jaxlib_version())


START = """
import sys
import numpy as np
import ml_dtypes
from prejit.runtime.device import _jaxlib
from prejit.runtime.device import _jax_parts
from prejit.runtime.device.device import Device
from prejit.runtime.device.transfer import to_numpy
device = Device()
array = device.put(np.arange(6, dtype=np.float32))
assert to_numpy(array).sum() == 15
array_bf16 = device.put(np.ones(6, ml_dtypes.bfloat16))
assert (to_numpy(array_bf16) == 1).all()  # no dtype of Python's own
"""
USE = """
import jax
import jax.numpy as jnp
assert float(jax.jit(lambda x: x * 2)(jnp.float32(3))) == 6
assert isinstance(array, jax.Array) and array.shape == (6,)
assert to_numpy(device.put(np.ones(3, np.float32))).sum() == 3
"""
ALONE = """
found = [m for m in sys.modules if m.partition(".")[0] == "jax" or m.startswith("jaxlib.mlir")]
assert not found, found
"""
AFTER = """
import importlib, pkgutil, jax
assert jax.__version__ == __import__('jaxlib.version').version.__version__
assert hasattr(jax, 'jit') and not hasattr(jax, 'no_such_thing')
assert 'numpy' in {m.name for m in pkgutil.iter_modules(jax.__path__)}
jax.config.update('jax_enable_x64', False)
importlib.reload(jax)
# The device is a client of its own: the host's platform stays as the host sets it.
jax.config.update('jax_num_cpu_devices', 3)
assert len(jax.devices()) == 3
assert jax.devices()[0].client is not array.device.client
"""
HOSTS = [
    ("", ALONE + AFTER),
    ("", ALONE + "from jax._src.interpreters import pxla"),
    ("import jax; jax.config.update('jax_platforms', 'cpu')", ""),
    ("import os; os.environ['PREJIT_PLAIN_START'] = '1'\nimport jax.numpy", ""),
]


@pytest.mark.parametrize(("before", "after"), one_in(2, HOSTS))
def test_a_host_that_uses_jax_gets_all_of_it(before, after, run_python):
    run_python(f"{before}{START}{after}{USE}")


GPU_JAX = """
import os, types
def devices(platform):
    return [types.SimpleNamespace(client=os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"))]
"""
ASK = """
import os
from prejit.runtime.device._jax_parts import client_of_jax
print(client_of_jax("cuda"), client_of_jax("cuda"), os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"))
"""


def test_memory_of_a_gpu_grows_unless_the_process_has_jax_or_says_otherwise(tmp_path):
    (tmp_path / "jax.py").write_text(GPU_JAX)
    unset = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}

    def asked(code, **variables):
        env = unset | {"PYTHONPATH": str(tmp_path)} | variables
        return subprocess.check_output((sys.executable, "-c", code), env=env, text=True).split()

    assert asked(ASK) == ["false", "None", "None"]
    assert asked("import jax\n" + ASK) == ["None"] * 3
    assert asked(ASK, XLA_PYTHON_CLIENT_PREALLOCATE="true") == ["true"] * 3


def test_a_process_may_end_in_the_middle(settled_dir, run_python):
    """XLA's threads and ours must not abort it: the exit status is what a supervisor looks at."""
    for then in ("", 'bundle.call("score", x=np.ones((8, 16), np.float32))'):
        run_python(f"""
import numpy as np
from prejit.runtime import load
bundle = load({str(settled_dir)!r})
bundle._programs.prepare("score/b2", "score/b8", "nest", "tick")
{then}
""")


def test_one_thread_at_a_time_imports_jaxlibs_mlir(run_python, tmp_path):
    """A first array and a first compile import it from two ends: Python may end that as a deadlock."""
    (tmp_path / "program").write_bytes(export(lambda x: x + 1, np.float32(1)))
    run_python(
        """
import importlib.abc, itertools, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import ml_dtypes
import numpy as np
from pathlib import Path
from prejit.runtime.device import _jaxlib
from prejit.runtime.device import _jax_parts
from prejit.runtime.device.device import Device
from prejit.runtime.device.transfer import to_numpy
class Watch(importlib.abc.MetaPathFinder):
    importing, threads = threading.Event(), []
    def find_spec(self, name, path, target=None):
        if name.startswith("jaxlib.mlir"):
            self.threads.append(threading.current_thread().name)
            if not self.importing.is_set():
                self.importing.set()  # the other thread begins while this one is in the middle
                time.sleep(0.5)
device = Device()
def compile():
    Watch.importing.wait(20)
    device.compile(Path("program").read_bytes())
sys.meta_path.insert(0, Watch())
with ThreadPoolExecutor(1, "other") as pool:
    compiled = pool.submit(compile)
    to_numpy(device.put(np.zeros(4, ml_dtypes.bfloat16)))
compiled.result()
turns = [name for name, _ in itertools.groupby(Watch.threads)]
assert turns in (["prejit-first-array"], ["prejit-first-array", "other_0"]), turns
""",
        env={"PREJIT_PLAIN_START": "1"},
    )
