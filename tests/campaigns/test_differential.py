"""Random functions give what jax.jit gives, in every way that a bundle has to call them, or a refusal."""

import contextlib
import importlib
import json
import random
import subprocess
import sys
import tempfile
import warnings
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from prejit.compiler import Program, build, program
from prejit.runtime import FallbackWarning, PrejitError, jit, load

from . import random_functions
from .campaign import ROOT, check, facts, setting, write_figures
from .random_functions import EXAMPLE, RETREED, SHARED, Pair, Record, Turned, given

CHECKS = setting("DIFFERENTIAL_CHECKS", 400)
SEED = setting("DIFFERENTIAL_SEED", 0)
WHOLE_CHECKS = 100_000
AT_ONCE = 2
BATCH_CHECKS = min(5000, CHECKS // AT_ONCE + 250)
BATCH_FUNCTIONS = min(25, BATCH_CHECKS // 200)
pytestmark = pytest.mark.timeout(900 + CHECKS)
JAX_SETTINGS = (
    lambda: jax.enable_x64(True),
    lambda: jax.default_matmul_precision("highest"),
    lambda: jax.numpy_rank_promotion("raise"),
    lambda: jax.numpy_dtype_promotion("strict"),
    lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
)
TOLERANCES = {"bfloat16": 2e-2, "float16": 2e-3}
SET = "another setting"
SAME, REFUSED = "same", "refused"
BIND = "bind, two calls"
BIND_ALL = "bind of all arguments, four calls"


class DifferenceError(Exception):
    """A way gave something other than jax.jit."""


def compare(found, wanted):
    """Raise DifferenceError unless a result is the same as that of jax.jit."""
    trees = [jax.tree.structure(each) for each in (found, wanted)]
    if trees[0] != trees[1]:
        raise DifferenceError(f"the tree {trees[0]}, for {trees[1]}")
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, mine), theirs in pairs:
        where = jax.tree_util.keystr(path)
        kinds = [(np.asarray(each).dtype.name, np.shape(each)) for each in (mine, theirs)]
        if kinds[0] != kinds[1]:
            raise DifferenceError(f"{where}: {kinds[0]}, for {kinds[1]}")
        if isinstance(mine, jax.Array) and mine.weak_type != theirs.weak_type:
            raise DifferenceError(f"{where}: weak_type {mine.weak_type}, for {theirs.weak_type}")
        one, other = (np.asarray(each) for each in (mine, theirs))
        same = np.array_equal(one, other)
        if one.dtype.kind not in "biu":
            near = TOLERANCES.get(one.dtype.name, 1e-5)
            wide = np.complex128 if one.dtype.kind == "c" else np.float64
            one, other = one.astype(wide), other.astype(wide)
            with np.errstate(invalid="ignore"):
                same = np.allclose(one, other, near, near, equal_nan=True)
        if not same:
            raise DifferenceError(f"{where}: {one.tolist()}, for {other.tolist()}")


def plain(tree):
    """Return a tree with OrderedDicts for dicts and records with names, and tuples for lists."""

    def is_other(node):
        return isinstance(node, dict | tuple | list)

    def change(node):
        if isinstance(node, Pair | Turned):
            node = dict(sorted(node._asdict().items()))
        if isinstance(node, dict):
            return OrderedDict((name, plain(part)) for name, part in node.items())
        return tuple(map(plain, node)) if is_other(node) else node

    return jax.tree.map(change, tree, is_leaf=is_other)


BAD = (
    *("another answer", "answered what jax refuses", "refused the example", "refused by jit"),
    "raw error",
)


class Outcomes:
    """Numbers of checks by variant, way and outcome, and a bad one for each variant of a function."""

    def __init__(self):
        self.counts = Counter()
        self.bad = {}

    def add(self, variant, way, outcome, function, arguments, text=""):
        self.counts[variant, way, outcome] += 1
        if outcome in BAD:
            said = f"{outcome}: {way}, {variant}: {text}\n{function.source}\n{arguments!r}"
            self.bad.setdefault((function.name, variant), said[:3000])


def run_batch(seed, functions, checks, directory):
    chance = random.Random(seed)
    made = [random_functions.random_function(f"f{number}", chance) for number in range(functions)]
    name = f"functions_{seed}"
    head = (
        "from collections import OrderedDict, defaultdict\nimport jax\nimport jax.numpy as jnp\n"
        "from tests.campaigns.random_functions import Pair, Record\n\n"
    )
    text = head + "\n\n".join(each.source for each in made) + "\n"
    (directory / f"{name}.py").write_text(text)
    sys.path.insert(0, str(directory))
    module = importlib.import_module(name)
    programs = [_program(getattr(module, each.name), each, chance) for each in made]
    options = {"name": f"differential-{seed}", "cache": directory / "cache", "quiet": True}
    built = build(programs, directory, **options)
    outcomes = Outcomes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        bundle = load(built.path, types=(Pair, Turned, Record), on_mismatch="error")
        for each in made:
            function = getattr(module, each.name)
            ways = _ways(function, each, bundle)
            _check_ways(each, jax.jit(function), ways, chance, checks // functions, outcomes)
        jax.clear_caches()
    return outcomes


def _program(function, made, chance):
    if made.sizes is None:
        return program(function, *given(made.example, chance))
    rows, factors = made.example
    kinds = [f"{rows.dtype}[{{n}}, 3]", f"{factors.dtype}[3]"]
    sizes = {made.sizes: ("n",)}
    return Program(made.name, fn=function, args=kinds, buckets={"n": (2, 4)}, **sizes)


def _ways(function, made, bundle):
    """Return the ways that are compared; `BIND` makes two calls of it, `BIND_ALL` four."""
    name = made.name

    def on_device(*arguments):
        return jax.tree.map(np.asarray, bundle.call_on_device(name, *arguments))

    ways = {
        "call": lambda *arguments: bundle.call(name, *arguments),
        "call_async": lambda *arguments: bundle.call_async(name, *arguments).result(),
        "call_on_device": on_device,
        "jit": jit(function, bundle=bundle),
        "jit, on_miss=error": jit(function, bundle=bundle, on_miss="error"),
    }
    if made.has_state:

        def bound(state, other):
            step = bundle.bind(name, state)
            step(other)
            result = step(other)
            return step.read()[0], result

        def all_bound(*arguments):
            step = bundle.bind(name, *arguments)
            for _ in range(4):
                step()
            return tuple(step.read().values())

        ways |= {BIND: bound, BIND_ALL: all_bound}
    return ways


def _check_ways(made, reference, ways, chance, checks, outcomes):
    kinds = [
        (*variant, chance.randrange(1 << 30)) for variant in random_functions.variants(made, chance)
    ]
    other_setting = chance.choice(JAX_SETTINGS)
    kinds.append((SET, made.example, 0))
    draws = max(1, round(checks / len(kinds) / len(ways)))
    chance.shuffle(kinds)  # what a call leaves behind must not change another
    for _ in range(draws):
        for variant, tree, seed in kinds:
            usual = arguments = given(tree, chance)
            if variant == SHARED:
                arguments = (arguments[0],) * len(arguments)
            elif variant == RETREED:
                arguments = random_functions.retreed(usual, random.Random(seed))
            with other_setting() if variant == SET else contextlib.nullcontext():
                for way, outcome, text in _compared(reference, ways, variant, arguments, usual):
                    outcomes.add(variant, way, outcome, made, arguments, text)


def _compared(reference, ways, variant, arguments, usual):
    """Compare the answers of all ways to arguments with those of jax.jit, by name with the usual ones."""
    wanted = error = by_name = None
    try:
        wanted = reference(*arguments)
    except Exception as raised:
        error = raised
        if variant == RETREED:
            by_name = reference(*usual)
    swapped = any(
        isinstance(leaf, np.ndarray) and not leaf.dtype.isnative
        for leaf in jax.tree.leaves(arguments)
    )
    for way, call in ways.items():
        if swapped and way.startswith("jit"):
            continue  # jax refuses them, but its dispatch takes them, wrongly, after a call like it
        expected = by_name if error else wanted
        if way == BIND and expected is not None:
            others = (usual if error else arguments)[1:]
            expected = reference(expected[0], *others)
        elif way == BIND_ALL and expected is not None:
            for _ in range(3):
                expected = reference(*expected)
        form = (lambda tree: tree) if way.startswith("jit") else plain
        outcome, text = _outcome(call, arguments, error, expected, form)
        if outcome == REFUSED and variant == EXAMPLE and way not in (BIND, BIND_ALL):
            outcome = "refused the example"
        elif outcome == REFUSED and way == "jit":
            outcome = "refused by jit"
        elif error and by_name is None and outcome == SAME:
            outcome, text = "answered what jax refuses", repr(error)[:500]
        yield way, outcome, text


def _outcome(call, arguments, error, wanted, form):
    try:
        found = call(*arguments)
    except Exception as raised:
        if error is not None and isinstance(raised, PrejitError | type(error)):
            return "both refuse", ""
        outcome = REFUSED if isinstance(raised, PrejitError) else "raw error"
        return outcome, f"{type(raised).__name__}: {raised}"
    try:
        if wanted is not None:
            compare(form(found), form(wanted))
    except DifferenceError as difference:
        return "another answer", str(difference)
    return SAME, ""


def test_every_way_answers_as_jax_does_or_refuses():
    batches = []
    done = 0  # a batch may end before it has all of its checks
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while done < CHECKS:
            first = SEED + len(batches)
            batches += pool.map(_run, range(first, first + AT_ONCE))
            done = sum(count for batch in batches for *_, count in batch["counts"])
    rows = [row for batch in batches for row in batch["counts"]]

    def counted(place, *, only=""):
        found = Counter[str]()
        for row in rows:
            if only in ("", row[0]):
                found[row[place]] += row[3]
        return found

    outcomes = counted(2)
    figures = {
        **facts("jax"),
        "seeds": [SEED, SEED + len(batches) - 1],
        "functions": len(batches) * BATCH_FUNCTIONS,
        "checks": outcomes.total(),
        "outcomes": dict(sorted(outcomes.items())),
        "checks by kind of arguments": dict(sorted(counted(0).items())),
        "checks by way": dict(sorted(counted(1).items())),
    }
    print(json.dumps(figures, indent=1))
    if CHECKS >= WHOLE_CHECKS:
        write_figures("differential", figures)
    check([text for batch in batches for text in batch["bad"]])
    assert not any(outcomes[each] for each in BAD)
    assert outcomes[SAME] > outcomes.total() / 3
    assert counted(2, only=EXAMPLE)[SAME] > 0


def _run(seed):
    """Run a batch in a process of its own: what jax and XLA keep of its functions goes with it."""
    numbers = map(str, (seed, BATCH_FUNCTIONS, BATCH_CHECKS))
    words = ("-m", "tests.campaigns.test_differential", *numbers)
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    again = " ".join((".venv/bin/python", *words))
    assert done.returncode == 0, f"{again}\n{done.stderr[-3000:]}"
    found = json.loads(done.stdout)
    found["bad"] = [f"{text}\nrepeat it: {again}" for text in found["bad"]]
    return found


if __name__ == "__main__":
    seed, functions, checks = map(int, sys.argv[1:4])
    with tempfile.TemporaryDirectory(prefix="differential-") as directory:
        outcomes = run_batch(seed, functions, checks, Path(directory))
    counts = [[*key, count] for key, count in sorted(outcomes.counts.items())]
    print(json.dumps({"counts": counts, "bad": [*outcomes.bad.values()]}))
