"""Programs of a user run under the settings of jax that their traces depended on, and under no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prejit.compiler import Program
from prejit.runtime import UsageError, jit, load
from prejit.runtime.device import _jax_parts, jax_settings

HOST, ON_DEVICE = np.arange(4, dtype=np.float32), jnp.arange(4.0)


def noisy(x):
    return {"x": x * jnp.arange(4), "noise": jax.random.normal(jax.random.key(0), x.shape)}


@pytest.fixture(scope="module")
def path(build_programs):
    # C++ dispatches no call of a program that donates.
    placed = Program("placed", fn=noisy, args=["float32[4]"], donate=[0])
    return build_programs([Program("noisy", fn=noisy, args={"x": "float32[4]"}), placed])


SETTINGS = {
    "jax_enable_x64": lambda: jax.enable_x64(True),
    "jax_default_matmul_precision": lambda: jax.default_matmul_precision("highest"),
    "jax_default_prng_impl": lambda: jax.default_prng_impl("rbg"),
}
WAYS = {
    "call": lambda bundle: bundle.call("noisy", x=HOST),
    "call on jax's arrays": lambda bundle: bundle.call("noisy", x=ON_DEVICE),
    "call in Python": lambda bundle: bundle.call("placed", HOST),
    "call_async": lambda bundle: bundle.call_async("noisy", x=HOST).result(),
    "call_on_device": lambda bundle: bundle.call_on_device("noisy", x=HOST),
    "call_by_path": lambda bundle: bundle.call_by_path("noisy", {("x",): HOST}),
    "bind": lambda bundle: bundle.bind("noisy", x=HOST)(),
    "jit": lambda bundle: jit(noisy, bundle=bundle, on_miss="error")(HOST),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_than_those_of_the_trace_are_refused(path, name):
    """At the first call, after calls that fit, and again and again; not when they are as before."""
    bundle = load(path, on_mismatch="error")
    for call in WAYS.values():
        for _ in range(2):
            with SETTINGS[name](), pytest.raises(UsageError, match=f"{name}: expected .*, found "):
                call(bundle)
            call(bundle)
            call(bundle)


def test_the_build_decides_which_settings_a_call_needs(build_programs):
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        bundle = load(build_programs(Program("noisy", fn=noisy, args={"x": "float32[4]"})))
    assert bundle.config.programs[0].settings == {
        "jax_default_matmul_precision": "highest",
        "jax_enable_x64": "True",
    }
    with pytest.raises(UsageError, match="jax_enable_x64: expected True, found False"):
        bundle.call("noisy", x=HOST)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        expected = jax.jit(noisy)(HOST)
        for x in (HOST, ON_DEVICE, HOST, ON_DEVICE):
            found = bundle.call("noisy", x=x)
            for key, value in expected.items():
                np.testing.assert_allclose(found[key], value, rtol=1e-6, strict=True)


def step(key, x):
    return {"key": jax.random.split(key)[0], "x": x.astype("bfloat16") * 2}


def test_guards_refuse_the_transfers_that_jax_refuses_and_no_others(path, build_programs):
    """Also at the first call. Arrays on the device pass, wherever the bundle puts them: also donated ones."""
    bundle = load(path)
    jitted = jit(noisy, bundle=bundle, on_miss="error")
    key, x = jax.random.key(0), jnp.ones(4)
    program = Program("step", fn=step, args=lambda: {"key": key, "x": x}, donate=["x"])
    steps = load(build_programs(program))
    for _ in range(2):
        with jax.transfer_guard("disallow"):
            for call in (
                *(jax.jit(noisy), jitted, lambda x: bundle.call("noisy", x=x)),
                lambda x: steps.call("step", key=key, x=x),
                lambda x: steps.call_async("step", key=key, x=x),
                lambda x: steps.call_on_device("step", key=key, x=x),
                lambda x: steps.bind("step", key=key)(x=x),
            ):
                with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
                    call(HOST)
        with jax.transfer_guard_host_to_device("disallow_explicit"):
            jitted(ON_DEVICE)
            bundle.call("noisy", x=ON_DEVICE)
            found = steps.call("step", key=key, x=x)["x"]
            steps.call_async("step", key=key, x=x).result()
            steps.call_on_device("step", key=key, x=x)
            steps.bind("step", key=key)(x=x)
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.full(4, 2, np.float32))
        jitted(HOST)
        bundle.call("noisy", x=HOST)


def test_the_defaults_are_those_of_this_jax(run_python):
    """A setting that a new jax adds, or whose default it changes, must be listed."""
    run_python(
        "import jax; from prejit.runtime.device import jax_settings\n"
        "assert jax_settings.to_record() == {}, jax_settings.to_record()\n"
        "assert jax_settings.differing({}) == jax_settings.differing(None) == ''\n"
    )


def test_each_context_of_the_user_has_a_name(monkeypatch):
    from jax._src import config

    names, values = ("user_context", "jax_enable_x64", "user_context"), (None, False, 7)
    monkeypatch.setattr(config, "trace_context_names", lambda: names)
    monkeypatch.setattr(config, "trace_context", lambda: values)
    found = _jax_parts.trace_settings()
    assert (found["user_context"], found["user_context 2"]) == (None, 7)
    assert jax_settings.to_record() == {"user_context 2": "7"}
    assert jax_settings.differing({"user_context 2": "5"}) == "user_context 2: expected 5, found 7"
    assert jax_settings.differing({"jax_of_tomorrow": "True"}) == ""  # of another version of jax
