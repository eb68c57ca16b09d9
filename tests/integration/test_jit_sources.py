"""A program of `jit` is for the source of its build: jax compiles edited code, and names its module."""

import json
import os
import sys

from tests.manifests import functions_manifest
from tests.processes import ran

FILES = {
    "app/__init__.py": "",
    "app/config.py": (
        "from importlib import import_module as load\n"
        "try:\n    from .local import SCALE\nexcept ImportError:\n"
        "    SCALE = load(name='..scale', package='app.inner').SCALE\n"
    ),
    "app/scale.py": "from app.values import *\nSCALE = factor.SCALE\n",
    "app/values/__init__.py": "__all__ = ['factor']\n",
    "app/values/factor.py": "SCALE = 2.0\n",
    "app/base.py": "def half(x):\n    return x / 2\n",
    "app/layers.py": "from .base import half\ndef dense(x):\n    return half(x) + 1\n",
    "app/lazy.py": "def shift(x):\n    return x + 3\n",
    "app/beside.py": "OTHER = 1\n",
    "activations.py": "def square(x):\n    return x * x\n",
    "steps.py": (
        "from app import layers\nfrom app.config import SCALE\n"
        "def step(x):\n    from app.lazy import shift\n    return shift(layers.dense(x)) * SCALE\n"
        "def with_activation(activation):\n    return lambda x: activation(x)\n"
    ),
    "chosen.py": (
        "from activations import square\n"
        "from steps import with_activation\n"
        "activated = with_activation(square)\n"
    ),
    "serve.py": """
import importlib, json, sys, warnings
from pathlib import Path
import jax.numpy as jnp
import chosen, steps
from prejit.runtime import jit
def own(x):
    return x - 1
def called():
    found = {}
    for name, function in {"step": steps.step, "activated": chosen.activated, "own": own}.items():
        jitted = jit(function, bundle="bundles/jitted", name=name)
        try:
            found[name] = float(jitted(jnp.ones(3))[0])
        except UserWarning as warning:
            found[name] = str(warning)
    return found
if __name__ == "__main__":
    warnings.simplefilter("error")
    print(json.dumps(called()))
    for name in sys.argv[1:]:
        file = Path(name)
        text = file.read_text() if file.exists() else None
        file.write_text(f"{text}# a comment")
        importlib.invalidate_caches()
        print(json.dumps(called()))
        file.write_text(text) if text is not None else file.unlink()
""",
}
FUNCTIONS = {"step": "steps:step", "activated": "chosen:activated", "own": "serve:own"}
PROGRAMS = {
    name: f'function = "{function}"; args = ["float32[3]"]' for name, function in FUNCTIONS.items()
}
ALL = {"step", "activated", "own"}
USED_BY = {
    "app/__init__.py": ALL,
    "app/config.py": ALL,
    "app/local.py": ALL,  # not there at the build
    "app/scale.py": ALL,
    "app/values/factor.py": ALL,
    "app/base.py": ALL,
    "app/layers.py": ALL,
    "app/lazy.py": ALL,
    "app/beside.py": set(),
    "activations.py": {"activated", "own"},
    "steps.py": ALL,
    "chosen.py": {"activated", "own"},
    "serve.py": {"own"},
}
"""The programs whose code comes from each file, directly or by an import."""


def test_an_edit_of_a_module_that_a_function_uses_is_a_miss_by_name(tmp_path, run):
    for name, text in FILES.items():
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True, parents=True)
        tmp_path.joinpath(name).write_text(text)
    manifest = functions_manifest(tmp_path / "jitted.toml", PROGRAMS)
    build = ("build", manifest, "-o", tmp_path / "bundles")
    run(*build, quick=True)

    def called(*edited):
        """Return what each program gives or says in a new process, then after an edit of each file."""
        lines = ran(sys.executable, "serve.py", *edited, cwd=tmp_path).stdout.splitlines()
        return [json.loads(line) for line in lines]

    first, *others = called(*USED_BY)
    assert first == {"step": 9.0, "activated": 1.0, "own": 0.0}
    for (name, users), found in zip(USED_BY.items(), others, strict=True):
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        sides = ("the source of the build", "another") if name in FILES else ("none", "one")
        words = f" module {module}: expected {sides[0]}, found {sides[1]}"
        assert {each for each, said in found.items() if words in str(said)} == users
    tmp_path.joinpath("app/lazy.py").write_text("def shift(x):\n    return x + 5\n")
    run(*build, quick=True)
    # Where only a comment changed, no program does.
    tmp_path.joinpath("activations.py").write_text(FILES["activations.py"] + "# a comment\n")
    assert "module activations" in called()[0]["activated"]
    run(*build, quick=True)
    assert called() == [{"step": 13.0, "activated": 1.0, "own": 0.0}]


