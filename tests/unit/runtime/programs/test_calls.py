"""Arguments of 64 bits are those of 32 where jax takes them so, and never other values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prejit.compiler import Program, build
from prejit.runtime import Bundle, UsageError, jit, load

X = np.random.default_rng(0).standard_normal((4, 3))
LABELS = X.argmax(1)


def loss(x: Any, labels: Any) -> Any:
    return jnp.take_along_axis(x, labels[:, None], 1).sum(), labels + 1


def step(state: Any, x: Any) -> Any:
    return state + x.sum()


def examples(batch: int) -> Any:
    return {"x": np.ones((batch, 3)), "labels": np.zeros(batch, np.int64)}


PROGRAMS = [
    Program("loss", fn=loss, args={"x": X, "labels": LABELS}),
    Program("made", fn=loss, args=examples, buckets={"batch": (2, 4)}),
    Program(
        "shaped",
        fn=loss,
        args={
            "x": jax.ShapeDtypeStruct((4, 3), np.float64),
            "labels": jax.ShapeDtypeStruct((4,), np.int64),
        },
    ),
    Program(
        "padded",
        fn=loss,
        args={"x": "float32[{batch}, 3]", "labels": "int32[{batch}]"},
        buckets={"batch": (8,)},
        pad=["batch"],
    ),
    Program("step", fn=step, args={"state": np.zeros(2), "x": X[0]}),
    Program(
        "same", fn=lambda *each: each, args=[np.zeros(1, t) for t in ("i8", "u8", "f8", "c16")]
    ),
]
NOTE = "is built with ['labels'] as int32 and not int64, ['x'] as float32 and not float64: jax_enable_x64"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, build_cache: Path) -> Path:
    return build(
        PROGRAMS, tmp_path_factory.mktemp("wide"), name="wide", cache=build_cache, quiet=True
    ).path


@pytest.fixture
def bundle(path: Path) -> Bundle:
    return load(path, on_mismatch="error")


def test_the_build_says_once_for_a_program_what_is_narrower(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build(PROGRAMS[1:3], tmp_path, name="said", cache=tmp_path / "cache")
    said = capfd.readouterr().err
    assert said.count(NOTE) == 2
    for name in ("made", "shaped"):
        assert said.count(f"{name} {NOTE}") == 1


@pytest.mark.parametrize("name", ["loss", "made", "shaped", "padded"])
@pytest.mark.parametrize("x", [X, X.astype("f")])
@pytest.mark.parametrize("labels", [LABELS, LABELS.astype(np.int32)])
def test_arrays_of_64_bits_give_what_jax_gives(
    bundle: Bundle, name: str, x: Any, labels: Any
) -> None:
    """Again and again, and by all ways: no way remembers that a program takes them as they are."""
    if name == "padded":
        x, labels = x[:3], labels[:3]
    ways: list[Callable[..., Any]] = [
        lambda **given: bundle.call(name, **given),
        lambda **given: bundle.call_async(name, **given).result(),
    ]
    if name != "padded":
        ways.append(jit(loss, bundle=bundle, name=name, on_miss="error"))
    expected = jax.jit(loss)(x, labels)
    for given in (x, X.astype("f")[: len(x)], x) * 2:
        for call in ways:
            found = call(x=given, labels=labels)
            if name != "padded":  # the sum is one over padding too
                np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
            np.testing.assert_array_equal(found[1], expected[1])
            assert [str(each.dtype) for each in found] == ["float32", "int32"]


def test_state_of_64_bits_is_kept_as_32(bundle: Bundle) -> None:
    bound = bundle.bind("step", state=np.zeros(2))
    for _ in range(2):
        bound(x=X[0])
    bound.write(state=bound.read()["state"].astype(np.float64))
    expected = np.full(2, 2 * X[0].astype("f").sum())
    np.testing.assert_allclose(bound.read()["state"], expected, rtol=1e-6)


SAME = [
    np.array([each], dtype) for each, dtype in ((-5, "i8"), (7, "u8"), (0.1, "f8"), (1j, "c16"))
]


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, 2**31), (0, -(2**31) - 1), (1, 2**32), (2, 1e300), (3, 1e300j)],
)
def test_values_that_32_bits_do_not_hold_are_refused(
    bundle: Bundle, place: int, value: Any
) -> None:
    """jax wraps integers and makes numbers infinite, without an error."""
    given = list(SAME)
    for _ in range(2):
        found = bundle.call("same", *given)
        for mine, theirs in zip(found, jax.jit(lambda *x: x)(*given), strict=True):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
    given[place] = np.array([value], given[place].dtype)
    with pytest.raises(UsageError, match=f"{place}: expected .* whose values are in the range"):
        bundle.call("same", *given)
    given[place] = np.full(1, np.nan, "f8") if place == 2 else SAME[place]
    bundle.call("same", *given)


def test_with_64_bits_no_array_becomes_narrower(tmp_path: Path, build_cache: Path) -> None:
    with jax.enable_x64(True):
        programs = [
            Program("wide", fn=jnp.sum, args=[X]),
            Program("narrow", fn=jnp.sum, args=["float32[4, 3]"]),
        ]
        built = build(programs, tmp_path, name="x64", cache=build_cache, quiet=True)
        bundle = load(built.path)
        found, expected = bundle.call("wide", X), jax.jit(jnp.sum)(X)
        assert found.dtype == expected.dtype == "float64"
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        for name, x in (("narrow", X), ("wide", X.astype("f"))):
            with pytest.raises(UsageError, match=r"expected float.*, found float"):
                bundle.call(name, x)
