"""All checks of a model, in order. Those of numbers run only where the shapes are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from prejit.compiler.checking import encoding, parity, rules, shapes
from prejit.compiler.checking.check_finding import TOLERANCE, Finding
from prejit.compiler.checking.subject import Subject
from prejit.compiler.models.parameters import Parametrized

Check = Callable[[Subject], Finding | None]
"""A check; None: it does not concern the model."""

SOURCE_SIZE = 16
"""Places of the sources of an encoder-decoder that takes any number."""

SHAPES: tuple[Check, ...] = (shapes.attributes, shapes.cache, shapes.logits, shapes.returned)
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
    encoding.encode,
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
            return parity.against(subject, against)

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
        if check is shapes.cache and subject.encodes:
            change = (
                "give --source-size N if the model takes sources of N places only, or " + change
            )
        return Finding(name, False, None, f"expected a result, found {describe(error)}", change)