BUILT_FROM_PYTHON = {
    "lib.py": (
        "def compose(outer, inner):\n    return lambda x: outer(inner(x))\n"
        "def apply(x, net):\n    return net(x)\n"
        "def scaled(held, rate_of):\n    return lambda x: x * rate_of(held)()\n"
        "def first(held):\n    return held[0]\n"
        "def named(held):\n    return held.rate\n"
        "RATES = {}\n"
        "def registered(x):\n    return x * RATES['rate']()\n"
        "def half(x):\n    return x / 2\n"
    ),
    "hidden.py": "def square(x):\n    return x * x\n",
    "computed.py": "def shift(x):\n    return x + 3\n",
    "rates.py": "import lib\ndef rate():\n    return 2.0\nlib.RATES['rate'] = rate\n",
    "named.py": "RATE = 2.0\n",
    "unlisted/site-packages/copied.py": "def twice(x):\n    return x * 2\n",
    "beside/hidden.py": "raise RuntimeError",  # another module of the same name
    "beside/train.v2": "",
    "train.v2": """
import importlib, json, sys, warnings
from dataclasses import dataclass
from pathlib import Path
sys.path.append("../unlisted/site-packages")
from collections import deque
from types import SimpleNamespace
import copied, hidden, jax.numpy as jnp, lib, rates
from prejit.runtime import jit
@dataclass(frozen=True)
class Net:
    def __call__(self, x):
        return x - 1
def computed(x):
    return importlib.import_module("comp" + "uted").shift(x) * importlib.import_module("named").RATE
functions = {
    "composed": lib.compose(lib.compose(hidden.square, lib.half), lib.half),
    "apply": lib.apply,
    "computed": computed,
    "twice": copied.twice,
    "queued": lib.scaled(deque([rates.rate]), lib.first),
    "named": lib.scaled(SimpleNamespace(rate=rates.rate), lib.named),
    "registered": lib.registered,
}
x, static = jnp.ones(3), {"apply": {"net": Net()}}
if sys.argv[1:] == ["build"]:
    from prejit.compiler import Program, build
    programs = [
        Program(name, fn=fn, args=[x], static={k: (v,) for k, v in static.get(name, {}).items()})
        for name, fn in functions.items()
    ]
    print(build(programs, "bundles", name="python", quiet=True).path)
else:
    warnings.simplefilter("error")
    for edited in ["", *sys.argv[2:]]:
        text = Path(edited).read_text() if edited else ""
        if edited:
            Path(edited).write_text(text + "# a comment")
        found = {}
        for name, function in {**functions, "other": lib.half}.items():
            options = {"name": name.replace("other", "twice"), "static_argnames": [*static.get(name, {})]}
            jitted = jit(function, bundle=sys.argv[1], **options)
            try:
                found[name] = float(jitted(x, **static.get(name, {}))[0])
            except UserWarning as warning:
                found[name] = str(warning).partition(": expected")[0].rpartition(": ")[2]
        print(json.dumps(found))
        if edited:
            Path(edited).write_text(text)
""",
}
OF_RATES = ("queued", "named", "registered")
"""Their code computes numbers alone, no operations of jax."""
SEEN_BY = {
    "lib.py": dict.fromkeys(("composed", "apply", "computed", *OF_RATES), "module lib"),
    "hidden.py": dict.fromkeys(("composed", "apply", "computed"), "module hidden"),
    "computed.py": {"computed": "module computed"},
    "rates.py": dict.fromkeys(("apply", "computed", *OF_RATES), "module rates"),
    "named.py": dict.fromkeys(("apply", "computed"), "module named"),
    "unlisted/site-packages/copied.py": dict.fromkeys(
        ("apply", "computed", "twice"), "module copied"
    ),
    "train.v2": {"apply": "module train.v2", "computed": "module train.v2"},
}


def test_what_a_function_holds_is_compared_wherever_it_comes_from(tmp_path, build_cache):
    for name, text in BUILT_FROM_PYTHON.items():
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True, parents=True)
        tmp_path.joinpath(name).write_text(text)

    def run(*arguments):
        environment = {**os.environ, "PREJIT_CACHE": str(build_cache)}
        script = tmp_path / "train.v2"
        command = (sys.executable, script, *arguments)
        return ran(*command, cwd=tmp_path / "beside", env=environment).stdout.splitlines()

    [path] = run("build")
    first, *others = map(json.loads, run(path, *(tmp_path / name for name in SEEN_BY)))
    built = {"composed": 0.0625, "apply": 0.0, "computed": 8.0, "twice": 2.0, "other": "function"}
    built |= dict.fromkeys(OF_RATES, 2.0)
    assert first == built
    for expected, found in zip(SEEN_BY.values(), others, strict=True):
        misses = {name: said for name, said in found.items() if said != built[name]}
        assert {**misses, "other": ""} == {**expected, "other": ""}
