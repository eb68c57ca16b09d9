"""All checks of a model, in order. Those of numbers run only where attributes, shapes and dtypes are right.

Checks of shapes trace the model and compute nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prejit.compiler.checking import model_rules as rules
from prejit.compiler.checking.subject import (
    FEWEST_POSITIONS,
    ROWS,
    TOLERANCE,
    Finding,
    Subject,
    difference,
)
from prejit.compiler.checkpoint.tensor_files import read_parameters
from prejit.compiler.lowering.user.modules import UserModules
from prejit.compiler.lowering.user.own_decoder import CHECK_MODEL, find_model
from prejit.compiler.manifest.manifest import Model, names_object
from prejit.compiler.models.parameters import Parametrized
from prejit.runtime.errors import ManifestError, UsageError
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
    kept = subject.cache_shapes(rows, subject.positions, dtype)
    return jax.eval_shape(
        lambda values, *inputs: subject.model.bind(values)(*inputs, every=every),
        *(subject.values, tokens, row, row, kept),
    )


def _text(array: Any) -> str:
    """Return an array's dtype and shape: `float32 [3, 16]`."""
    return f"{array.dtype} {list(array.shape)}" if hasattr(array, "shape") else type(array).__name__


def compare_with(subject: Subject, reference: Callable[..., Any]) -> Finding:
    """Compare the logits after each token with those of a reference."""
    texts = subject.texts[:, : 3 * subject.piece]
    computed, _ = subject.feed(texts, subject.cache())
    given: tuple[Any, ...] = (texts,)
    if subject.encodes:
        lengths = np.full(len(texts), subject.source_size, np.int32)
        given = (subject.sources(), lengths, texts)
    right = _as_numpy(reference(*given))
    if right.shape != computed.shape:
        return Finding(
            "against",
            False,
            None,
            f"expected logits {list(computed.shape)} of the reference, found {list(right.shape)}",
            "return [B, T, V] from the reference: the logits after each token",
        )
    apart = [difference(computed[:, at], right[:, at]) for at in range(texts.shape[1])]
    first = next((at for at, one in enumerate(apart) if one > subject.tolerance), None)
    if first is None:
        return Finding("against", True, max(apart))
    return Finding(
        "against",
        False,
        max(apart),
        f"expected the logits of the reference, found a difference of {apart[first]:.1e} of their spread "
        f"after token {first}, the first that differs",
        "compare the layers one by one: weights, scales, norms and positions"
        if first == 0
        else "compare what later tokens read: positions, masks and the cache",
    )


def _as_numpy(array: Any) -> np.ndarray[Any, Any]:
    """Return logits of NumPy, jax or torch as NumPy array."""
    if hasattr(array, "detach"):  # torch: it may need gradients, be on a GPU, or be bfloat16
        array = array.detach().float().cpu().numpy()
    return np.asarray(array, np.float32)


Check = Callable[[Subject], Finding | None]
"""A check; None: it does not concern the model."""

SOURCE_SIZE = 16
"""Places of the sources of an encoder-decoder that takes any number."""

SHAPES: tuple[Check, ...] = (attributes, cache, logits, returned)
"""The checks that all others need."""

RULES: tuple[Check, ...] = (
    rules.finite,
    rules.sensitive,
    rules.chunks,
    rules.padding,
    rules.end,
    rules.batch,
    rules.idle,
    rules.fresh,
    rules.rewind,
    rules.context,
    rules.every,
    rules.encode,
)
"""The checks of the protocol's rules."""


