"""Programs of varying sizes are refused where they give other results than their functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.extent import examples
from tests.sized_functions import LOOKS_AT_A_SIZE, LOOKS_BELOW_EIGHT, only_eight

from prejit.compiler import Program, build
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.pipeline.lower.lowering import lower
from prejit.compiler.pipeline.measure.other_sizes import check_sizes
from prejit.compiler.pipeline.plan import plan_build
from prejit.compiler.pipeline.workspace import Workspace, find_code
from prejit.compiler.progress import Quiet
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime import load
from prejit.runtime.errors import BuildError, ManifestError
from prejit.runtime.format.arrays import Mesh

X = "float32[{n}, 4]"


class Notes(Quiet):
    """Keeps lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def compared(
    programs: Iterable[Program], directory: Path, **options: Any
) -> tuple[dict[str, str], list[str]]:
    """Lower programs and compare them: return what the error says of each section, and the notes."""
    manifest = Manifest("m", **{"targets": ["cpu-host"], "programs": programs, **options})
    store, notes = DirectoryStore.open(directory), Notes()
    plan, code = plan_build(manifest, store), find_code(manifest)
    space = Workspace(plan, lambda: None, lambda: code, store, notes)  # type: ignore[arg-type, return-value]
    lowered = {each.spec.name: lower(space, each) for each in plan.programs}
    user = space.parameters()
    found: dict[str, str] = {}
    try:
        check_sizes(space, lowered, user, lambda: None, 120)
    except BuildError as error:
        for part in str(error).split("manifest 'm': program ")[1:]:
            section = part.partition("/")[0]
            found[section] = found.get(section, "") + part
    return found, notes.lines


def program(name: str, fn: Callable[..., Any], *args: str, **options: Any) -> Program:
    how: dict[str, Any] = {"buckets": {"n": (8,)}, **options}
    return Program(name, fn=fn, args=list(args) or [X], **how)


DEPENDS_ON_PADDING: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: x.mean(),
    "mean-of-rows": lambda x: x.mean(0),
    "less-mean": lambda x: x - x.mean(0),
    "softmax": lambda x: jax.nn.softmax(x, axis=0),
    "argmax": lambda x: x.argmax(0),
    "argmin": lambda x: x.argmin(0),
    "max": lambda x: x.max(0),
    "flip": lambda x: jnp.flip(x, 0),
    "roll": lambda x: jnp.roll(x, 1, 0),
    "sort": lambda x: jnp.sort(x, 0),
    "cumsum-from-the-end": lambda x: jnp.cumsum(x[::-1], 0)[::-1] + x.shape[0],
    "last": lambda x: x[-1],
    "size": lambda x: x + x.shape[0],
    "nested": lambda x: {"right": x * 2, "wrong": (x.std(0), x + 1)},
    "norm": lambda x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5),
    "sign": lambda x: x > x.mean(),
    "threshold": lambda x: jnp.where(x.min() > 2, x * 2, x),
    "negative-threshold": lambda x: jnp.where(x.max() < -2, x * 2, x),
    "clipped": lambda x: jnp.clip(x, 2, 5).min(),
    "complex": lambda x: jnp.fft.fft(x, axis=0),
    "narrow": lambda x: x.astype(jnp.bfloat16) - x.astype(jnp.bfloat16).mean(0),
}
PADDED = {**DEPENDS_ON_PADDING, **LOOKS_BELOW_EIGHT}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    wrong = [program(name, fn, pad=["n"]) for name, fn in PADDED.items()]
    wrong += [program(f"open-{n}", fn, open_sizes=["n"]) for n, fn in LOOKS_AT_A_SIZE.items()]
    wrong += [
        program(f"pad-{name}", LOOKS_AT_A_SIZE[name], pad=["n"], buckets={"n": (128,)})
        for name in ("equal", "even", "looked-up")
    ]
    square = lambda x: x if x.shape[0] == x.shape[1] else -x  # noqa: E731
    sizes: Any = {"buckets": {"n": (8,), "m": (16,)}}
    wrong.append(program("square", square, "float32[{n}, {m}]", **sizes, pad=["n", "m"]))
    wrong.append(
        program("open-square", square, "float32[{n}, {m}]", **sizes, open_sizes=["n", "m"])
    )
    wrong.append(
        program(
            "second",
            lambda x: x - x.mean(1, keepdims=True),
            "float32[{n}, {m}]",
            **sizes,
            pad=["m"],
        )
    )
    found, notes = compared(wrong, tmp_path_factory.mktemp("store"))
    assert not notes
    assert found.keys() == {each.name for each in wrong}
    return found


