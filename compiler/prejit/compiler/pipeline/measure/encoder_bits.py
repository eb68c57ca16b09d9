"""Choose the dtype of each matrix of an encoder: as few bits as its embeddings bear.

All layers run one program, so a matrix has one dtype in all of them: that of its *place*. The float32 encoder
and ones with stored matrices read the same sentences. Each place is stored alone first, which says what it
costs; costs add up, as errors of different matrices have nothing to do with each other. From all in the least
bits, the place that gains most for a bit gets more, until an encoder with all of them keeps the cosine. The
last dtype of a place costs nothing: bfloat16, or float32 where bfloat16 costs a sentence more than a little.

Numbers are rounded before they are compared, so that the last bits of a sum, which differ between machines,
choose nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prejit.compiler.base.stored_dtypes import STORED_DTYPES
from prejit.compiler.checkpoint.checkpoint import Checkpoint
from prejit.compiler.models import model_registry, published_integers, quantizing
from prejit.compiler.models.parameters import parametrized
from prejit.compiler.pipeline.measure import model_comparison
from prejit.compiler.pipeline.measure.model_comparison import ComparedModel
from prejit.compiler.pipeline.model import ModelSource

Values = np.ndarray[Any, Any]

MOST_COST = 5e-4
"""Largest 1 - cosine of a sentence that decides: others lose up to twice as much, and shall keep 0.999."""
MOST_UNTRIED_COST = 25e-5
"""The same with int4 where random tokens decide: texts, which trained models know, lose twice as much."""
_LITTLE_COST = 5e-5
"""Largest cost of a sentence where bfloat16 is enough: twice that of random weights of MiniLM's sizes."""
_SENTENCES, _TOKENS = 256, 32
"""Largest number of sentences, and of tokens of each, that decide: few sentences lose much more than most."""
_LEAST_SENTENCES = 8
"""Smallest number of sentences that a large encoder reads."""
_MOST_PRODUCTS = 1 << 36
"""Largest number of parameters times tokens of an encoder: a second or two on two cores."""
_DIGITS = 2
"""Significant digits of a cost."""
_WIDER = tuple(STORED_DTYPES)[::-1]
"""The dtypes that a matrix may have, from the fewest bits: from the one that it has without a choice."""


@dataclass(frozen=True)
class MatrixPlace:
    """The matrices of one place in all layers.

    Attributes:
        values: number of their values.
        dtypes: the dtypes that they may have, from the fewest bits.
    """

    values: int
    dtypes: tuple[str, ...]


Costs = Callable[[Mapping[str, str]], Values]
"""Returns 1 - cosine of each sentence where these places have these dtypes, and all others float32."""


def choose_for(
    model: ModelSource,
    checkpoint: Checkpoint,
    text: Path | None,
    words: dict[str, tuple[Values, Values]],
) -> dict[str, str]:
    """Return the dtypes of an encoder's matrices that differ from those of its module, by place.

    `text` is `model.evaluation`; `words` are matrices that it rounded to int4, to which others are added.
    """
    sizes, most = (model.shape.vocab_size, model.shape.max_tokens), MOST_COST
    if text is None:
        sentences, most = random_sentences(*sizes), MOST_UNTRIED_COST
    else:
        tokenizer = model.files.transformer / "tokenizer.json"
        sentences = model_comparison.read_sentences(text, tokenizer, sizes[1], deciding=True)
    trials = Trials(model, checkpoint, *sentences, words)
    places = trials.places()
    chosen = choose(places, trials.cost_of, most)
    own = {
        quantizing.place_of(name): dtype
        for name, dtype in quantizing.stored_dtypes(model.module).items()
    }
    return {place: dtype for place, dtype in chosen.items() if own[place] != dtype}


def choose(
    places: Mapping[str, MatrixPlace], cost_of: Costs, most_in_int4: float = MOST_COST
) -> dict[str, str]:
    """Return the dtype of each place: the one of the fewest bits, or more where a sentence loses too much.

    `most_in_int4` is the largest cost of a sentence while a matrix is int4; MOST_COST is that without.
    """

    def is_kept(cost: Values) -> bool:
        most = most_in_int4 if "int4" in taken.values() else MOST_COST
        return round(float(cost.max()), 5) <= most

    taken = {name: place.dtypes[0] for name, place in places.items()}
    if is_kept(cost_of(taken)):
        return taken
    narrow = {
        name: replace(place, dtypes=tuple(each for each in place.dtypes if each != "float32"))
        for name, place in places.items()
    }
    if cost_of({name: place.dtypes[-1] for name, place in narrow.items()}).max() <= _LITTLE_COST:
        places = narrow
    alone = {
        (name, dtype): _rounded(cost_of({name: dtype}))
        for name, place in sorted(places.items())
        for dtype in place.dtypes[:-1]
    }

    def cost(name: str, dtype: str) -> Values | float:
        return alone.get((name, dtype), 0.0)

    while True:
        total = np.zeros(1)
        for each in sorted(taken.items()):
            total = total + cost(*each)
        if is_kept(total) and is_kept(cost_of(taken)):
            return taken
        steps = []
        for name, place in sorted(places.items()):
            if (dtype := taken[name]) == place.dtypes[-1]:
                continue
            more = place.dtypes[place.dtypes.index(dtype) + 1]
            added = place.values * (STORED_DTYPES[more].bits - STORED_DTYPES[dtype].bits)
            gain = float(np.mean(cost(name, dtype)) - np.mean(cost(name, more)))
            steps.append((_rounded(gain / added), name, more))
        if not steps:
            return taken
        _, name, more = max(steps)
        taken[name] = more


