"""Programs that call Python start from a recording without a compile, and call functions of this start."""

import sys

import pytest
from tests.extent import one_in

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import io_callback
tag, seen = sys.argv[1], []
scalar = jax.ShapeDtypeStruct((), jnp.float32)
@jax.jit
def printing(x):
    jax.debug.print(tag + " mean {}", x.mean(), ordered=True)
    jax.debug.print("{name} of {x}", x=x, name=tag, ordered=True)
    return x + 1
@jax.jit
def unordered(x):
    jax.debug.callback(lambda v: seen.append(("unordered", tag, float(v))), x.sum())
    return x - 1
@jax.jit
def pure(x):
    return jax.pure_callback(lambda v: np.sort(v)[::-1] + ord(tag), x, x) * 2
@jax.jit
def ordered(x):
    def count(v):
        seen.append(("first", tag, float(v)))
        return np.float32(len(seen))
    counted = io_callback(count, scalar, x.sum(), ordered=True)
    io_callback(lambda v: seen.append(("second", tag, float(v))), None, x.max(), ordered=True)
    return x * counted
@jax.jit
def loop(x):
    def body(i, carry):
        jax.debug.callback(lambda i: seen.append((tag, int(i))), i, ordered=True)
        return carry + io_callback(lambda v: np.float32(v * 2), scalar, carry)
    return jax.lax.fori_loop(0, 3, body, x)
@jax.jit
def raising(x):
    def check(v):
        raise ValueError("never " + tag)
    return jax.lax.cond(x > 1, lambda: jax.pure_callback(check, scalar, x), lambda: x)
@jax.jit
def part(x):
    jax.debug.callback(lambda v: seen.append(("part", tag, float(v))), x)
    return x * x
def adding(number):
    def same_text(x):
        return jax.pure_callback(lambda v: np.float32(v + number), scalar, x)
    return jax.jit(same_text)
x = jnp.array([3.0, 1.0, 2.0])
for _ in range(2):
    print(printing(x), unordered(x), pure(x), ordered(x), loop(x[1]), flush=True)
    print(raising(x[1]), [float(adding(number)(x[0])) for number in (1, 10)])
    try:
        print(raising(x[0]))
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[-1])
    jax.effects_barrier()
print(jax.grad(part)(2.0))
jax.effects_barrier()
print(seen)
"""


@pytest.fixture(scope="module")
def bundle(here, prejit_at):
    done = prejit_at("record", "-o", "serve", "--json", "--", sys.executable, "serve.py", "A")
    assert '"left_out": []' in done.stdout
    return here / "serve"


@pytest.mark.thorough
@pytest.mark.parametrize("tag", one_in(2, ["B", "A"]))
def test_recorded_programs_call_the_functions_of_this_start(bundle, python_at, prejit_at, tag):
    """As often, in the same order, with the same errors. With B these are other functions."""
    plain = python_at("serve.py", tag)
    found = prejit_at("run", bundle, "--require-aot", "--", sys.executable, "serve.py", tag)
    assert found.stdout == plain.stdout
    for text in (
        f"{tag} mean 2.0",
        f"ValueError: never {tag}",
        "[4.0, 13.0]",
        f"('first', '{tag}'",
    ):
        assert text in found.stdout


@pytest.mark.thorough
def test_a_process_without_the_hook_finds_none_that_it_cannot_run(bundle, python_at, prejit_at):
    """jax before 0.11 hands no functions to an executable of its cache. Later ones do it by themselves."""
    plain = python_at("-I", "serve.py", "A")
    found = prejit_at("run", bundle, "--", sys.executable, "-I", "serve.py", "A")
    assert found.stdout == plain.stdout


@pytest.mark.thorough
def test_without_a_trace_a_recording_names_their_lines_and_what_to_do(here, prejit_at):
    command = ("--", sys.executable, "serve.py", "A")
    for _ in range(2):
        recorded = prejit_at("record", "--untraced", "-o", "untraced", *command).stderr
    lines = PROGRAM.splitlines()
    [first, second] = [n for n, line in enumerate(lines, 1) if "jax.debug.print" in line]
    line = f"(printing): it calls Python at serve.py:{first}, serve.py:{second}, so it is traced"
    assert line in recorded
    assert "return the value instead" in recorded
    assert f"(part): it calls Python at serve.py:{lines.index('def part(x):') + 2}, so" in recorded
    found = prejit_at("run", "untraced", "--require-aot", "--report", *command)
    assert f"it calls Python at serve.py:{first}, serve.py:{second}" in found.stderr
    assert ", 0 misses" in found.stderr


@pytest.mark.thorough
def test_the_check_of_a_library_is_named_with_the_call_that_led_to_it(here, prejit_at):
    """The checks of equinox are callbacks. diffrax, lineax and optimistix use them."""
    (here / "fit.py").write_text(
        "import equinox as eqx, jax, jax.numpy as jnp\n"
        "def checked(x):\n"
        "    return eqx.error_if(x, x > 1, 'too large')\n"
        "print(jax.jit(checked)(jnp.ones(())))\n"
    )
    command = ("record", "--untraced", "-o", "fit", "--", sys.executable, "fit.py")
    recorded = [prejit_at(*command).stderr for _ in range(2)][1]
    assert "it calls Python at fit.py:4 (in equinox/_errors.py)" in recorded
    assert "EQX_ON_ERROR=nan" in recorded
    recorded = [prejit_at(*command, EQX_ON_ERROR="nan").stderr for _ in range(2)][1]
    assert "calls Python" not in recorded
    assert ", 0 with one" in recorded
