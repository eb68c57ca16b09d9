"""Programs that start without tracing: recorded twice, then run as they were and with everything changed."""

import os
import re
import sys

import pytest
from tests.processes import ran

MODEL = """
import warnings, enum, functools, os, tempfile
from dataclasses import dataclass
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp
from jax import monitoring
jax.events_seen = []  # not in a module of the program, whose changes a trace must not make
monitoring.register_event_duration_secs_listener(lambda name, *_, **__: jax.events_seen.append(name))
SCALE = 2.0
OFFSET = float(open("offset.txt").read())
PARTS = len(os.listdir("parts"))
MODE = os.environ.get("MODE", "sum")
SHELL = [os.environ.get(name) for name in ("_", "OLDPWD", "SHLVL")]
import tqdm  # looks at all environment variables, and reads those that begin with TQDM_
with tempfile.TemporaryDirectory() as made:  # another name in each process
    os.close(os.open(made, os.O_RDONLY))
class Kind(enum.Enum):
    PLAIN = "plain"
@jax.tree_util.register_dataclass
@dataclass
class State:
    weights: jax.Array
    step: jax.Array
@functools.partial(jax.jit, static_argnames="kind", donate_argnames="state")
def train(state, x, *, kind=Kind.PLAIN):
    from late import NOTHING  # at a first import Python writes what it compiled
    loss = getattr(jnp, MODE)(x * SCALE + OFFSET + PARTS) * state.weights.sum() + NOTHING
    return State(state.weights * 2, state.step + 1), {"loss": loss, "nothing": None}
@jax.jit
def pair(x, *more, key):
    warnings.warn("old", DeprecationWarning)  # not shown
    return [x + 1, *more], jax.random.uniform(key, (2,))
"""
PROGRAM = """
import subprocess, sys
import jax, jax.numpy as jnp
import model
if __name__ == "__main__":
    x = jnp.full(int(sys.argv[1]), 3.0)
    state = model.State(jnp.ones(2), jnp.int32(0))
    for _ in range(3):
        state, results = model.train(state, x, kind=model.Kind.PLAIN)
    subprocess.run(["true"])
    (y, z), numbers = model.pair(x, 5, key=jax.random.key(1))
    twice = [jax.jit(lambda x, by=by: x * by)(x)[0].item() for by in (2.0, 3.0)]
    with jax.default_prng_impl("rbg"):
        print(jax.jit(lambda x: x + jax.random.key_data(jax.random.key(1))[2])(1).item())
    pulled = jax.vmap(jax.grad(lambda x: (jax.nn.relu(model.pair(x, key=jax.random.key(2))[0][0]) * x)))(x)
    for kind in jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit:
        halves = jax.NamedSharding(jax.make_mesh((2,), ("x",), (kind,)), jax.P("x"))
        split = jax.jit(lambda x: x * 5, in_shardings=halves)(jnp.ones(6) * 7)  # split by other programs
        print(split, jax.typeof(split), jax.jit(lambda x: x + 1)(split).sharding)
    print(pulled, float(results["loss"]), state, results["nothing"], y[0].item(), z.weak_type, numbers, twice)
    print(len(jax.events_seen), file=sys.stderr)
"""
COMMAND = (sys.executable, "serve.py", "4")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    directory = tmp_path_factory.mktemp("untraced")
    (directory / "parts").mkdir()
    (directory / "offset.txt").write_text("1")
    (directory / "model.py").write_text(MODEL)
    (directory / "late.py").write_text("NOTHING = 0")
    (directory / "serve.py").write_text(PROGRAM)
    return directory


def recorded(prejit_at, bundle, command):
    """Records a command twice; returns what each said."""
    words = ("record", "-o", bundle, "--untraced", "--", *command)
    return [prejit_at(*words).stderr for _ in range(2)]


def plain(here, command=COMMAND, **env):
    return ran(*command, cwd=here, env={**os.environ, **env})


@pytest.fixture(scope="module")
def bundle(here, prejit_at):
    first, second = recorded(prejit_at, here / "serve", COMMAND)
    assert ": 0 calls without a trace, " in first
    assert "record once more" in first
    assert ", 0 with one" in second
    return here / "serve"


