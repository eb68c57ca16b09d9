"""Calls of a jitted function, dispatched by jaxlib's C++, on every version of jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prejit.runtime.device import _jax_parts, _jit_dispatch
from prejit.runtime.device.device import Device


@pytest.fixture(scope="module")
def device():
    return Device(of_jax=True)


class Doubling:
    """A function `x * 2` whose executable is our own, and the number of its misses."""

    def __init__(self, device, *, donate=False):
        options = {"donate_argnums": 0} if donate else {}
        jitted = jax.jit(lambda x, n=0: x * 2, static_argnames="n", **options)
        plain = jax.jit(lambda x: x * 2, keep_unused=True, **options)
        exported = jax.export.export(plain, platforms=("cpu",))(jnp.ones(4))
        self.device = device.first
        self.loaded = device.compile(exported.mlir_module_serialized).loaded
        self.dispatch = _jit_dispatch.Dispatch.of(jitted)
        self.function = self.dispatch.function(jitted, self.miss)
        self.misses = 0

    def miss(self, x, n=0):
        self.misses += 1
        x = jnp.asarray(x)
        avals = [((4,), np.dtype("float32"), n == 1)]
        run = _jax_parts.runner_for_jax(self.loaded, avals, self.device, bool(x.committed))
        (result,) = run([x])
        whole = [_jax_parts.single_sharding(self.device)]
        return result, self.dispatch.path(self.loaded, whole, result, whole), False


def test_a_signature_misses_once_and_donated_arguments_are_deleted(device):
    doubling, x = Doubling(device), jnp.arange(4.0)
    for _ in range(5):
        result = doubling.function(x)
        np.testing.assert_array_equal(result, [0, 2, 4, 6])
        assert (doubling.misses, result.committed) == (1, False)
    assert doubling.function(jax.device_put(x, device.first)).committed
    for _ in range(2):
        assert doubling.function(x, n=1).weak_type
        assert doubling.misses == 3
    doubling, x = Doubling(device, donate=True), jnp.ones(4)
    for _ in range(3):
        before, x = x, doubling.function(x)
        assert before.is_deleted()
    assert doubling.misses == 1
    np.testing.assert_array_equal(x, np.full(4, 8))


def test_only_a_jitted_function_of_this_jax_has_a_dispatch(monkeypatch):
    dispatch = _jit_dispatch.Dispatch.of(
        jax.jit(lambda x, mode, y: x, static_argnames="mode", donate_argnums=(0, 2))
    )
    assert dispatch.static == ((1,), ("mode",))
    assert dispatch.donated == ((0, 2), ("x", "y"))
    for other in (lambda x: x, object()):
        assert _jit_dispatch.Dispatch.of(other) is None
    jitted = jax.jit(lambda x: x)
    for name in ("_PATH_FIELDS", "_STATE_KEYS"):
        known = getattr(_jit_dispatch, name)
        with monkeypatch.context() as patch:
            patch.setattr(_jit_dispatch, name, type(known)([*known, "new"]))
            assert _jit_dispatch.Dispatch.of(jitted) is None
    assert _jit_dispatch.Dispatch.of(jitted) is not None