def check_model(
    model: Parametrized,
    values: Mapping[str, Any],
    *,
    against: Callable[..., Any] | None = None,
    tolerance: float = TOLERANCE,
    source_size: int = SOURCE_SIZE,
    describe: Callable[[BaseException], str] = repr,
) -> Iterator[Finding]:
    """Yield the finding of each check that concerns a model.

    Nothing raises what the model raises: that is a failed check. If a shape is wrong, the first such finding
    is the last.

    Args:
        model: the model apart from its parameters; an encoder-decoder if it has `encode`.
        values: the values of its parameters, by name.
        against: a reference of the same model, which gives the logits after each token, [B, T, V]: of tokens
            int32 [B, T], or for an encoder-decoder of sources, their lengths int32 [B], and tokens.
        tolerance: the largest difference of logits that counts as none, relative to their spread.
        source_size: N of an encoder-decoder's sources, for one that takes a certain size only.
        describe: returns the text of an exception.
    """
    placed = jax.device_put(dict(values))  # once: a call copies what is in NumPy
    subject = Subject(model, placed, tolerance, source_size)
    for check in SHAPES:
        found = _run(check, subject, describe)
        assert found is not None
        yield found
        if not found.passed:
            return
    for check in RULES:
        if (found := _run(check, subject, describe)) is not None:
            yield found
    if against is not None:

        def compared(subject: Subject) -> Finding:
            return compare_with(subject, against)

        found = _run(compared, subject, describe, "against")
        assert found is not None
        yield found


def _run(
    check: Check, subject: Subject, describe: Callable[[BaseException], str], name: str = ""
) -> Finding | None:
    name = name or check.__name__
    try:
        return check(subject)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        change = "call the model in Python to see the whole traceback"
        if check is cache and subject.encodes:
            change = (
                "give --source-size N if the model takes sources of N places only, or " + change
            )
        return Finding(name, False, None, f"expected a result, found {describe(error)}", change)


def check_user_model(
    model: str,
    *,
    params: Path | None = None,
    against: str | None = None,
    tolerance: float = TOLERANCE,
    source_size: int = SOURCE_SIZE,
) -> list[Finding]:
    """Return the findings of all checks, computed on the CPU.

    Args:
        model: `package.module:attribute` of the model, in the current directory or installed.
        params: a .safetensors file or orbax directory with the values of its parameters; None: its own.
        against: `package.module:attribute` of a reference, as `kit.check_model` takes it, or None.
        tolerance: as in `kit.check_model`.
        source_size: as in `kit.check_model`.

    Raises:
        UsageError: the model or the reference does not exist, cannot be imported, or is none; or the
            parameters do not fit.
        CheckpointError: the parameters cannot be read.
        BuildError: making the model fails.
    """
    parameters = None if params is None else read_parameters(params)
    modules = UserModules(Path.cwd())
    try:
        named = Model(module=_name("MODEL", model), impure=True)
        found = find_model(named, "check-model", parameters, modules)
        reference = None
        if against is not None:
            reference = modules.find(
                _name("--reference", against), "check-model: --reference", impure=True
            )
    except ManifestError as error:  # here is no manifest, and no other command to try
        hint = None if error.hint in (None, CHECK_MODEL) else _without_manifest(str(error.hint))
        raise UsageError(_without_manifest(str(error)), hint=hint) from error
    if not (reference is None or callable(reference)):
        raise UsageError(
            f"check-model: --reference: expected a function, found {type(reference).__name__} "
            f"{against!r}",
            hint="it takes tokens int32 [B, T] and returns logits [B, T, V]",
        )
    values = {name: read() for name, read in found.exact.values.items()}
    with modules.in_use(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return list(
            check_model(
                found.exact.model,
                values,
                against=reference,
                tolerance=tolerance,
                source_size=source_size,
                describe=modules.describe,
            )
        )


def _name(what: str, name: str) -> str:
    """Return a name of an object, `package.module:attribute`."""
    if not names_object(name):
        published = "; a published model is its directory or .gguf file" if what == "MODEL" else ""
        raise UsageError(
            f"check-model: {what}: expected package.module:attribute, found {name!r}",
            hint=f"model:decoder is the object `decoder` of model.py in this directory{published}",
        )
    return name


def _without_manifest(text: str) -> str:
    """Return an error's text with the command's names for what a manifest gives."""
    for name, here in (
        ("model.module: ", ""),
        ("model.params", "--params"),
        ("beside the manifest", "into this directory"),
    ):
        text = text.replace(name, here)
    return text
