"""Programs of varying sizes are refused where they give other results than their functions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.sized_functions import LOOKS_AT_A_SIZE, LOOKS_BELOW_EIGHT, only_eight

from prejit.compiler import Program
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.pipeline.lower.program_lowering import lower
from prejit.compiler.pipeline.measure import other_sizes
from prejit.compiler.pipeline.measure.other_sizes import check_sizes
from prejit.compiler.pipeline.plan import plan_build
from prejit.compiler.pipeline.workspace import Workspace, find_code
from prejit.compiler.progress import Quiet
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.errors import BuildError
from prejit.runtime.format.arrays import Mesh

X = "float32[{n}, 4]"
SIGNED_ARGS = ("int32[{n}]", "bool[{n}]", "complex64[{n}]")


def compared(programs, directory, **options):
    """Lower programs and compare them: return what the error says of each section, and the notes."""
    manifest = Manifest("m", **{"targets": ["cpu-host"], "programs": programs, **options})
    store, notes, progress = DirectoryStore.open(directory), [], Quiet()
    progress.note = notes.append
    plan, code = plan_build(manifest, store), find_code(manifest)
    space = Workspace(plan, lambda: None, lambda: code, store, progress, lambda: None)
    lowered = {each.spec.name: lower(space, each) for each in plan.programs}
    found = {}
    try:
        check_sizes(space, lowered, space.parameters(), lambda: None, 120)
    except BuildError as error:
        for part in str(error).split("manifest 'm': program ")[1:]:
            section = part.partition("/")[0]
            found[section] = found.get(section, "") + part
    return found, notes


def program(name, fn, *args, **options):
    how = {"buckets": {"n": (8,)}, **options}
    return Program(name, fn=fn, args=list(args) or [X], **how)


DEPENDS_ON_PADDING = {
    "less-mean": lambda x: x - x.mean(0),
    "softmax": lambda x: jax.nn.softmax(x, axis=0),
    "argmax": lambda x: x.argmax(0),
    "max": lambda x: x.max(0),
    "roll": lambda x: jnp.roll(x, 1, 0),
    "last": lambda x: x[-1],
    "sign": lambda x: x > x.mean(),
    "negative-threshold": lambda x: jnp.where(x.max() < -2, x * 2, x),
    "clipped": lambda x: jnp.clip(x, 2, 5).min(),
    "complex": lambda x: jnp.fft.fft(x, axis=0),
    "narrow": lambda x: x.astype(jnp.bfloat16) - x.astype(jnp.bfloat16).mean(0),
}
SIGNED = {
    "greatest-whole": lambda x, flags, numbers: x.max(0),
    "argmax-whole": lambda x, flags, numbers: x.argmax(0),
    "all": lambda x, flags, numbers: flags.all(),
    "any": lambda x, flags, numbers: (~flags).any(),
    "real": lambda x, flags, numbers: numbers.real.max(),
}
"""These depend on padding only where all numbers are below 0, or all booleans true."""


def together(functions):
    """One program for several functions: each result is compared by itself."""
    return lambda *args: {name: fn(*args) for name, fn in functions.items()}


def test_each_function_that_looks_at_sizes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(other_sizes, "_MOST_SHOWN", 20)
    items = [*DEPENDS_ON_PADDING.items()]
    looks = {name: LOOKS_AT_A_SIZE[name] for name in ("equal", "even", "looked-up")}
    square = lambda x: x if x.shape[0] == x.shape[1] else -x  # noqa: E731
    two, sizes = "float32[{n}, {m}]", {"buckets": {"n": (8,), "m": (16,)}}
    wrong = [
        program("padded-1", together(dict(items[::2])), pad=["n"]),
        program("padded-2", together(dict(items[1::2])), pad=["n"]),
        program("below", together(LOOKS_BELOW_EIGHT), pad=["n"]),
        program("padded-signed", together(SIGNED), *SIGNED_ARGS, pad=["n"]),
        program("open", together(LOOKS_AT_A_SIZE), open_sizes=["n"]),
        program("pad", together(looks), pad=["n"], buckets={"n": (128,)}),
        program("nested", lambda x: {"right": x * 2, "wrong": (x.std(0), x + 1)}, pad=["n"]),
        program("square", square, two, **sizes, pad=["n", "m"]),
        program("open-square", square, two, **sizes, open_sizes=["n", "m"]),
        program("second", lambda x: x - x.mean(1, keepdims=True), two, **sizes, pad=["m"]),
    ]
    refused, notes = compared(wrong, tmp_path)
    assert not notes
    assert refused.keys() == {each.name for each in wrong}
    padded = "".join(text for name, text in refused.items() if name.startswith(("padded", "below")))
    for name in (*DEPENDS_ON_PADDING, *SIGNED, *LOOKS_BELOW_EIGHT):
        line = next(each for each in padded.splitlines() if each.startswith(f"  {name}"))
        assert " at n=" in line
        assert line.endswith(", padded")
    for section, names in (("open", LOOKS_AT_A_SIZE), ("pad", ("equal", "even", "looked-up"))):
        assert all(f"\n  {name}: " in refused[section] for name in names)
    assert "wrong[0]: " in refused["nested"]
    assert not any(right in refused["nested"] for right in ("right", "wrong[1]"))
    assert refused["nested"].startswith("nested/n8: expected what ")
    assert re.search(r"equal: .* at n=100, with open sizes", refused["open"])
    assert re.search(r"equal: .* at n=100, padded", refused["pad"])
    assert re.search(r"last: 0 in place of ", padded)


def masked_mean(x, length):
    valid = jnp.arange(x.shape[0]) < length
    return jnp.where(valid[:, None], x + 1, 0).sum(0) / length


def masked(x, valid):
    return jnp.where(valid[:, None], x + 1, 0).sum(0) / valid.sum()


def chaotic(x):
    """Rounding decides the result after a few hundred steps, and padding does not."""
    return jax.lax.fori_loop(0, 300, lambda _, x: 3.99 * x * (1 - x), jnp.abs(x))


def of_floats(x):
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3)), jnp.float32)
    return {
        "elementwise": jnp.tanh(x) * 2 + 1,
        "matmul": x @ weights,
        "softmax-of-features": jax.nn.softmax(x @ weights),
        "total": x.sum(),  # zeros add nothing
        "infinite": jnp.log(x) / jnp.abs(x).sum(1, keepdims=True),
        "nan-in-padding": x / jnp.abs(x).max(1, keepdims=True),
        "narrow": x.astype(jnp.bfloat16) @ weights.astype(jnp.bfloat16),
        "quantized": jnp.round(x * 127).astype(jnp.int8),
    }


def of_places(x, places, valid):
    best = jnp.where(valid[:, None], x, -jnp.inf).argmax(0)
    return masked(x, valid), best, x[places], jax.nn.one_hot(places, 5)


@pytest.mark.thorough
def test_a_right_function_is_built(tmp_path):
    every = {"pad": ["n"], "open_sizes": ["n"]}
    places = ("int32[{n}]", "bool[{n}]")
    of_two = {"buckets": {"n": (8,), "m": (1, 8)}, "pad": ["n", "m"], "open_sizes": ["n", "m"]}
    right = [
        program("floats", of_floats, **every),
        program("lengths", masked_mean, X, "int32[]", **every),
        program("places", of_places, X, *places, mask=2, pad=["n"]),
        program("noise", lambda key, x: x + jax.random.normal(key, x.shape), "key[]", X, pad=["n"]),
        program("chaotic", chaotic, **every),
        program("sliced", lambda x, y: (x + y, y[0]), X, X, **every),
        program("two", lambda x: (x * 2, x.sum(1), x.T), "float32[{n}, {m}]", **of_two),
        program("static", lambda x, power: x**power, pad=["n"], static={"power": [2, 3]}),
        program("loop", lambda x: x + 1, donate=[0], repeat=[3], carry=[0], pad=["n"]),
    ]
    assert compared(right, tmp_path) == ({}, [])
    with pytest.MonkeyPatch.context() as patch:  # what was compared is not compared again
        patch.setattr(other_sizes, "ask", None)
        assert compared(right, tmp_path) == ({}, [])


def on_gpus(x):
    return jax.lax.platform_dependent(x, cuda=lambda x: x - x.mean(0))


def test_what_cannot_be_compared_is_said_in_one_line(tmp_path):
    for fn, options, reason in (
        (only_eight, {}, "its function fails at each other size that was tried"),
        (on_gpus, {"targets": ["cuda-a10g"]}, "it does not lower for CPUs"),
        (jnp.tanh, {"mesh": Mesh(2, 1)}, "a mesh splits it"),
    ):
        found, [note] = compared([program("p", fn, pad=["n"])], tmp_path, **options)
        assert not found
        said = "p/n8 is not compared with its function at other sizes: "
        assert re.fullmatch(f"{said}.*{reason}.*", note)


def test_unchecked_programs_are_not_compared(tmp_path):
    mean, equal = DEPENDS_ON_PADDING["less-mean"], LOOKS_AT_A_SIZE["equal"]
    sizes = {"buckets": {"n": (8,), "m": (8,)}}
    wrong = [
        program("all", mean, "float32[{n}, {m}]", pad="unchecked", **sizes),
        program("some", mean, "float32[{n}, {m}]", pad=["n", "unchecked"], **sizes),
        program("open", equal, open_sizes="unchecked"),
        program("both", equal, open_sizes=["n", "unchecked"], pad=["n"]),
    ]
    assert compared(wrong, tmp_path) == ({}, [])
