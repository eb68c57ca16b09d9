"""Every example builds, runs without its model.py, and gives what jax.jit gives."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.processes import ran

from benchmarks.studies import example_child

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(at.parent for at in (ROOT / "examples").glob("*/manifest.toml"))
TOLERANCE = {"bayes": 0.05}
"""Greatest differences to jax.jit. The draws of a sampler depend on each other: one bit grows."""

SAMPLE = ("physics",)
"""Examples that `make test` builds."""
TRAINER = ROOT / "examples" / "transcriber"
STEPS = 150
"""Of the transcriber's 700: enough to hear most keys. 35 seconds of CPU time."""


@pytest.fixture(scope="module")
def transcriber(tmp_path_factory):
    """A copy of the transcriber, trained in less time, and the share of keys that it hears right."""
    copy = tmp_path_factory.mktemp("examples") / TRAINER.name
    shutil.copytree(TRAINER, copy, ignore=shutil.ignore_patterns("checkpoint", "__pycache__"))
    done = ran(sys.executable, copy / "train.py", "--steps", STEPS)
    return copy, float(done.stdout.splitlines()[-1].partition("%")[0]) / 100


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(each, marks=() if each.name in SAMPLE else pytest.mark.thorough)
        for each in EXAMPLES
    ],
    ids=lambda example: example.name,
)
def test_an_example_gives_what_jit_gives(example, run, tmp_path, monkeypatch, request):
    if example == TRAINER:
        example, _ = request.getfixturevalue("transcriber")
    run("build", example / "manifest.toml", "-o", tmp_path, quick=True)
    bundle = tmp_path / example.name
    done = ran(sys.executable, "-c", SCRIPT, example / "use.py", bundle)
    assert done.stdout.strip()

    monkeypatch.syspath_prepend(str(example))
    try:
        import use

        count = (24,) * example_child.is_decoder(example)
        found = example_child.leaves(use.run(*example_child.bundled(bundle, example), *count))
        expected = example_child.leaves(use.run(*example_child.jitted(example), *count))
        if count:
            assert len(set(map(int, found))) > 4, "a text that says something"
    finally:  # each example has modules of these names
        for module in ("use", "model", "mel", "tones"):
            sys.modules.pop(module, None)
    tolerance = TOLERANCE.get(example.name, 1e-4)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


SCRIPT = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
sys.modules["model"] = None  # a server does not have it
runpy.run_path(sys.argv[0], run_name="__main__")
assert not {"flax", "optax", "equinox", "blackjax", "transformers"} & set(sys.modules)
"""


@pytest.mark.thorough
def test_the_transcriber_hears_keys(transcriber):
    _, right = transcriber
    assert right > 0.4, "63 % when this was written, one of 12 by chance"


def test_examples_are_listed_and_each_is_described_on_one_screen():
    listed = re.findall(r"\]\((\w+)/README\.md\)", (ROOT / "examples" / "README.md").read_text())
    assert sorted(listed) == [example.name for example in EXAMPLES]
    for example in EXAMPLES:
        page = (example / "README.md").read_text()
        assert len(page.splitlines()) <= 60, example.name
        for file in re.findall(r"`(\w+\.(?:py|toml))`", page):
            assert (example / file).is_file(), f"{example.name}: {file}"