def test_two_recordings_let_a_program_start_without_a_trace(here, bundle, reported):
    """jax reports no trace, no lowering and no compile; the results are those of jax."""
    other = {"SHLVL": "9", "OLDPWD": "/", "_": "/bin/other", "HOSTNAME": "b-1"}
    done, report = reported(bundle, *COMMAND, **other)
    expected = plain(here)
    assert done.stdout == expected.stdout
    assert (int(done.stderr), report["hits"], report["missed"], report["traced"]) == (0, 0, 0, {})
    assert report["untraced"] >= 4
    start = report["start"]
    total = start.pop("total_seconds")
    assert sum(start.values()) == pytest.approx(total)
    assert (start["tracing_seconds"], start["compiling_seconds"]) == (0, 0)
    assert min(start["imports_seconds"], start["comparing_seconds"], start["rest_seconds"]) > 0
    assert int(expected.stderr) > 10


@pytest.mark.thorough
def test_an_input_that_has_changed_traces_and_one_that_is_back_does_not(here, bundle, reported):
    def changed(reason, command=COMMAND, **env):
        done, report = reported(bundle, *command, **env)
        assert done.stdout == plain(here, command, **env).stdout
        assert report["untraced"] == 0
        assert any(reason in each for each in report["traced"]), report["traced"]

    for file, text in (("model.py", MODEL.replace("= 2.0", "= 4.0")), ("offset.txt", "7")):
        before = (here / file).read_text()
        (here / file).write_text(text)
        changed(str(here / file))
        (here / file).write_text(before)
    (here / "parts" / "one").touch()
    changed(str(here / "parts"))
    (here / "parts" / "one").unlink()
    changed("the environment variable MODE", MODE="max")
    changed("the environment variable TQDM_A", TQDM_A="1")
    changed("no recording of this command", (sys.executable, "serve.py", "5"))
    # Its bytes are as recorded, its times are not.
    done, report = reported(bundle, *COMMAND)
    assert (int(done.stderr), report["traced"]) == (0, {})


