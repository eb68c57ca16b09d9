"""Every example builds, runs without its model.py, and gives what jax.jit gives."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies import example_child
from prejit.runtime import load

from .conftest import Run

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(at.parent for at in (ROOT / "examples").glob("*/manifest.toml"))
TOLERANCE = {"bayes": 0.05}
"""Greatest differences to jax.jit. The draws of a sampler depend on each other: one bit grows."""


def names(example: Path) -> str:
    return example.name


@pytest.mark.parametrize("example", EXAMPLES, ids=names)
def test_an_example_gives_what_jit_gives(
    example: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("build", example / "manifest.toml", "-o", tmp_path)
    bundle = tmp_path / example.name
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, example / "use.py", bundle],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()

    monkeypatch.syspath_prepend(str(example))
    try:
        import use

        loaded = load(bundle, on_mismatch="error")
        if example_child.is_decoder(example):
            found = use.run(example_child.generating(loaded), 24)
            assert found == use.run(example_child.jitted_decoder(example), 24)
            assert len(set(found)) > 4, "a text that says something"
            return
        found = example_child.leaves(use.run(loaded.call))
        expected = example_child.leaves(use.run(example_child.jitted(example)))
    finally:  # each example has modules of these names
        for module in ("use", "model"):
            sys.modules.pop(module, None)
    tolerance = TOLERANCE.get(example.name, 1e-4)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


SCRIPT = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.modules["model"] = None  # a server does not have it
runpy.run_path(sys.argv[0], run_name="__main__")
assert not {"flax", "optax", "equinox", "blackjax"} & set(sys.modules)
"""


@pytest.mark.parametrize("example", EXAMPLES, ids=names)
def test_an_example_is_described_on_one_screen(example: Path) -> None:
    page = (example / "README.md").read_text()
    assert len(page.splitlines()) <= 60
    assert all(len(line) <= 130 for line in page.splitlines())
    for file in re.findall(r"`(\w+\.(?:py|toml))`", page):
        assert (example / file).is_file(), file
    assert "| **prejit** |" in page


def test_examples_are_listed(tmp_path: Path) -> None:
    listed = re.findall(r"\]\((\w+)/README\.md\)", (ROOT / "examples" / "README.md").read_text())
    assert sorted(listed) == [example.name for example in EXAMPLES]
