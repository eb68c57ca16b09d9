"""Change at random what a recorded program reads: its calls must be traced, or give jax's answers."""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

from prejit.compiler.recording.jax_cache_packing import read_targets
from prejit.runtime.recorded.hook import input_facts, process_inputs

from .campaign import write_figures

SOURCES = {
    "main.py": """
import jax, jax.numpy as jnp
import first
print([float(each) for each in first.step(jnp.arange(4.0), first.CONFIG)])
""",
    "first.py": """
import json, os
import jax
import second
CONFIG = json.load(open("config.json"))["scale"]
def step(x, scale):
    return jax.jit(lambda x: second.apply(x) * scale)(x)
""",
    "second.py": """
import os
import third
class Layer:
    offset = 3.0
    def __call__(self, x, by=2.0):
        return third.deep(x) * by + self.offset
LAYER = Layer()
def apply(x):
    return LAYER(x) + len(os.listdir("parts")) + float(os.environ.get("EXTRA", "0"))
""",
    "third.py": """
import library
LIMITS = {"low": 1.0, "high": 9.0}
def deep(x):
    return library.clip(x, LIMITS["low"], LIMITS["high"]) + 5.0
""",
    "site-packages/library.py": """
import jax.numpy as jnp
def clip(x, low, high):
    return jnp.clip(x * 7.0, low, high)
""",
    "config.json": '{"scale": 4.0}',
    "parts/one": "",
}
NUMBER = re.compile(r"\d(?=\.0)")

