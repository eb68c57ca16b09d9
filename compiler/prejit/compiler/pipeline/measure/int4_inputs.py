"""Round the matrices of a published model to int4 by what enters them on a text (models/int4_rounding.py).

The model in float32 is evaluated on the beginning of `model.evaluation`, operation by operation (see
model_comparison.py); the end of that text measures the accuracy. A matrix is rounded where it multiplies.
Memory holds what lies between two layers, the products of the inputs of one matrix, and the rounded matrices.
The matrices of a mixture are rounded expert by expert, each by the tokens that reach it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from prejit.compiler.base.stored_dtypes import GROUPS_OF_32, Groups
from prejit.compiler.checkpoint.checkpoint import Checkpoint
from prejit.compiler.models import int4_rounding, model_registry, narrow_matrices, quantizing
from prejit.compiler.models.int4_rounding import Inputs, Rows
from prejit.compiler.models.narrow_matrices import INLINED, called
from prejit.compiler.models.parameters import parametrized
from prejit.compiler.pipeline.measure import model_comparison
from prejit.compiler.pipeline.measure.model_comparison import MAX_TEXT_TOKENS, Weight, encode_text
from prejit.compiler.pipeline.model import ModelSource
from prejit.compiler.pipeline.pack.weights_layer import RoundedByText
from prejit.runtime.base.wording import few

Values = np.ndarray[Any, Any]

MOST_TOKENS, LEAST_TOKENS = 8192, 256
"""Tokens that a decoder reads; fewer than the least decide nothing."""
_WINDOW = 512
"""Largest number of tokens that it reads as one text."""
_SENTENCE = 128
"""The same of an encoder."""
_MOST_PRODUCTS = 1 << 45
"""Largest number of parameters times tokens: minutes on two cores. Large models read fewer tokens."""
_LEAST_ROWS = 8
"""Minimum tokens that reach an expert whose matrices they decide."""


def round_by(
    model: ModelSource,
    checkpoint: Checkpoint,
    context: int | None,
    text: Path | None,
    earlier: Mapping[str, tuple[Values, Values]] = MappingProxyType({}),
) -> RoundedByText:
    """Round the matrices of a model that are stored in int4 and were not published in few bits.

    `context` is the longest of a decoder's programs. `earlier` has matrices that the text rounded already.
    Matrices that the text does not reach are left out.

    Raises:
        StoreError, CheckpointError: text or tokenizer cannot be read.
        CheckpointError: float16 cannot hold a scale.
    """
    wanted = quantizing.int4_matrices(model.module, checkpoint.rows)
    if not wanted:
        return RoundedByText({}, "")
    alone = f"int4: rounded {_matrices(len(wanted))} by their weights alone"
    if text is None:
        return RoundedByText({}, f"{alone}; with a text in model.evaluation they lose less")
    encodes = model.files.layout is not None
    if encodes:
        longest = min(_SENTENCE, model.shape.max_tokens)
    else:
        longest = min(_WINDOW, model.shape.max_positions, context or _WINDOW)
    tokens, begin = encode_text(text, model.files.transformer / "tokenizer.json")
    sizes = sum(math.prod(checkpoint.rows(name).shape) for name in checkpoint.names)
    most = max(LEAST_TOKENS, min(MOST_TOKENS, _MOST_PRODUCTS // max(1, sizes)))
    windows = _windows(tokens[:-MAX_TEXT_TOKENS][:most], begin, longest)
    if windows.size < LEAST_TOKENS:
        return RoundedByText(
            {},
            f"{alone}: {text.name} has {len(tokens):,} tokens, and the last {MAX_TEXT_TOKENS:,} measure; "
            f"{MAX_TEXT_TOKENS + MOST_TOKENS:,} are enough",
        )
    if encodes:
        module = model_registry.make_encoder(model.config, out_in=model.files.out_in)
    else:
        module = model_registry.make_decoder(model.config, context, out_in=model.files.out_in)
    exact = parametrized(module)

    def function(weights: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
        bound = exact.bind(weights)
        start = jax.numpy.zeros(len(tokens), np.int32)
        if encodes:
            return bound(tokens, start + tokens.shape[1])
        cache = bound.make_cache(*tokens.shape, "float32")
        return bound(tokens, start, start + tokens.shape[1], cache, every=True)[0]

    found = {name: earlier[name] for name in wanted if name in earlier}
    if len(found) < len(wanted):
        rounder = _Rounder(wanted, None if encodes else model.shape.vocab_size, found)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            traced = jax.make_jaxpr(function)(dict(exact.weights), windows)
            weights = [Weight(checkpoint.rows(name), name) for name in sorted(exact.weights)]
            rounder.read(traced, [*weights, windows])
    missing = sorted(wanted.keys() - found.keys())
    line = (
        f"int4: rounded {_matrices(len(found))} by the first {windows.size:,} tokens of {text.name}"
    )
    if missing:
        line += f", {len(missing):,} by their weights alone: {few(missing)}"
    return RoundedByText(found, line)


def _matrices(count: int) -> str:
    return f"{count:,} {'matrix' if count == 1 else 'matrices'}"


def _windows(tokens: Values, begin: Values, longest: int) -> Values:
    """Return texts of the same length, int32 [B, T], each of which begins as a text does."""
    begin = begin[: longest // 2]
    step = max(1, min(longest - begin.size, tokens.size))
    count = tokens.size // step
    rows = tokens[: count * step].reshape(count, step)
    return np.concatenate([np.tile(begin, (count, 1)), rows], axis=1).astype(np.int32)


class _HeadReached(Exception):  # noqa: N818
    """The head is the last product, and the largest result."""


@dataclass
class _Rounder:
    """Evaluates a decoder, and rounds each matrix where it is multiplied with.

    Attributes:
        wanted: the groups of each matrix by name.
        vocab_size: the number of outputs of the head; None: there is none.
        found: words and scales by name.
    """

    wanted: Mapping[str, Groups]
    vocab_size: int | None
    found: dict[str, tuple[Values, Values]] = field(default_factory=dict)
    _last: tuple[Any, Inputs | None] = (None, None)
    _experts: dict[str, _Experts] = field(default_factory=dict)

    def read(self, closed: ClosedJaxpr, arguments: Sequence[Any]) -> None:
        """Evaluate a decoder up to its head."""
        try:
            narrow_matrices.evaluate(closed, arguments, self._apply)
        except _HeadReached:
            return

    def _apply(self, equation: Any, given: list[Any]) -> Sequence[Any]:
        """Return the results of one operation."""
        kind = equation.primitive.name
        if not any(isinstance(each, Weight) for each in given):
            return model_comparison.apply(equation, given)
        if kind in INLINED:
            return narrow_matrices.evaluate(called(equation), given, self._apply)
        if kind == "while":
            return self._looped(equation, given)
        if kind == "dynamic_slice" and (one := self._expert(equation, *given)) is not None:
            return [one]
        if kind == "squeeze" and isinstance(given[0].rows, _Expert):
            return given
        if kind == "dot_general":
            self._multiplied(equation, *given)
        return model_comparison.apply(equation, given)

    def _looped(self, equation: Any, given: list[Any]) -> Sequence[Any]:
        """Return the results of a loop over experts."""
        of_condition, of_body = (equation.params[f"{each}_nconsts"] for each in ("cond", "body"))
        constants = given[of_condition : of_condition + of_body]
        carry = given[of_condition + of_body :]

        def goes_on() -> bool:
            condition = [*given[:of_condition], *carry]
            [found] = narrow_matrices.evaluate(
                equation.params["cond_jaxpr"], condition, self._apply
            )
            return bool(found)

        while goes_on():
            body = equation.params["body_jaxpr"]
            carry = narrow_matrices.evaluate(body, [*constants, *carry], self._apply)
        for name, experts in self._experts.items():
            self.found[name] = experts.rounded()
        self._experts.clear()
        return carry

    def _expert(self, equation: Any, weight: Any, *start: Any) -> Weight | None:
        """Return the matrix of an expert; None: something else is sliced."""
        shape = equation.invars[0].aval.shape
        if len(shape) != 3 or equation.params["slice_sizes"] != (1, *shape[1:]):
            return None
        name = weight.name
        if name not in self.wanted or name in self.found:
            return None
        experts = self._experts.setdefault(name, _Experts(name, weight.rows))
        return Weight(experts.expert(min(max(int(start[0]), 0), shape[0] - 1)), name)

    def _multiplied(self, equation: Any, x: Any, weight: Any) -> None:
        """Round a matrix that x is multiplied with."""
        (of_x, of_matrix), batches = equation.params["dimension_numbers"]
        shape = equation.invars[1].aval.shape
        if isinstance(x, Weight) or len(shape) != 2 or any(batches) or of_x != (x.ndim - 1,):
            return
        if isinstance(weight.rows, _Expert):
            self._experts[weight.name].add(np.asarray(x))
        elif weight.name not in self.wanted:
            if shape[1 - of_matrix[0]] == self.vocab_size:
                raise _HeadReached
        elif weight.name not in self.found:
            if self._last[0] is not x:
                rows = np.asarray(x).reshape(-1, x.shape[-1])
                self._last = x, int4_rounding.inputs_of(int4_rounding.squares(rows), len(rows))
            matrix, (_, inputs) = weight.rows[0 : shape[0]], self._last
            if inputs is not None:
                matrix, groups = matrix if of_matrix == (1,) else matrix.T, self.wanted[weight.name]
                found = int4_rounding.quantized_for(matrix, inputs, weight.name, groups)
                self.found[weight.name] = found


@dataclass(frozen=True)
class _Expert:
    """The matrix of an expert, [out, in]."""

    matrix: Values

    @property
    def shape(self) -> tuple[int, ...]:
        """See Rows."""
        return self.matrix.shape

    def __getitem__(self, part: slice) -> Values:
        """See Rows."""
        return self.matrix[part]


@dataclass
class _Experts:
    """The matrices of experts, which are read one after the other: [E, out, in]."""

    name: str
    rows: Rows
    _place: int = -1
    _matrix: _Expert | None = None
    _products: Values | None = None
    _count: int = 0
    _found: dict[int, tuple[Values, Values]] = field(default_factory=dict)

    def expert(self, place: int) -> _Expert:
        """Return the matrix of an expert, for the product that follows."""
        if place != self._place or self._matrix is None:
            self._end()
            self._place, self._matrix = place, _Expert(self.rows[place : place + 1][0])
        return self._matrix

    def add(self, x: Values) -> None:
        """Add inputs of the last expert, float32 [R, in]; rows of zeros fill up a block."""
        rows = x[x.any(axis=-1)]
        if len(rows):
            products = int4_rounding.squares(rows)
            self._products = products if self._products is None else self._products + products
            self._count += len(rows)

    def _end(self) -> None:
        if self._matrix is not None and self._products is not None and self._count >= _LEAST_ROWS:
            inputs = int4_rounding.inputs_of(self._products, self._count)
            if inputs is not None and self._place not in self._found:
                self._found[self._place] = int4_rounding.quantized_for(
                    self._matrix.matrix, inputs, self.name, GROUPS_OF_32
                )
        self._matrix, self._products, self._count = None, None, 0

    def rounded(self) -> tuple[Values, Values]:
        """Return words and scales of all experts; those that no text reached are rounded alone."""
        self._end()
        each = [
            self._found.get(place)
            or int4_rounding.quantized(self.rows[place : place + 1][0], 1, self.name)
            for place in range(self.rows.shape[0])
        ]
        return np.stack([words for words, _ in each]), np.stack([scales for _, scales in each])
