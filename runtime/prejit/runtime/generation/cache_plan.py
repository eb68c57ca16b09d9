"""The memory that executables, adapters and a decoder's caches take at most, from a program table alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import Config, Decoder
from prejit.runtime.format.checks.adapter_stacks import stack_pairs
from prejit.runtime.format.checks.program_interfaces import cache_arrays
from prejit.runtime.format.names import DRAFT
from prejit.runtime.generation.kv_cache import beside_bytes, cache_bytes

CODE_TIMES = 25
"""How many times its size a loaded executable takes on a CPU, where XLA keeps what it made the code from: 21
to 22 on average for the demo and for GPT-2. A plan takes more, because it says what programs need at most."""


@dataclass(frozen=True, slots=True)
class TableBuckets:
    """The sizes of a decoder's caches, as a program table has them.

    Attributes:
        decoder: the bundle's description of the model.
        batches, contexts: of the buckets, ascending.
        cache: the arrays of a cache, at one row and one position.
        draft: the sizes of the draft model's caches; None: there is none.
    """

    decoder: Decoder
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    cache: tuple[Array, ...]
    draft: TableBuckets | None = None

    @classmethod
    def of(cls, config: Config, decoder: Decoder, beginning: str = "") -> TableBuckets:
        """Return those of a checked table and its decoder, whose programs' kinds begin so."""
        kind = f"{beginning}decode"
        buckets = [program.bucket for program in config.programs if program.kind == kind]
        batches, contexts = ({bucket[name] for bucket in buckets} for name in ("batch", "context"))
        draft = None
        if config.draft is not None and not beginning:
            draft = cls.of(config, config.draft, DRAFT)
        sizes = tuple(sorted(batches)), tuple(sorted(contexts))
        return cls(decoder, *sizes, cache_arrays(decoder), draft)


def executables_bytes(config: Config) -> int:
    """Return about how much all executables of a target take when they are loaded."""
    size = sum(program.executable.raw_size for program in config.programs)
    return size * CODE_TIMES if config.requirement.platform == "cpu" else size


def stacks_bytes(decoder: Decoder | None) -> int:
    """Return how much the stacks of adapters take once each slot has had one."""
    pairs = () if decoder is None else stack_pairs(decoder)
    return sum(4 * math.prod(each.shape) for pair in pairs for each in (pair.down, pair.up))


def peak_bytes(buckets: TableBuckets, batch: int, context: int, together: int) -> int:
    """Return the most that the caches of an engine take at a time, without those of earlier prompts.

    Args:
        buckets: the sizes that there are.
        batch: the largest batch that the engine uses.
        context: the longest context that it uses.
        together: the largest batch in which prompts are computed together before they are copied.
    """

    def of(rows: int, length: int) -> int:
        return cache_bytes(buckets.cache, rows, length)

    # A cache and the one that it is copied into are there at the same time. Beside both are the prompts that
    # are computed, one more prompt that is not finished, and the prefix that is copied for one of them.
    before = [
        of(b, c)
        for b in buckets.batches
        for c in buckets.contexts
        if (b < batch and c == context) or (b == batch and c < context)
    ]
    aside = of(together, context) + 2 * of(buckets.batches[0], context)
    beside = beside_bytes(buckets.decoder, batch)
    draft = buckets.draft
    if draft is not None:  # one cache of its smallest batch, which grows likewise
        beside += beside_bytes(draft.decoder, draft.batches[0])
        longest = sorted(each for each in draft.contexts if each <= context)[-2:]
        beside += sum(cache_bytes(draft.cache, draft.batches[0], each) for each in longest)
    return of(batch, context) + max(before, default=0) + aside + beside
