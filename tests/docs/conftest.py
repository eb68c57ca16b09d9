"""A directory as a reader of the documentation has it: a built bundle, models, fingerprints of machines."""

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from tests.encoders import write_encoder
from tests.processes import ran

from .snippets import ROOT

DEMO = """
[bundle]
name = "demo"
license = "demo-model/LICENSE"
[model]
source = "demo-model"
[generate]
batch = [1, 4]
prompt = [16]
context = [128]
[[target]]
name = "cpu-host"
"""
"""The demo's manifest with fewer buckets and targets: the pages show no figure of it."""


@pytest.fixture(scope="session")
def caches(build_cache, tmp_path_factory):
    """The build cache of the run and other caches of these tests' own, as environment variables."""
    root = tmp_path_factory.mktemp("docs-caches")
    return {
        "PREJIT_CACHE": str(build_cache),
        "PREJIT_ENVIRONMENTS": str(root / "environments"),
        "PREJIT_RUNTIME_CACHE": str(root / "runtime"),
        "XDG_STATE_HOME": str(root / "state"),
    }


@pytest.fixture(scope="session")
def shell(caches, warm):
    """Runs a command line in a directory; `prejit` and `python` are those of the tests.

    The process of a `prejit` that needs no shell is forked from a warm one, and builds compile quickly.
    If the output is `merged`, stdout has stderr as well.
    """

    def run(command, directory, *, merged=False):
        plain = re.fullmatch(r"prejit (?!record|run)([^;|&$<>]+?)( > [\w.-]+)?", command)
        if plain is not None:
            words = shlex.split(plain[1])
            with contextlib.chdir(directory):
                quick = words[0] in ("build", "plan", "check-model")
                done = warm.prejit(*words, env=caches, quick=quick)
            if plain[2]:
                (directory / plain[2].removeprefix(" > ")).write_text(done.stdout)
            if merged:
                done.stdout = done.stderr + done.stdout
            return done
        python = str(Path(sys.executable).parent)
        env = {**os.environ, **caches, "PATH": f"{python}:{os.environ['PATH']}"}
        line = f"({command}) 2>&1" if merged else command
        return ran("/bin/sh", "-c", line, status=None, cwd=directory, env=env)

    return run


@pytest.fixture(scope="session")
def readers_directory(shell, tmp_path_factory):
    directory = tmp_path_factory.mktemp("docs")
    manifests = directory / "manifests"
    for place in (directory, manifests):
        place.mkdir(exist_ok=True)
        shutil.copytree(ROOT / "manifests" / "demo-model", place / "demo-model")
    (manifests / "demo.toml").write_text(DEMO)
    write_encoder(directory / "encoder-model", pieces=True)
    (directory / "text.txt").write_text("import os\n" * 100)
    for command in ("prejit build manifests/demo.toml", "prejit fingerprint > web-3.json"):
        done = shell(command, directory)
        assert done.returncode == 0, done.stdout + done.stderr
    machine = json.loads((directory / "web-3.json").read_text())
    (directory / "saved").mkdir()
    (directory / "saved" / "web-3.json").write_text(json.dumps(machine))
    features = [name for name in machine["cpu_features"] if not name.startswith(("avx", "amx"))]
    (directory / "old.json").write_text(json.dumps(machine | {"cpu_features": features}))
    return directory


@pytest.fixture
def page_directory(readers_directory, caches, tmp_path, monkeypatch):
    """The directory for one page: what it writes is not there for the next."""
    directory = tmp_path / "page"
    (directory / "artifacts").mkdir(parents=True)
    for each in readers_directory.iterdir():
        if each.name != "artifacts":
            (directory / each.name).symlink_to(each)
    (directory / "artifacts" / "demo").symlink_to(readers_directory / "artifacts" / "demo")
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    for name, value in caches.items():
        monkeypatch.setenv(name, value)
    return directory