HIDDEN = """
import dataclasses, enum, functools, os, types
import jax, jax.numpy as jnp, numpy as np
H = os.stat("hidden").st_size  # what prejit does not see
class Mode(enum.Enum):
    A = 1
    B = 2
class Holder: pass
@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, x, beside): self.x, self.beside = x, beside
    def tree_flatten(self): return (self.x,), self.beside
    @classmethod
    def tree_unflatten(cls, beside, xs): return cls(*xs, beside)
@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["by"])
@dataclasses.dataclass
class Data:
    x: jax.Array
    by: float
@dataclasses.dataclass(frozen=True)
class Static:
    by: float
class Model:
    def __init__(self): self.params = [1.0 + H, np.ones(2) * H]
    def apply(self, x): return x * self.params[0] + self.params[1].sum()
    def __call__(self, x): return x * self.params[0]
class Class: by = 1.0 + H
MODE = [Mode.A, Mode.B][H]
HOLDER = Holder()
HOLDER.by, HOLDER.inner = 2.0 + H, Holder()
HOLDER.inner.by = 3.0 + H
NUMBER, ARRAY, TABLE = 1.0 + H, np.full(3, 1.0 + H), {"a": {"b": 1.0 + H}}
ORDERED = dict([("a", 2.0), ("b", 3.0)][:: [1, -1][H]])
TREE = [lambda x: {"a": x, "b": x + 1}, lambda x: [x + 1, x]][H]
CODE = ["def f(x): return x + 1", "def f(x): return x + 2"][H]
x = jnp.arange(3.0)
def closing(value): return lambda x: x + value
def callee(x): return x * NUMBER
def middle(x): return callee(x) + 1
def setting():
    with jax.default_matmul_precision(["default", "highest"][H]): return jax.jit(lambda x: x @ x)(x)
def x64():
    jax.config.update("jax_enable_x64", bool(H))
    try: return jax.jit(lambda x: x.astype(float))(x)
    finally: jax.config.update("jax_enable_x64", False)
def monkeypatch():
    old = jnp.sin
    jnp.sin = [jnp.sin, jnp.cos][H]
    try: return jax.jit(lambda x: jnp.sin(x))(x)
    finally: jnp.sin = old
def code():
    scope = {"jnp": jnp}
    exec(CODE, scope)
    return jax.jit(scope["f"])(x)
def environment_in_trace():
    os.environ["SEEN"] = str(H)
    return jax.jit(lambda x: x + float(os.environ["SEEN"]))(x)
KINDS = {
    "closure": lambda: jax.jit(closing(1.0 + H))(x),
    "closed_array": lambda: jax.jit(closing(ARRAY * 2))(x),
    "closed_large_array": lambda: jax.jit(lambda x, a=jnp.full(10**5, 1.0 + H): x + a[0])(x),
    "default": lambda: jax.jit(lambda x, by=1.0 + H: x * by)(x),
    "partial": lambda: jax.jit(functools.partial(jnp.add, 1.0 + H))(x),
    "global_number": lambda: jax.jit(lambda x: x + NUMBER)(x),
    "global_array": lambda: jax.jit(lambda x: x + ARRAY)(x),
    "global_table": lambda: jax.jit(lambda x: x + TABLE["a"]["b"])(x),
    "global_of_a_callee": lambda: jax.jit(lambda x: middle(x))(x),
    "attribute": lambda: jax.jit(lambda x: x * HOLDER.by)(x),
    "deep_attribute": lambda: jax.jit(lambda x: x * HOLDER.inner.by)(x),
    "bound_method": lambda: jax.jit(Model().apply)(x),
    "callable_object": lambda: jax.jit(Model())(x),
    "class_attribute": lambda: jax.jit(lambda x: x * Class.by)(x),
    "enumeration": lambda: jax.jit(lambda x: x * MODE.value)(x),
    "static_argument": lambda: jax.jit(lambda x, m: x * m.by, static_argnums=1)(x, Static(1.0 + H)),
    "pytree_beside": lambda: jax.jit(lambda n: n.x * n.beside)(Node(x, 1.0 + H)),
    "dataclass_meta": lambda: jax.jit(lambda d: d.x * d.by)(Data(x, 1.0 + H)),
    "weak_type": lambda: jax.jit(lambda s: x * s)([jnp.float32(2), 2.0][H]),
    "structure": lambda: jax.jit(lambda t: jax.tree.leaves(t)[0])(TREE(x)),
    "order_of_a_dict": lambda: jax.jit(lambda x: x * list(ORDERED.values())[0])(x),
    "dtype": lambda: jax.jit(lambda v: v * 2)(np.arange(3, dtype=["float32", "int32"][H])),
    "branch": lambda: jax.jit(lambda x: x + 1 if H else x - 1)(x),
    "vmapped": lambda: jax.jit(jax.vmap(closing(1.0 + H)))(x),
    "grad": lambda: jax.jit(jax.grad(lambda x: (x * (1.0 + H)).sum()))(x),
    "loop": lambda: jax.jit(lambda x: jax.lax.fori_loop(0, 2 + H, lambda i, y: y + 1, x))(x),
    "getter": lambda: jax.jit(lambda x: x + getattr(types.SimpleNamespace(a=1.0 + H), "a"))(x),
    **{each.__name__: each for each in (setting, x64, monkeypatch, code, environment_in_trace)},
}
for name, function in KINDS.items():
    result = function()
    print(name, result.dtype, np.asarray(result).tolist())
"""


def started(directory, *command):
    done = subprocess.run(command, cwd=directory, check=True, text=True, stdout=subprocess.PIPE)
    return done.stdout


def prejit(directory, *words):
    return started(directory, sys.executable, "-m", "prejit.runtime", *words)


def recorded(directory, *command):
    for _ in range(2):
        prejit(directory, "record", "--untraced", "-o", "bundle", "--", *command)


