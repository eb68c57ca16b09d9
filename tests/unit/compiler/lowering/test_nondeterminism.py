"""Clocks and random numbers in a traced function are refused by name: those of the user's own code alone."""

from __future__ import annotations

import datetime
import functools
import logging
import random
import secrets
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from random import random as drawn
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prejit.compiler import Manifest, Program, build
from prejit.compiler.lowering.user.modules import UserModules
from prejit.compiler.lowering.user.nondeterminism import refusing_nondeterminism
from prejit.compiler.manifest.reading import read_manifest
from prejit.runtime import load
from prejit.runtime.errors import BuildError

SEEDED, ARRAYS = random.Random(0), np.random.default_rng(0)
NOW = datetime.datetime.now


class Later(datetime.datetime):
    pass


def seeded_here() -> Any:
    random.seed(3)
    return random.random(), random.Random(4).gauss(0, 1), np.random.default_rng(5).normal()


def logged() -> Any:
    logging.getLogger("prejit.test").warning("its record has a time")
    with tempfile.TemporaryDirectory() as directory:
        return directory


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: time.time(), "time.time"),
        (lambda: NOW(), "datetime.now"),
        (lambda: datetime.date.today(), "date.today"),
        (lambda: random.random(), "random.random"),
        (lambda: drawn(), "random.random"),
        (lambda: random.Random(), "random.Random"),
        (lambda: time.localtime(None), "time.localtime"),
        (lambda: random.SystemRandom().random(), "random.SystemRandom.random"),
        (lambda: secrets.token_hex(), "secrets.token_hex"),
        (lambda: uuid.uuid4(), "uuid.uuid4"),
        (lambda: np.random.default_rng().normal(), "random.SystemRandom.getrandbits"),
        (lambda: time.strftime("%s"), "time.strftime"),
        (lambda: Later.now(), "datetime.now"),
        (lambda: functools.partial(time.time)(), "time.time"),
        (lambda: np.datetime64("now"), "np.datetime64[now]"),
    ],
)
def test_each_is_refused_by_name_and_line(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(BuildError) as caught, refusing_nondeterminism("here"):
        call()
    line = call.__code__.co_firstlineno
    assert str(caught.value).startswith("here: expected a function that gives the same program")
    assert f"found {name}() at {__file__}:{line}" in str(caught.value)
    assert "impure = true" in str(caught.value.hint)
    assert sys.getprofile() is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: np.random.rand(),
        lambda: (np.random.rand(), np.random.seed(0)),
    ],
)
def test_numpys_global_generator_is_refused(call: Callable[[], Any]) -> None:
    with (
        pytest.raises(BuildError, match=r"global generator of np\.random"),
        refusing_nondeterminism("here"),
    ):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: SEEDED.random() + SEEDED.randint(0, 3),
        lambda: ARRAYS.normal(size=3),
        lambda: time.strftime("%Y", time.gmtime(0)),
        lambda: (np.random.seed(0), np.random.rand()),
        lambda: np.datetime64("2026-01-01"),
        seeded_here,
        logged,
        lambda: jax.jit(lambda x: jax.random.normal(jax.random.key(0), x.shape))(jnp.ones(3)),
    ],
)
def test_what_is_the_same_each_time_is_allowed(call: Callable[[], Any]) -> None:
    with refusing_nondeterminism("here"):
        call()


def test_an_error_of_the_code_itself_comes_first_and_another_profiler_stays() -> None:
    with pytest.raises(ZeroDivisionError), refusing_nondeterminism("here"):
        1 / (time.time() * 0)
    assert sys.getprofile() is None

    def profile(*_: Any) -> None:
        pass

    sys.setprofile(profile)
    try:
        with refusing_nondeterminism("here"):
            random.random()
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


def stamped(x: Any) -> Any:
    return x * round(time.time() / 1e12)  # the same number at each trace


def test_a_build_refuses_what_two_traces_do_not_show(tmp_path: Path, build_cache: Path) -> None:
    """Also inside of jitted functions, which jax traces once."""
    options: dict[str, Any] = {"name": "stamped", "cache": build_cache, "quiet": True}
    inner = jax.jit(stamped)
    for function in (stamped, lambda x: inner(x) + 1):
        program = Program("stamped", fn=function, args=["float32[3]"])
        with pytest.raises(BuildError, match=rf"time\.time\(\) at .*{Path(__file__).name}:\d+"):
            build(program, tmp_path, **options)
    program = Program("stamped", fn=stamped, args=["float32[3]"], impure=True)
    built = build(program, tmp_path, **options)
    assert load(built.path).call("stamped", np.ones(3, np.float32)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("generator", [SEEDED, np.random.default_rng()])
def test_python_objects_are_traced_twice(tmp_path: Path, build_cache: Path, generator: Any) -> None:
    """Each trace draws the next number, with or without a seed."""
    kept = jax.jit(lambda x: x + 1)
    kept(1)
    program = Program("drawn", fn=lambda x: x * generator.random(), args=["float32[3]"])
    with pytest.raises(BuildError, match=r"to give the same program each time .* differ in mul at"):
        build(program, tmp_path, name="drawn", cache=build_cache, quiet=True)
    assert kept._cache_size() == 1  # the process keeps what it has compiled


MODULE = """
import time

def f(x):
    started = time.perf_counter()
    y = x + 1
    print(time.perf_counter() - started)
    return y
"""


def test_a_manifest_allows_it_and_forbids_it_again(tmp_path: Path, build_cache: Path) -> None:
    """A trace that was kept while it was allowed is no reason to allow it."""
    (tmp_path / "timed.py").write_text(MODULE)

    def manifest(impure: str) -> Manifest:
        (tmp_path / "m.toml").write_text(
            '[bundle]\nname = "timed"\n[[program]]\nname = "f"\nfunction = "timed:f"\n'
            f'args = ["float32[2]"]\n{impure}\n[[target]]\nname = "cpu-host"\n'
        )
        return read_manifest(tmp_path / "m.toml")

    build(manifest("impure = true"), tmp_path / "out", cache=build_cache, quiet=True)
    with pytest.raises(BuildError, match=r"time\.perf_counter\(\) at .*timed\.py:5, .*timed\.py:7"):
        build(manifest(""), tmp_path / "out", cache=build_cache, quiet=True)


@pytest.mark.parametrize(
    ("draws", "name"),
    [
        ("time.time() % 10", r"time\.time\(\)"),
        ("np.random.rand()", r"global generator of np\.random"),
    ],
)
def test_a_module_that_draws_at_import_is_refused(tmp_path: Path, draws: str, name: str) -> None:
    (tmp_path / "drawn.py").write_text("from drawing import S\n\n\ndef f(x):\n    return x * S\n")
    (tmp_path / "drawing.py").write_text(
        f"import random, time, uuid\nimport numpy as np\n\nS = {draws}\n"
    )
    with pytest.raises(BuildError, match=rf"here: cannot import 'drawn': .*{name}"):
        UserModules(tmp_path).find("drawn:f", "here")
    assert callable(UserModules(tmp_path).find("drawn:f", "here", impure=True))


def test_libraries_may_draw_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "toydrawing.py").write_text(
        "import random, time, uuid\nS = time.time(), random.random(), uuid.uuid4()\n"
    )
    monkeypatch.syspath_prepend(str(packages))
    (tmp_path / "drawn.py").write_text("import toydrawing\n\n\ndef f(x):\n    return x\n")
    try:
        assert callable(UserModules(tmp_path).find("drawn:f", "here"))
    finally:
        sys.modules.pop("toydrawing", None)