def random_sentences(vocab_size: int, max_tokens: int) -> tuple[Values, Values]:
    """Return random tokens, the same each time, as `read_sentences` does.

    Every second sentence has 1 to 4 tokens: such lose most.
    """
    random = np.random.default_rng(1)
    count = min(max_tokens, _TOKENS)
    tokens = random.integers(0, vocab_size, (_SENTENCES, count), np.int32)
    length = random.integers(1, count + 1, _SENTENCES, np.int32)
    length[::2] = np.minimum(1 + np.arange(_SENTENCES // 2) % 4, count)
    return tokens, length


def _rounded(values: Any) -> Any:
    """Return values with _DIGITS significant digits."""
    exponent = np.floor(np.log10(np.maximum(np.abs(values), 1e-30)))
    unit = 10.0 ** (exponent - _DIGITS + 1)
    return np.round(values / unit) * unit


@dataclass
class Trials:
    """An encoder whose matrices are stored in dtypes that are tried: `cost_of` is as `Costs`.

    Attributes:
        tokens, length: the sentences, as `read_sentences` returns them.
        words: words and scales of int4, by name: those that are known, and then all that were tried.
    """

    model: ModelSource
    checkpoint: Checkpoint
    tokens: Values
    length: Values
    words: dict[str, tuple[Values, Values]] = field(default_factory=dict)
    _exact: Values | None = None

    def __post_init__(self) -> None:
        sizes = sum(math.prod(self.checkpoint.rows(n).shape) for n in self.checkpoint.names)
        tokens = self.tokens[-_SENTENCES:, :_TOKENS]
        rows = max(_LEAST_SENTENCES, _MOST_PRODUCTS // max(1, sizes * tokens.shape[1]))
        self.tokens = tokens[-rows:]
        self.length = np.minimum(self.length[-len(self.tokens) :], tokens.shape[1])

    def places(self) -> dict[str, MatrixPlace]:
        """Return the places of matrices that were not published in few bits."""
        module, heads = self.model.module, getattr(self.model.module, "heads", ())
        found: dict[str, MatrixPlace] = {}
        for name, dtype in quantizing.stored_dtypes(module).items():
            rows, place = self.checkpoint.rows(name), quantizing.place_of(name)
            if published_integers.has_few_bits(rows):
                found[place] = MatrixPlace(0, ())
            if place in found and not found[place].dtypes:
                continue
            # Heads of tokens give what no embedding shows.
            unseen = any(name.startswith(f"{head}.") for _, head in heads)
            dtypes = ("int8",) if unseen else _WIDER[_WIDER.index(dtype) :]
            values = math.prod(rows.shape) + (found[place].values if place in found else 0)
            found[place] = MatrixPlace(values, dtypes)
        return {name: place for name, place in found.items() if place.dtypes}

    def cost_of(self, dtypes: Mapping[str, str]) -> Values:
        """Return 1 - cosine of each sentence."""
        if self._exact is None:
            self._exact = self._vectors({}, imitates=False)
        found = self._vectors(dtypes, imitates=self.model.files.out_in)
        # What is not finite costs all.
        cosines = model_comparison.cosines(self._exact, found)
        return np.nan_to_num(1 - cosines, nan=2.0, posinf=2.0)

    def _vectors(self, dtypes: Mapping[str, str], *, imitates: bool) -> Values:
        """Return embeddings float64 [B, D]; scores as one vector."""
        files = self.model.files
        make = partial(model_registry.make_encoder, self.model.config, out_in=files.out_in)
        exact, stored = make(), make(groups=files.groups, chosen=dtypes)
        if imitates:
            quantizing.imitate(exact, stored)
        readers = quantizing.readers(stored, self.checkpoint.rows, words=self.words)
        packed = {name: read() for name, read in readers.items()}
        for name, dtype in quantizing.stored_dtypes(stored).items():
            if dtype == "int4":
                self.words[name] = packed[name], packed[f"{name}_scale"]
        weights = {name: self.checkpoint.rows(name) for name in self.checkpoint.names}
        weights |= quantizing.widened(stored, packed)
        compared = ComparedModel(parametrized(exact), weights)
        vectors = model_comparison.vectors(compared, self.tokens, self.length)()
        found = vectors.astype(np.float64)
        return found if self.model.shape.scores is None else found.reshape(1, -1)
