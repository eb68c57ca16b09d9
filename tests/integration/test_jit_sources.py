"""A program of `jit` is for the source of its build: jax compiles edited code, and names its module."""

import json
import sys

from tests.manifests import functions_manifest
from tests.processes import ran

FILES = {
    "app/__init__.py": "",
    "app/config.py": "SCALE = 2.0\n",
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
import json, sys, warnings
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
        text = Path(name).read_text()
        Path(name).write_text(text + "# a comment")
        print(json.dumps(called()))
        Path(name).write_text(text)
""",
}
PROGRAMS = {
    name: f'function = "{function}"; args = ["float32[3]"]'
    for name, function in {
        "step": "steps:step",
        "activated": "chosen:activated",
        "own": "serve:own",
    }.items()
}
ALL = {"step", "activated", "own"}
USED_BY = {
    "app/__init__.py": {"step", "activated", "own"},
    "app/config.py": ALL,
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
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True)
        tmp_path.joinpath(name).write_text(text)
    build = (
        "build",
        functions_manifest(tmp_path / "jitted.toml", PROGRAMS),
        "-o",
        tmp_path / "bundles",
    )
    run(*build, quick=True)

    def called(*edited):
        """Return what each program gives or says in a new process, then after an edit of each file."""
        lines = ran(sys.executable, "serve.py", *edited, cwd=tmp_path).stdout.splitlines()
        return [json.loads(line) for line in lines]

    first, *others = called(*USED_BY)
    assert first == {"step": 9.0, "activated": 1.0, "own": 0.0}
    for (name, users), found in zip(USED_BY.items(), others, strict=True):
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        words = f" module {module}: expected the source of the build, found another"
        assert {each for each, said in found.items() if words in str(said)} == users
    tmp_path.joinpath("app/lazy.py").write_text("def shift(x):\n    return x + 5\n")
    run(*build, quick=True)
    # Where only a comment changed, no program does.
    tmp_path.joinpath("activations.py").write_text(FILES["activations.py"] + "# a comment\n")
    assert "module activations" in called()[0]["activated"]
    run(*build, quick=True)
    assert called() == [{"step": 13.0, "activated": 1.0, "own": 0.0}]