@pytest.mark.parametrize("name", PADDED)
def test_a_function_that_depends_on_padding_is_refused(name: str, refused: dict[str, str]) -> None:
    assert "padded" in refused[name]
    assert "at n=" in refused[name]


@pytest.mark.parametrize("name", LOOKS_AT_A_SIZE)
def test_a_function_that_looks_at_a_size_is_refused(name: str, refused: dict[str, str]) -> None:
    assert "with open sizes" in refused[f"open-{name}"]


def test_the_error_names_results_sizes_and_values(refused: dict[str, str]) -> None:
    assert "wrong[0]: " in refused["nested"]
    assert "right" not in refused["nested"]
    assert "wrong[1]" not in refused["nested"]
    assert "at n=100, with open sizes" in refused["open-equal"]
    assert "at n=100, padded" in refused["pad-equal"]
    assert refused["last"].startswith("last/n8: expected what ")
    assert "value: 0 in place of " in refused["last"]


def masked_mean(x: Any, length: Any) -> Any:
    valid = jnp.arange(x.shape[0]) < length
    return jnp.where(valid[:, None], x + 1, 0).sum(0) / length


def masked(x: Any, valid: Any) -> Any:
    return jnp.where(valid[:, None], x + 1, 0).sum(0) / valid.sum()


def best_of_valid(x: Any, valid: Any) -> Any:
    return jnp.where(valid[:, None], x, -jnp.inf).argmax(0)


def picked(x: Any, places: Any) -> Any:
    return x[places]


def chaotic(x: Any) -> Any:
    """Rounding decides the result after a few hundred steps, and padding does not."""
    return jax.lax.fori_loop(0, 300, lambda _, x: 3.99 * x * (1 - x), jnp.abs(x))