IMPURE = """
import argparse, io, itertools, os, random, sys, traceback
import jax, jax.numpy as jnp, numpy as np
LOG, COUNTS, NUMBER = [], {"traces": 0}, itertools.count()
RANDOM = np.random.default_rng(0)
random.seed(0), np.random.seed(0)
def log(x): LOG.append(1); return x + 1
def count(x): COUNTS["traces"] += 1; return x + 2
def iterate(x): return x + next(NUMBER)
def generator(x): return x + RANDOM.random()
def numbers(x): return x + np.random.rand()
def texts(x): return x + random.random()
def tells(x): print("traced"); return x
def setting(x): jax.config.update("jax_default_matmul_precision", "float32"); return x @ x
def environment(x): os.environ["SEEN"] = "1"; return x - 1
def writes(x): open("written.txt", "w").close(); return x - 2
def counts(x): return x * (os.cpu_count() > 0)
class Model:
    calls = 0
    def method(self, x): self.calls += 1; return x * self.calls
MODEL = Model()
class Keys:
    made = 0
    def __call__(self): self.made += 1; return self.made
KEYS, NESTED, ARRAY, TEXT = Keys(), {"a": {"n": 0}}, np.zeros(2), io.StringIO()
def keyed(x): return x * KEYS()
def nested(x): NESTED["a"]["n"] += 1; return x * 3
def classed(x): Keys.made += 1; return x * 4
def defaulted(x, seen=[]): seen.append(1); return x * len(seen)
def in_place(x): ARRAY[0] += 1; return x * 5
def buffered(x): TEXT.write("a"); return x * 6
SPACE = argparse.Namespace(n=0)
def spaced(x, space=SPACE): space.n += 1; return x * 7
def attributed(x): attributed.n += 1; return x * 8
attributed.n = 0
def nest():
    first = None
    def memo(x): nonlocal first; first = first or x.shape; return x * 9
    return memo
FAR = [nest()]
far = FAR[0]
for _ in range(6): far = (lambda inner: lambda x: inner(x))(far)
far.__name__ = "far"
PAIRS = zip([1, 2], iter([3, 4]))
def paired(x): return x * next(PAIRS)[1]
def formats(x): np.set_printoptions(precision=3); return x * 10
STATES = [np.random.default_rng(0), random.Random(0)]
def drawn(x): return x * STATES[0].random() * STATES[1].random()
HELD = [keyed, nested, classed, defaulted, in_place, buffered, spaced, attributed, far]
HELD += [paired, formats, drawn]
NAMES = [log, count, iterate, generator, numbers, texts, tells, setting, environment, writes, counts]
NAMES += [MODEL.method, *HELD]
x = jnp.eye(2)
for function in NAMES:
    print(function.__name__, np.asarray(jax.jit(function)(x)).tolist())
from jax.experimental import pallas as pl
def kernel(x, y): y[...] = x[...] * 2
@jax.jit
def lowers(x): return pl.pallas_call(kernel, jax.ShapeDtypeStruct((2, 2), x.dtype), interpret=True)(x)
print(lowers(x))  # lowering imports a module of jax that has settings
print(jax.grad(jax.jit(jnp.sin))(0.0))
print(LOG, COUNTS, next(NUMBER), RANDOM.random(), np.random.rand(), random.random(), MODEL.calls)
print(KEYS.made, NESTED, Keys.made, defaulted(1), ARRAY, TEXT.getvalue(), SPACE, attributed.n)
print([each.random() for each in STATES], np.get_printoptions()["precision"])
print(FAR[0].__closure__[0].cell_contents, os.environ.get("SEEN"), jax.config.jax_default_matmul_precision)
try: jax.jit(lambda x: x)("text")
except TypeError as error: print("prejit" in "".join(traceback.format_exception(error)))
try: jax.jit(lambda x: x / 0)(1.0)
except ZeroDivisionError as error: print("prejit" in "".join(traceback.format_exception(error)))
LEAKED = []
jax.jit(lambda x: LEAKED.append(jnp.arange(3.0) * x) or x)(1.0)
try: LEAKED[0] + 1
except jax.errors.UnexpectedTracerError as error: print("prejit" in str(error))
print(float(jax.jit(lambda x: x * (2 + os.stat("hidden").st_size))(1.0)))
"""


@pytest.fixture(scope="module")
def impure(here, prejit_at):
    """The command, the bundle, and what its second recording said."""
    (here / "impure.py").write_text(IMPURE)
    (here / "hidden").touch()
    command, bundle = (sys.executable, "impure.py"), here / "impure"
    return command, bundle, recorded(prejit_at, bundle, command)[1]


@pytest.mark.thorough
def test_traces_with_effects_are_never_left_out(here, impure, reported):
    command, bundle, said = impure
    for name in ("log", "count", "iterate", "generator", "numbers", "texts", "tells", "setting"):
        assert f"({name})" in said, name
    held = "keyed nested classed defaulted in_place buffered spaced attributed far paired formats"
    for name in f"{held} drawn".split():
        assert re.search(rf"\b{name}\b.*: its trace changes ", said), (name, said)
    assert "(counts): its trace does os.cpu_count" in said
    assert "(lowers): its lowering changes the settings of jax" in said
    done, report = reported(bundle, *command)
    assert done.stdout == plain(here, command).stdout
    assert report["untraced"] > 3
    assert not any("jit_sin" in names for names in report["traced"].values())
    assert report["start"]["tracing_seconds"] > 0
    traced = {name for names in report["traced"].values() for name in names}
    assert traced >= {"jit_log", "jit_writes", "jit_method"}


@pytest.mark.thorough
def test_traces_that_are_checked_find_what_no_input_tells(here, impure, reported):
    """Nothing tells prejit how large a file is that was not opened."""
    command, bundle, _ = impure
    options = ("--check-traces", "100")
    done, report = reported(bundle, *command, options=options)
    assert report["untraced"] == 0
    assert "another program" not in done.stderr
    (here / "hidden").write_text("1")
    done, _ = reported(bundle, *command, options=options)
    (here / "hidden").write_text("")
    assert "the trace of jit__lambda gives another program than the recorded one" in done.stderr
    assert done.stdout.splitlines()[-1] == "3.0"
