"""A build whose programs other processes lower writes the same bundle, and imports no jax for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.quick_compiling import XLA_FLAGS

from .conftest import Run

MANIFEST = """
[bundle]
name = "three"
[[program]]
name = "score"
function = "code:score"
args = ["float32[{n}]"]
buckets = { n = [1, 2, 3, 4, 5] }
[[program]]
name = "mean"
function = "code:mean"
args = ["float32[3, 4]"]
[[program]]
name = "scale"
function = "code:scale"
args = ["float32[3]"]
[[target]]
name = "cpu-host"
"""
CODE = """
import jax.numpy as jnp

def score(x):
    return jnp.tanh(x) * 3

def mean(x):
    return x.mean(-1)

def scale(x):
    return x * 5
"""
BUILD = """
import json, sys
from prejit.compiler.api import build
from prejit.compiler.pipeline.lower import crew

manifest, output, cache, seconds = sys.argv[1:]
crew._PROCESS_SECONDS = float(seconds)  # less work is worth a process, or no work is
built = build(manifest, output, cache=cache, workers=8)
heavy = {"jax", "flax", "code"} & sys.modules.keys()
print(json.dumps({"digest": built.digest, "compiled": built.compiled, "heavy": sorted(heavy)}))
"""
"""A build with room for two processes that lower."""


def built(python: Run, directory: Path, name: str, seconds: float) -> dict[str, Any]:
    """Build with an empty cache in a new process."""
    places = (directory / name / "out", directory / name / "cache")
    done = python(BUILD, directory / "three.toml", *places, str(seconds), XLA_FLAGS=XLA_FLAGS)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.thorough  # test_crew.py has the processes, test_traces.py what a build imports
def test_a_build_whose_programs_others_lower_imports_no_jax_and_writes_the_same_bundle(
    python: Run, tmp_path: Path
) -> None:
    (tmp_path / "three.toml").write_text(MANIFEST)
    (tmp_path / "code.py").write_text(CODE)
    alone = built(python, tmp_path, "alone", 1000.0)
    assert (alone["compiled"], "jax" in alone["heavy"]) == (7, True)
    apart = built(python, tmp_path, "apart", 0.05)
    assert apart == {**alone, "heavy": []}
