"""Random functions of random trees, and random arguments for them."""

import math
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

EXAMPLE, RETREED, SHARED = "as the example", "another container", "one argument in all places"
DTYPES = (
    *("float32", "float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool"),
    "complex64",
)
SHAPES = ((), (), (3,), (2, 3), (0,), (1, 4))
NAMES = ("x", "a", "z", "m")


class Pair(NamedTuple):
    """A named tuple whose names are not in the order of the alphabet."""

    x: Any
    a: Any


class Turned(NamedTuple):
    a: Any
    x: Any


@jax.tree_util.register_dataclass
@dataclass
class Record:
    """A registered dataclass with an integer that is part of its structure."""

    z: Any
    m: Any
    k: int = field(default=2, metadata={"static": True})


@dataclass(frozen=True)
class Leaf:
    """An array of an example; `kind` is how it is given: one of `KINDS`."""

    dtype: str
    shape: tuple[int, ...]
    kind: str = "numpy"


def array_of(leaf, chance):
    """Return random values, in which the special ones of the dtype are not rare."""
    count = math.prod(leaf.shape)
    if leaf.dtype == "bool":
        values = [chance.random() < 0.5 for _ in range(count)]
    elif leaf.dtype == "complex64":
        values = [complex(chance.uniform(-4, 4), chance.uniform(-4, 4)) for _ in range(count)]
    elif "int" in leaf.dtype:
        low = 0 if leaf.dtype.startswith("u") else -9
        values = [chance.randint(low, 9) for _ in range(count)]
    else:
        special = (0.0, -0.0, math.nan, math.inf)
        values = [
            chance.choice(special) if chance.random() < 0.05 else chance.uniform(-4, 4)
            for _ in range(count)
        ]
    return np.array(values, jnp.dtype(leaf.dtype)).reshape(leaf.shape)


def _weak(given):
    if given.dtype.name not in ("float32", "int32", "complex64"):
        return jnp.asarray(given)
    zero = given.dtype.type(0).item()
    if not given.ndim:
        return jnp.where(np.ones(given.shape, bool), zero, zero) + jnp.asarray(given.item())
    return jnp.full(given.shape, given.flat[0].item() if given.size else zero)


KINDS = {
    "numpy": lambda given: given,
    "jax": jnp.asarray,
    "committed": lambda given: jax.device_put(given, jax.devices()[0]),
    "python": lambda given: given if given.ndim else given.item(),
    "scalar": lambda given: given[()],
    "weak": _weak,
    "strided": lambda given: np.repeat(given, 2, axis=0)[::2] if given.ndim else given,
    "columns": np.asfortranarray,
    "swapped": lambda given: (
        given.astype(given.dtype.newbyteorder()) if given.dtype.kind in "fiuc" else given
    ),
    "wide": lambda given: given.astype(
        {"f": np.float64, "i": np.int64}.get(given.dtype.kind, given.dtype)
    ),
}


def given(tree, chance):
    return jax.tree.map(lambda leaf: KINDS[leaf.kind](array_of(leaf, chance)), tree)


@dataclass(frozen=True)
class Function:
    name: str
    source: str
    example: tuple[Any, ...]
    sizes: str | None = None
    has_state: bool = False


def container(parts, chance):
    first, second = parts
    choices = (
        *({"z": first, "b": second}, OrderedDict([("z", first), ("b", second)])),
        *((first, second), [first, second], Pair(first, second), Record(first, second)),
        {"n": {"x": first}, "k": (second,)},
    )
    return chance.choice(choices)


def random_tree(chance, depth):
    if depth == 0 or chance.random() < 0.4:
        leaf = Leaf(chance.choice(DTYPES), chance.choice(SHAPES))
        if not leaf.shape and leaf.dtype in ("float32", "int32", "bool", "complex64"):
            return Leaf(leaf.dtype, (), chance.choice(("numpy", "python", "weak", "jax")))
        return Leaf(leaf.dtype, leaf.shape, chance.choice(("numpy", "jax")))
    return container([random_tree(chance, depth - 1) for _ in range(2)], chance)


def random_function(name, chance):
    make = chance.choice((function_of_trees,) * 4 + (function_of_rows, function_of_state))
    return make(name, chance)


def function_of_rows(name, chance):
    """Return a function whose results for a row depend on no other row below it."""
    dtype = chance.choice(("float32", "int32", "bfloat16"))
    of_rows = [
        *("x * 2 + y", "jnp.maximum(x, y)", "jnp.cumsum(x, 0)", "jnp.sort(x, -1)"),
        *("x - x.max(-1, keepdims=True)", "x[:, 0]", "x.sum(-1) * 3"),
        "x @ jnp.ones((3, 2), x.dtype)",
    ]
    first, second = chance.sample(of_rows, 2)
    result = chance.choice((first, f'{{"y": {first}, "c": {second}}}', f"Pair({first}, {second})"))
    example = (Leaf(dtype, (4, 3), chance.choice(("numpy", "jax"))), Leaf(dtype, (3,)))
    source = f"def {name}(x, y):\n    return {result}"
    return Function(name, source, example, sizes=chance.choice(("pad", "open_sizes")))


