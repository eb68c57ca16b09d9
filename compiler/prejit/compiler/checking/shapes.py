"""Checks of attributes, shapes and dtypes. They trace the model and compute nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from prejit.compiler.checking.subject import FEWEST_POSITIONS, ROWS, Finding, Subject
from prejit.runtime.format.arrays import DTYPES

Problems = Iterator[tuple[str, str]]
"""A finding is one problem and the change that mends it."""
_LONGEST = 5000
"""Positions of the longest cache to trace. It is longer than a window that an array may be limited to."""


def _first_problem(check: Callable[[Subject], Problems]) -> Callable[[Subject], Finding]:
    """Return a check whose finding is the first problem that a generator yields."""

    @wraps(check)
    def run(subject: Subject) -> Finding:
        for found, change in check(subject):
            return Finding(check.__name__, False, None, found, change)
        return Finding(check.__name__, True)

    return run


@_first_problem
def attributes(subject: Subject) -> Problems:
    """The model has the attributes and methods of the protocol."""
    model, kind = subject.bound, type(subject.bound).__name__
    methods = ("source", "encode") if subject.encodes else ("make_cache",)
    for name in ("__call__", *methods):
        if not callable(getattr(model, name, None)):
            yield (
                f"expected a method {name}, found none in {kind}",
                f"give the model `{name}` as prejit.compiler.models.protocol has it",
            )
    for name, least, none in (("vocab_size", 2, False), ("max_positions", FEWEST_POSITIONS, True)):
        expected = f"{'None or ' if none else ''}an integer of at least {least}"
        if not hasattr(model, name):
            yield (
                f"expected an attribute {name}, {expected}, found none in {kind}",
                f"set `{name}` on the model",
            )
        value = getattr(model, name)
        if none and value is None:
            continue
        try:
            right = operator.index(value) >= least and not isinstance(value, bool)
        except TypeError:
            right = False
        if not right:
            yield (
                f"{name}: expected {expected}, found {value!r}",
                f"make `{name}` a plain number that is no parameter",
            )


@_first_problem
def cache(subject: Subject) -> Problems:
    """The arrays of a new cache have rows, and at most one axis of positions."""
    made = "encode" if subject.encodes else "make_cache"
    most = subject.bound.max_positions
    short = subject.positions
    longest = _LONGEST if most is None else most
    base = subject.cache_shapes(ROWS, short)
    compared = {
        "rows": subject.cache_shapes(ROWS + 1, short),
        "positions": subject.cache_shapes(ROWS, longest),
    }
    for what, other in compared.items():
        if jax.tree.structure(other) != jax.tree.structure(base):
            yield (
                f"expected one tree of arrays for any number of {what}, found "
                f"{jax.tree.structure(base)} and {jax.tree.structure(other)}",
                f"make the same arrays in `{made}` for any number of {what}",
            )
    leaves = jax.tree_util.tree_leaves_with_path(base)
    rows, positions = (jax.tree.leaves(other) for other in compared.values())
    for (path, one), more, longer in zip(leaves, rows, positions, strict=True):
        name = f"cache{jax.tree_util.keystr(path)}"
        if str(one.dtype) not in DTYPES:
            yield (
                f"{name}: expected a dtype that a bundle can hold, found {one.dtype}",
                f"use one of {', '.join(DTYPES)}",
            )
        if one.shape[:1] != (ROWS,) or more.shape != (ROWS + 1, *one.shape[1:]):
            yield (
                f"{name}: expected [B, ...] with the rows on axis 0 alone, found {one.shape} for B = {ROWS} "
                f"and {more.shape} for B = {ROWS + 1}, with S = {short}",
                f"move the rows to axis 0 in `{made}` and where the model reads the array",
            )
        if short == longest or longer.shape == one.shape:
            continue
        axes = [(a, b) for a, b in zip(one.shape[1:], longer.shape[1:], strict=False) if a != b]
        if len(one.shape) != len(longer.shape) or axes != [(short, longest)]:
            yield (
                f"{name}: expected one axis of exactly S, or none that S changes, found {one.shape} for "
                f"S = {short} and {longer.shape} for S = {longest}",
                "give the array an axis of S positions, or a size that does not depend on S",
            )
    _ = subject.layout  # a build must accept them too


@_first_problem
def logits(subject: Subject) -> Problems:
    """The logits are float32 [B, V], and [B, T, V] with `every`."""
    vocab = operator.index(subject.bound.vocab_size)
    for rows in (1, ROWS):
        for width in (1, subject.piece):
            for every in (False, True):
                found, _ = _result_shapes(subject, rows, width, "float32", every)
                expected = (rows, width, vocab) if every else (rows, vocab)
                given = f"with B = {rows}, T = {width}, every = {every}"
                if getattr(found, "shape", None) != expected:
                    yield (
                        f"expected {list(expected)} {given}, found {_text(found)}",
                        "return [B, T, V] with `every`, else [B, V] after the last valid token of each row",
                    )
                if found.dtype != jnp.float32:
                    yield (
                        f"expected float32 {given}, found {found.dtype}",
                        "return `logits.astype(jnp.float32)`",
                    )


@_first_problem
def returned(subject: Subject) -> Problems:
    """The cache that comes back has the tree, shapes and dtypes of the one that went in."""
    for dtype in ("float32", "bfloat16"):
        given = subject.cache_shapes(ROWS, subject.positions, dtype)
        for width in (1, subject.piece):
            _, back = _result_shapes(subject, ROWS, width, dtype, every=False)
            if jax.tree.structure(back) != jax.tree.structure(given):
                yield (
                    f"expected the tree {jax.tree.structure(given)}, found {jax.tree.structure(back)}",
                    "return the cache in the same tree as it came",
                )
            leaves = jax.tree_util.tree_leaves_with_path(given)
            for (path, one), other in zip(leaves, jax.tree.leaves(back), strict=True):
                if (one.shape, one.dtype) != (other.shape, other.dtype):
                    yield (
                        f"cache{jax.tree_util.keystr(path)}: expected {_text(one)}, as it went in with "
                        f"dtype {dtype!r}, found {_text(other)}",
                        "write new values with `.astype(array.dtype)`, and keep the shape",
                    )


def _result_shapes(subject: Subject, rows: int, width: int, dtype: str, every: bool) -> Any:
    row = jax.ShapeDtypeStruct((rows,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    cache = subject.cache_shapes(rows, subject.positions, dtype)
    return jax.eval_shape(
        lambda values, *inputs: subject.model.bind(values)(*inputs, every=every),
        *(subject.values, tokens, row, row, cache),
    )


def _text(array: Any) -> str:
    """Return an array's dtype and shape: `float32 [3, 16]`."""
    return f"{array.dtype} {list(array.shape)}" if hasattr(array, "shape") else type(array).__name__
