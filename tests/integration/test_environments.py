"""Environments made by the real venv and pip of small wheels; test_fleet.py has the real jaxlib."""

import os
import signal
import subprocess
import sys
import time
import zipfile

import pytest

from prejit.compiler.progress import Quiet
from prejit.compiler.targets import environments, installing
from prejit.compiler.targets.installing import find_uv, make_environment
from prejit.compiler.targets.target_classes import Target
from prejit.runtime.errors import BuildError, NetworkError

pytestmark = pytest.mark.thorough

JAX = "0.10.99"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
PINNED = tuple(f"{name}=={JAX}" for name in PACKAGES)


def write_wheel(directory, name, version, *requires):
    stem = f"{name.replace('-', '_')}-{version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    files = {
        f"{stem.replace('-', '_')}.py": "x = 1\n" * 50_000,
        f"{stem}.dist-info/METADATA": "\n".join([*lines, ""]),
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(directory / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


@pytest.fixture(scope="module")
def pip(tmp_path_factory):
    """Settings of pip: it finds these wheels and nothing else."""
    wheels = tmp_path_factory.mktemp("wheels")
    write_wheel(wheels, "jax", JAX, f"jaxlib=={JAX}", "numpy")
    for name in PACKAGES[1:]:
        write_wheel(wheels, name, JAX)
    write_wheel(wheels, "numpy", "8.0")
    for name in ("numpy", "zstandard", "blake3"):
        write_wheel(wheels, name, "9.0")
    return {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}


@pytest.fixture
def offline(pip, tmp_path, monkeypatch):
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    for name, value in pip.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PREJIT_ENVIRONMENTS", str(tmp_path / "environments"))
    return tmp_path / "environments" / "v1"


def wanted(jax=JAX, constraints=("numpy<9",)):
    target = Target("cuda-x", "cuda", jax=jax, constraints=constraints)
    return environments.spec_for(target, "0.10.2")


class Noting(Quiet):
    def __init__(self):
        super().__init__()
        self.notes = []

    def _tell(self, text):
        self.notes.append(text)


MAKE = """
import sys
from prejit.compiler.targets import environments
from prejit.compiler.targets.installing import make_environment
from prejit.compiler.progress import Plain
from prejit.compiler.targets.target_classes import Target
target = Target("cuda-x", "cuda", jax=sys.argv[1], constraints=("numpy<9",))
wanted = environments.spec_for(target, "0.10.2")
with Plain(sys.stderr) as progress:
    print(make_environment(wanted, progress).versions["jaxlib"])
"""


def start_maker():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", MAKE, JAX], **pipes)


def test_it_holds_what_was_asked_for_and_two_who_want_it_at_once_make_it_once(offline, monkeypatch):
    monkeypatch.setenv("PIP_TARGET", str(offline / "elsewhere"))  # would install nothing into it
    makers = [start_maker() for _ in range(2)]
    outputs = [maker.communicate(timeout=300) for maker in makers]
    assert [output for output, _ in outputs] == [f"{JAX}\n"] * 2, outputs
    notes = [line for _, errors in outputs for line in errors.splitlines() if "still" not in line]
    assert notes == [f"making an environment for cuda-x, once: {', '.join(PINNED)}"]
    found = environments.find(wanted())
    installed = {*PACKAGES, "blake3", "numpy", "zstandard"}
    assert set(found.versions) - {"pip", "setuptools"} == installed, "no NVIDIA libraries"
    assert found.versions["jax-cuda13-pjrt"] == JAX
    assert found.versions["numpy"] == "8.0", "constrained"
    left = {path.name for path in offline.iterdir()}
    assert left == {found.path.name, f"{found.path.name}.lock"}
    if find_uv() is None:
        return
    # uv installs what pip does, and two environments share their files.
    monkeypatch.delenv("PIP_TARGET")
    second = make_environment(wanted(constraints=("numpy<9", "zstandard<10")), progress := Noting())
    assert len(progress.notes) == 1, "no note that uv failed"
    files = [
        next(each.path.glob("lib/python*/site-packages/jaxlib_*.py")) for each in (found, second)
    ]
    assert files[0].samefile(files[1]), "hard links of one file in uv's cache"
    monkeypatch.setattr(installing, "find_uv", lambda: "/nonexistent/uv")  # no obstacle
    by_pip = make_environment(wanted(constraints=("numpy<9", "zstandard<11")))
    assert by_pip.versions == found.versions == second.versions


def test_a_maker_that_was_killed_is_waited_for_by_its_pip_and_made_again(offline):
    path = offline / wanted().key
    maker = start_maker()
    # ensurepip has begun, and takes a second: of venv, which comes before, a few milliseconds may be left.
    while not any(path.glob("lib/python*/site-packages/pip*")):
        assert maker.poll() is None
        time.sleep(0.01)
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    # What it started goes on writing: nobody may make the same environment meanwhile.
    with pytest.raises(BlockingIOError), environments.locked(path, wait=False):
        pass
    assert environments.find(wanted()) is None
    (path / "left by the dead").touch()
    made = make_environment(wanted())
    assert made.versions["jaxlib"] == JAX
    assert not (path / "left by the dead").exists()


NO_NETWORK = {"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "PIP_RETRIES": "1"}
MISTAKES = {
    "conflict": (
        *(JAX, ("jaxlib<0.10",), {}, BuildError),
        *("the target's constraints exclude each other", "constraints"),
    ),
    "no network": (
        *(JAX, (), NO_NETWORK, NetworkError),
        *(f"pip cannot fetch jax=={JAX}", "PIP_FIND_LINKS"),
    ),
    "no such version": (
        *("0.10.98", ("numpy<9",), {}, BuildError),
        *(r"pip finds no jax==0\.10\.98 for this machine", "pip index versions jax"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_installed_is_reported_and_leaves_nothing(offline, monkeypatch, mistake):
    jax, constraints, variables, kind, says, hints = MISTAKES[mistake]
    monkeypatch.setenv("PIP_PROXY", "127.0.0.1:9")  # nobody listens there
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    spec = wanted(jax, constraints)
    said = f"target cuda-x: cannot make its environment, .*{says}"
    with pytest.raises(kind, match=said) as caught:
        make_environment(spec, progress := Noting())
    assert type(caught.value) is kind
    if find_uv() is not None:
        assert progress.notes[-1] == "uv cannot make the environment for cuda-x: trying pip"
    assert "\n    | ERROR: " in str(caught.value), "pip's own words"
    assert hints in str(caught.value.hint)
    assert not (offline / spec.key).exists()