def test_a_right_function_is_built(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((4, 3)).astype("f")
    every: Any = {"pad": ["n"], "open_sizes": ["n"]}
    right = [
        program("elementwise", lambda x: jnp.tanh(x) * 2 + 1, **every),
        program("matmul", lambda x: x @ weights, **every),
        program("softmax-of-features", lambda x: jax.nn.softmax(x @ weights), **every),
        program("lengths", masked_mean, X, "int32[]", **every),
        program("mask", masked, X, "bool[{n}]", mask=1, **every),
        program("mask-of-best", best_of_valid, X, "bool[{n}]", mask=1, pad=["n"]),
        program("total", lambda x: x.sum(), **every),  # zeros add nothing
        program("infinite", lambda x: jnp.log(x) / jnp.abs(x).sum(1, keepdims=True), **every),
        program("nan-in-padding", lambda x: x / jnp.abs(x).max(1, keepdims=True), **every),
        program("gather", picked, X, "int32[{n}]", **every),
        program("one-hot", lambda x: jax.nn.one_hot(x, 5), "int32[{n}]", **every),
        program("noise", lambda key, x: x + jax.random.normal(key, x.shape), "key[]", X, pad=["n"]),
        program("narrow", lambda x: x.astype(jnp.bfloat16) @ weights.astype(jnp.bfloat16), **every),
        program("quantized", lambda x: jnp.round(x * 127).astype(jnp.int8), **every),
        program("chaotic", chaotic, **every),
        program("sliced", lambda x, y: (x + y, y[0]), X, X, **every),
        program(
            "two",
            lambda x: (x * 2, x.sum(1), x.T),
            "float32[{n}, {m}]",
            buckets={"n": (2, 8), "m": (1, 8)},
            pad=["n", "m"],
            open_sizes=["n", "m"],
        ),
        program("static", lambda x, power: x**power, pad=["n"], static={"power": [2, 3]}),
        program("loop", lambda x: x + 1, donate=[0], repeat=[3], carry=[0], pad=["n"]),
    ]
    assert compared(right, tmp_path) == ({}, [])


def on_gpus(x: Any) -> Any:
    return jax.lax.platform_dependent(x, cuda=lambda x: x - x.mean(0))


@pytest.mark.parametrize(
    ("fn", "options", "reason"),
    [
        (only_eight, {}, "its function fails at each other size that was tried"),
        (on_gpus, {"targets": ["cuda-a10g"]}, "it does not lower for CPUs"),
        (jnp.tanh, {"mesh": Mesh(2, 1)}, "a mesh splits it"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(
    fn: Callable[[Any], Any], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    found, [note] = compared([program("p", fn, pad=["n"])], tmp_path, **options)
    assert not found
    assert note.startswith("p/n8 is not compared with its function at other sizes: ")
    assert reason in note
    assert "\n" not in note


def test_unchecked_programs_are_not_compared(tmp_path: Path) -> None:
    mean, equal = DEPENDS_ON_PADDING["less-mean"], LOOKS_AT_A_SIZE["equal"]
    sizes: Any = {"buckets": {"n": (8,), "m": (8,)}}
    wrong = [
        program("all", mean, "float32[{n}, {m}]", pad="unchecked", **sizes),
        program("some", mean, "float32[{n}, {m}]", pad=["n", "unchecked"], **sizes),
        program("open", equal, open_sizes="unchecked"),
        program("both", equal, open_sizes=["n", "unchecked"], pad=["n"]),
    ]
    assert compared(wrong, tmp_path) == ({}, [])


def test_a_build_refuses_and_unchecked_builds(tmp_path: Path, build_cache: Path) -> None:
    fn = DEPENDS_ON_PADDING["mean-of-rows"]
    how: Any = {"name": "sizes", "cache": build_cache, "quiet": True}
    with pytest.raises(
        BuildError, match=r"rows/n8: expected what [^\0]* at n=1, padded"
    ) as refused:
        build([program("rows", fn, pad=["n"])], tmp_path, **how)
    assert 'pad = "unchecked"' in str(refused.value.hint)
    assert not (tmp_path / "sizes").exists()
    path = build([program("rows", fn, pad="unchecked")], tmp_path, **how).path
    x = np.ones((2, 4), np.float32)
    with load(path, on_mismatch="error") as bundle:
        np.testing.assert_array_equal(bundle.call("rows", x), np.full(4, 2 / 8, np.float32))


def test_another_text_than_unchecked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r'pad: expected .* or "unchecked"; found "n"'):
        build([program("rows", lambda x: x, pad="n")], tmp_path, name="m", quiet=True)


def test_what_was_compared_is_not_compared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = [program("right", lambda x: x * 2, pad=["n"])]
    assert compared(right, tmp_path) == ({}, [])
    monkeypatch.setattr("prejit.compiler.pipeline.measure.other_sizes.ask", None)
    assert compared(right, tmp_path) == ({}, [])


STEPS: list[Callable[[Any], Any]] = [
    *LOOKS_BELOW_EIGHT.values(),
    jnp.tanh,
    lambda x: x * 2 + 1,
    lambda x: x[:, ::-1],
    lambda x: jnp.cumsum(x, 1),
    lambda x: jax.nn.softmax(x, axis=1),
    lambda x: jnp.where(x > 0.5, x, -x),
    lambda x: x @ jnp.eye(4, k=1),
    lambda x: jnp.cumsum(x, 0),
    lambda x: x - x.sum(0),
    lambda x: x - x.mean(0),
    lambda x: jnp.flip(x, 0),
    lambda x: jnp.roll(x, 1, 0),
    lambda x: jnp.sort(x, 0),
    lambda x: x - x.max(0),
]


def differs(fn: Callable[[Any], Any]) -> bool:
    """Return whether padding to 8 rows changes a result at any size."""
    for n in range(1, 8):
        for sign, least, most in ((None, 0, 1), (1, 0, 1), (-1, 0, 1), (1, 3, 1000), (-1, 3, 1000)):
            x = np.random.default_rng(n).uniform(-1, 1, (n, 4)).astype("f")
            x = x if sign is None else sign * (least + np.abs(x) * (most - least))
            whole = np.zeros((8, 4), np.float32)
            whole[:n] = x
            x, whole = jnp.asarray(x), jnp.asarray(whole)
            if not np.allclose(fn(x), fn(whole)[:n], atol=1e-3 * most):
                return True
    return False


def test_random_functions_are_refused_where_padding_changes_them(tmp_path: Path) -> None:
    chance = random.Random(31)
    functions: dict[str, Callable[[Any], Any]] = {}
    for number in range(examples(12, 200)):
        steps = chance.choices(STEPS, k=chance.randint(1, 4))
        functions[f"f{number}"] = lambda x, steps=steps: reduce(lambda x, f: f(x), steps, x)
    programs = [program(name, fn, pad=["n"]) for name, fn in functions.items()]
    found, notes = compared(programs, tmp_path)
    assert not notes
    assert found.keys() == {name for name, fn in functions.items() if differs(fn)}