def function_of_state(name, chance):
    state = container([Leaf("float32", shape) for shape in ((3,), (2, 3))], chance)
    weights = chance.sample(range(2, 9), 2)
    source = (
        f"def {name}(x, a):\n    scale = a.sum() / 8\n"
        f"    state = jax.tree.map(lambda part: part * scale + {weights[0]}, x)\n"
        f"    return state, jnp.tanh(a) * {weights[1]}"
    )
    return Function(name, source, (state, Leaf("float32", (4,), "jax")), has_state=True)


def function_of_trees(name, chance):
    """Return a function that reads each leaf by its place and name, and gives each a weight of its own."""
    example = tuple(random_tree(chance, 2) for _ in range(chance.randint(1, 3)))
    lines = []
    results = []
    for place, tree in enumerate(example):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            read, result = f"{NAMES[place]}{jax.tree_util.keystr(path)}", f"r{len(results)}"
            lines.append(f"    {result} = {operation(read, leaf, len(results) + 2, chance)}")
            results.append(result)
        if isinstance(tree, dict) and all(isinstance(part, Leaf) for part in tree.values()):
            in_turn = f"enumerate({NAMES[place]}.values())"  # depends on the order of a dict
            summed = f"sum(jnp.sum(part) * (place + 2) for place, part in {in_turn})"
            lines.append(f"    r{len(results)} = {summed}")
            results.append(f"r{len(results)}")
    while len(results) > 1:
        first, second = results.pop(0), results.pop(0)
        choices = (
            f'{{"y": {first}, "c": {second}}}',
            f'OrderedDict([("y", {first}), ("c", {second})])',
            f'OrderedDict([("c", {first}), ("y", {second})])',
            *(f"defaultdict(list, y={first}, c={second})", f"({first}, {second})"),
            *(f"[{first}, None, {second}]", f"Pair({first}, {second})"),
            f"Record({first}, {second}, {chance.randint(0, 3)})",
        )
        results.append(chance.choice(choices))
    parameters = ", ".join(NAMES[: len(example)])
    source = "\n".join((f"def {name}({parameters}):", *lines, f"    return {results[0]}"))
    return Function(name, source, example)


def operation(read, leaf, weight, chance):
    """Return an expression of an array; many depend on dtypes, and on weak ones."""
    if leaf.dtype == "bool":
        choices = ["~jnp.asarray(X)", "jnp.where(X, W, 0)", "X + W"]
    else:
        choices = ["X * W", "X + jnp.bfloat16(W)", "X * jnp.float32(W)", "jnp.sum(X) * W"]
        choices += ["jnp.stack([jnp.asarray(X)] * 2) * W", "X + jnp.int8(W)"]
        choices += ["jnp.asarray(X) * 1", "-jnp.asarray(X)"]
        if leaf.dtype != "complex64":
            choices += ["jnp.maximum(X, W)", "X * W.5", "jnp.sin(X) + W"]
    return chance.choice(choices).replace("W", str(weight)).replace("X", read)


def variants(function, chance):
    """Yield names of kinds of arguments with trees of leaves: the example's kind first."""
    example = function.example
    yield EXAMPLE, example
    leaves, structure = jax.tree.flatten(example)

    def changed(change):
        place = chance.randrange(len(leaves))
        others = [*leaves[:place], change(leaves[place]), *leaves[place + 1 :]]
        return jax.tree.unflatten(structure, others)

    if function.sizes is not None:
        rows, factors = leaves
        for size in (0, 1, 2, 3, 4, 5, 7):
            yield f"{function.sizes}: {size} rows", (replace(rows, shape=(size, 3)), factors)
    for kind in ("numpy", "jax", "committed", "scalar", "strided", "columns", "swapped"):
        yield f"all {kind}", jax.tree.map(partial(replace, kind=kind), example)
    for _ in range(2):
        yield "another kind", changed(partial(replace, kind=chance.choice((*KINDS,))))
    yield "another dtype", changed(partial(replace, dtype=chance.choice(DTYPES)))
    yield "another shape", changed(partial(replace, shape=chance.choice(SHAPES)))
    yield from [(RETREED, example)] * 2
    if len(example) > 1:
        yield SHARED, (example[0],) * len(example)


def retreed(tree, chance):
    """Return a tree whose containers are of other classes, with the same or other names."""
    match tree:
        case dict():
            items = [(name, retreed(part, chance)) for name, part in tree.items()]
            chance.shuffle(items)
            choices = [dict(items), OrderedDict(items)]
            if len(items) == 2:
                choices.append(Pair(*(part for _, part in items)))
            return chance.choice(choices)
        case Record():
            z, m = (retreed(part, chance) for part in (tree.z, tree.m))
            return Record(z, m, chance.choice((tree.k, 5)))
        case Pair():
            x, a = (retreed(part, chance) for part in tree)
            return chance.choice((Pair(x, a), Turned(a, x), {"x": x, "a": a}))
        case tuple() | list():
            parts = (retreed(part, chance) for part in tree)
            return chance.choice((tuple, list))(parts)
    return tree