def mutated(rng, directory):
    """Change something that the program reads. Returns what, and a function that undoes it."""
    path = directory / rng.choice([*SOURCES])
    before, times = path.read_bytes(), path.stat()

    def undo():
        for extra in directory.glob("parts/new*"):
            extra.unlink()
        if not path.exists() or path.read_bytes() != before:
            path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    if path.name == "one":
        (directory / "parts" / f"new{rng.random()}").touch()
        return "a new name in a directory", undo
    way = rng.choice(["byte", "append", "truncate", "replace", "remove"])
    place = rng.randrange(len(before))
    other = bytes([(before[place] + rng.randrange(1, 255)) % 256])
    content = {"append": before + b" ", "truncate": before[:place]}.get(
        way, before[:place] + other + before[place + 1 :]
    )
    if way == "remove":
        path.unlink()
    elif way == "replace":
        part = path.with_name("part")
        part.write_bytes(content)
        os.utime(part, ns=(times.st_atime_ns, times.st_mtime_ns))
        part.replace(path)
    else:
        path.write_bytes(content)
        if rng.random() < 0.5:  # as `cp -p` and `rsync -a` leave it
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return way, undo


def compared(rng, directory, count):
    """Return how many mutations were found, by kind; "missed" ones must not be there."""
    (target,) = read_targets(directory / "bundle")
    (file,) = (each for name, each in target.programs.items() if name.startswith("prejit_calls"))
    inputs = json.loads(file.content())["inputs"]
    own = {name: input_facts.file_of(module) for name, module in sys.modules.items()}
    inputs["modules"] |= own
    inputs["prefix"] = sys.prefix
    last = max(each[1] for each in inputs["files"])
    variables = {name: value for name, value in inputs["environment"].items() if value is not None}
    found = Counter()
    for number in range(count):
        environment, undo, way = dict(variables), None, "an environment variable"
        if number % 10 == 0:
            name = rng.choice([*inputs["environment"], "XLA_FLAGS", "JAX_NEW", "PYTHONHASHSEED"])
            environment[name] = f"{environment.get(name)}!"
        else:
            way, undo = mutated(rng, directory)
        with mock.patch.object(process_inputs, "initial_environment", lambda env=environment: env):
            comparison = process_inputs.InputComparison(inputs, directory / "receipts" / "none")
            difference = comparison.difference(last)
        found[way if difference is not None else f"missed: {way}"] += 1
        if undo is not None:
            undo()
    return found


def run_beside(rng, directory, count):
    """Return what became of changed programs that `prejit run` and Python started."""
    found = Counter()
    command = (sys.executable, "main.py")
    for _ in range(count):
        numbered = [name for name, text in SOURCES.items() if NUMBER.search(text)]
        path = directory / rng.choice(numbered)
        before = path.read_text()
        place = rng.choice([*NUMBER.finditer(before)])
        path.write_text(f"{before[: place.start()]}{rng.randrange(10)}{before[place.end() :]}")
        same = prejit(directory, "run", "bundle", "--", *command) == started(directory, *command)
        found["equal" if same else f"wrong: {path.name}"] += 1
        path.write_text(before)
    return found


def hidden(directory):
    """Return the ways of deciding by what prejit cannot see that a call's signature finds, and the others."""
    (directory / "hidden.py").write_text(HIDDEN)
    (directory / "hidden").write_text("")
    command = (sys.executable, "hidden.py")
    recorded(directory, *command)
    assert prejit(directory, "run", "bundle", "--", *command) == started(directory, *command)
    (directory / "hidden").write_text("1")
    lines = prejit(directory, "run", "bundle", "--", *command).splitlines()
    expected = started(directory, *command).splitlines()
    outcomes = {"found": [], "promised": []}
    for line, other in zip(lines, expected, strict=True):
        outcomes["found" if line == other else "promised"].append(line.partition(" ")[0])
    return outcomes


def main(seed, mutations, starts):
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        for name, text in SOURCES.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        os.environ["PYTHONPATH"] = str(directory / "site-packages")
        os.environ["PREJIT_RUNTIME_CACHE"] = str(directory / "cache")
        recorded(directory, sys.executable, "main.py")
        found = {
            "seed": seed,
            "compared": dict(sorted(compared(rng, directory, mutations).items())),
            "started": dict(run_beside(rng, directory, starts)),
            "hidden": hidden(directory),
        }
    print(json.dumps(found, indent=1))
    write_figures("untraced_mutations", found)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
