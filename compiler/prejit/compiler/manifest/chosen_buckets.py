"""Choose the buckets of a decoder or an encoder that pad a recorded load least, for a budget of programs.

The sizes of one axis are exact for their number. The budget is split over the axes by trying every split. For
a decoder, the axes are weighed alike: the product of what each computes beyond what was needed is the least.
For an encoder, the lengths are exact for the batches and the batches for the lengths; they take turns until
neither changes, which need not end at the best pair.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path

import numpy as np

from prejit.compiler.manifest.manifest import Encode, Generate
from prejit.compiler.manifest.request_log import LoggedEncoding, LoggedGeneration, LoggedRequests
from prejit.compiler.manifest.specs import ENCODER_KINDS, ProgramSpec, decoder_specs
from prejit.runtime.base.files import store_errors
from prejit.runtime.errors import UsageError

MAX_CANDIDATES = 256
"""The multiple that candidates are rounded to doubles until there are at most this many."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one axis, and what they cost.

    Attributes:
        chosen: the sizes, ascending.
        padding: sum of what is computed beyond the values, each times its weight.
    """

    chosen: tuple[int, ...]
    padding: float


def padded(value: int, sizes: Sequence[int]) -> int:
    """Return what is computed for a value: the smallest size that holds it.

    A value beyond the largest size takes that one as often as it is full, and a size for the rest.
    """
    full, rest = divmod(value, sizes[-1]) if value > sizes[-1] else (0, value)
    return full * sizes[-1] + (sizes[bisect_left(sizes, rest)] if rest else 0)


def folded(weights: Mapping[int, float], largest: int) -> dict[int, float]:
    """Return the values with what exceeds the largest size taken off, so that each is one size or less."""
    found: Counter[int] = Counter()
    for value, weight in weights.items():
        rest = value % largest if value > largest else value
        if rest:
            found[rest] += weight  # type: ignore[assignment]
    return dict(found)


def candidates(values: Collection[int], multiple: int, kept: Collection[int] = ()) -> list[int]:
    """Return the sizes to choose from: each value rounded up, and the sizes that must be chosen.

    No other multiple can be better: a size between two of these could shrink to the lower one.
    """
    while True:
        found = {_rounded(value, multiple) for value in values} | {*kept}
        if kept:
            found = {size for size in found if size <= max(kept)}
        if len(found) <= MAX_CANDIDATES:
            return sorted(found)
        multiple *= 2


def best_sizes(
    weights: Mapping[int, float], among: Sequence[int], most: int, kept: Collection[int]
) -> dict[int, Sizes]:
    """Return, for each number of sizes up to `most`, those that pad the values least.

    A value takes the smallest size that holds it. The state of the dynamic programme is (number of sizes,
    largest of them), and a step adds the next larger size: O(most x candidates^2), exact.

    Args:
        weights: the weight of each value, a positive integer.
        among: the sizes to choose from, ascending. The last one holds all values and is always chosen.
        most: the largest number of sizes.
        kept: sizes of `among` that must be chosen.

    Returns:
        The sizes by their number. Numbers that cannot hold all of `kept` are left out.
    """
    values = np.array(sorted(weights), np.int64)
    weight = np.array([weights[value] for value in values.tolist()], np.float64)
    sizes = np.array(among, np.int64)
    assert not len(values) or values[-1] <= sizes[-1]
    below = np.searchsorted(values, sizes, side="right")  # how many values each size holds
    count = np.concatenate([[0.0], np.cumsum(weight)])[below]
    total = np.concatenate([[0.0], np.cumsum(weight * values)])[below]
    # cost[i, j]: padding of the values above size i - 1 that size j holds; row 0: there is no smaller size.
    count_before, total_before = np.concatenate([[0.0], count]), np.concatenate([[0.0], total])
    cost = sizes * (count - count_before[:, None]) - (total - total_before[:, None])
    places = np.arange(len(sizes))
    cost[places[None, :] < np.arange(len(sizes) + 1)[:, None]] = np.inf
    for place in (among.index(size) for size in kept):
        cost[: place + 1, place + 1 :] = np.inf  # a step must not leave it out
    best, steps, found = cost[0], list[np.ndarray[tuple[int], np.dtype[np.int64]]](), {}
    for number in range(1, min(most, len(sizes)) + 1):
        if number > 1:
            through = best[:, None] + cost[1:]
            steps.append(through.argmin(axis=0))
            best = through.min(axis=0)
        if np.isfinite(best[-1]):
            chosen = [len(sizes) - 1]
            for step in reversed(steps):
                chosen.append(int(step[chosen[-1]]))
            found[number] = Sizes(
                tuple(int(sizes[place]) for place in reversed(chosen)), max(0.0, float(best[-1]))
            )
    return found


MOST_SIZES = 16
"""The largest number of sizes of one axis."""

PROMPT_MULTIPLE, CONTEXT_MULTIPLE, LENGTH_MULTIPLE = 8, 16, 8
"""Sizes in tokens are multiples of these, so that rows of arrays begin at addresses that fast loops want."""


@dataclass(frozen=True, slots=True)
class SizeAxis:
    """The positions that the sizes of one axis compute for a load.

    Attributes:
        name: `prompt`, `context`, `batch`, or `shapes`.
        what: what is counted, in the plural.
        needed: the load itself.
        computed: the load with its padding.
    """

    name: str
    what: str
    needed: float
    computed: float

    @property
    def padding(self) -> float:
        """The share of what is computed that is padding, 0 to 1."""
        return 1 - self.needed / self.computed if self.computed else 0.0


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets, and what a load costs with them.

    Attributes:
        table: the section of the manifest.
        axes: what each axis computes. An axis that the log says nothing about is left out.
        programs: number of programs for each target.
        beyond: requests that are longer than the largest size.
    """

    table: Generate | Encode
    axes: tuple[SizeAxis, ...]
    programs: int
    beyond: int = 0


def decoder_buckets(log: LoggedRequests, table: Generate) -> Buckets:
    """Return what a decoder's buckets cost for a load."""
    axes = []
    for name, what, weights in _axes(log):
        sizes: Sequence[int] = getattr(table, name)
        held = weights if name == "prompt" else _clipped(weights, sizes[-1])
        axes.append(_axis(name, what, held, sizes))
    beyond = sum(n for each, n in log.generations.items() if each.length > table.context[-1])
    return Buckets(table, tuple(axes), _count(table), beyond)


def suggest_decoder(
    log: LoggedRequests, budget: int, today: Generate | None = None, *, batch_multiple: int = 1
) -> Buckets:
    """Return the buckets that pad a decoder's load least.

    Args:
        log: the load.
        budget: the largest number of programs for each target.
        today: the buckets of today. Their largest sizes stay, so that nothing is refused that was served,
            and so does the smallest batch, in which a single prompt is computed. None: the largest sizes are
            those of the load.
        batch_multiple: what batches are multiples of: the devices that a mesh splits them over.

    Raises:
        UsageError: the budget is too small for one size on each axis.
    """
    given = {name: weights for name, _, weights in _axes(log)}
    prompts, contexts = given["prompt"], given["context"]
    largest_context = _rounded(max(contexts), CONTEXT_MULTIPLE)
    largest_prompt = _rounded(max(prompts, default=1), PROMPT_MULTIPLE)
    if today is not None:
        largest_context, largest_prompt = today.context[-1], today.prompt[-1]
    by_axis = {
        "prompt": _solved(folded(prompts, largest_prompt), PROMPT_MULTIPLE, {largest_prompt}),
        "context": _solved(contexts, CONTEXT_MULTIPLE, {largest_context}),
    }
    if "batch" in given:
        batches = given["batch"]
        ends = {batch_multiple, _rounded(max(batches), batch_multiple)}
        if today is not None:
            ends = {today.batch[0], today.batch[-1]}
        by_axis["batch"] = _solved(batches, batch_multiple, ends)
    else:
        batch = (batch_multiple,) if today is None else today.batch
        by_axis["batch"] = [Sizes(batch, 0.0)]
    needed = {name: _needed(weights) for name, weights in given.items()}
    base = today or Generate(batch=(1,), prompt=(1,), context=(1,))
    found: tuple[float, int, Generate] | None = None
    for prompt, context, rows in product(by_axis["prompt"], by_axis["context"], by_axis["batch"]):
        if len(context.chosen) * len(rows.chosen) * 2 > budget:
            continue  # each has a decode and a copy at least
        fits = prompt.chosen[0] <= context.chosen[0] and prompt.chosen[-1] <= context.chosen[-1]
        if not fits or context.chosen[0] <= base.draft_tokens:
            continue
        table = replace(base, batch=rows.chosen, prompt=prompt.chosen, context=context.chosen)
        programs = _count(table, budget + 1)
        if programs > budget:
            continue
        over = math.prod(
            1 + one.padding / needed[name]
            for name, one in (("prompt", prompt), ("context", context), ("batch", rows))
            if needed.get(name)
        )
        if found is None or (over, programs) < found[:2]:
            found = over, programs, table
    if found is None:
        raise UsageError(
            f"expected a budget for one size of each axis, found {budget} programs",
            hint="give more: --programs N",
        )
    return decoder_buckets(log, found[2])


def encoder_buckets(log: LoggedRequests, table: Encode) -> Buckets:
    """Return what an encoder's buckets cost for a load: each request in as few runs as possible.

    Raises:
        UsageError: the encoder packs sentences.
    """
    if table.packed:
        raise UsageError(
            "encode.packed: expected none, because packed batches fit every load as they are",
            hint="leave packed out to find shapes",
        )
    needed = computed = 0.0
    longest = max(length for _, length in table.shapes)
    beyond = 0
    for each, count in log.encodings.items():
        beyond += count if each.length > longest else 0
        length = min(each.length, longest)
        fitting = [shape for shape in table.shapes if shape[1] >= length]
        most = max(batch for batch, _ in fitting)
        full, rest = divmod(each.batch, most)
        computed += count * full * min(b * t for b, t in fitting if b == most)
        if rest:
            computed += count * min(b * t for b, t in fitting if b >= rest)
        needed += count * each.batch * length
    axes = (SizeAxis("shapes", "tokens", needed, computed),)
    return Buckets(table, axes, len(ENCODER_KINDS) * len(table.shapes), beyond)


def suggest_encoder(log: LoggedRequests, budget: int, today: Encode | None = None) -> Buckets:
    """Return the buckets that pad an encoder's load least: each batch with each length.

    Args:
        log: the load.
        budget: the largest number of programs for each target; a bucket has three.
        today: the buckets of today. Their longest length and largest batch stay. None: those of the load.

    Raises:
        UsageError: the budget is too small for one bucket.
    """
    longest = _rounded(max(each.length for each in log.encodings), LENGTH_MULTIPLE)
    most = max(each.batch for each in log.encodings)
    if today is not None:
        longest = max(length for _, length in today.shapes)
        most = max(batch for batch, _ in today.shapes)
    room = budget // len(ENCODER_KINDS)
    if not room:
        raise UsageError(
            f"expected at least {len(ENCODER_KINDS)} programs, which one bucket has, found {budget}",
            hint="give more: --programs N",
        )
    found: Buckets | None = None
    for number in range(1, min(MOST_SIZES, room) + 1):
        for batches, lengths in _taking_turns(
            log.encodings, longest, most, number, min(MOST_SIZES, room // number)
        ):
            one = encoder_buckets(log, Encode(tuple(product(batches, lengths))))
            cost = (one.axes[0].computed, one.programs)
            if found is None or cost < (found.axes[0].computed, found.programs):
                found = one
    assert found is not None
    return found


def _taking_turns(
    encodings: Mapping[LoggedEncoding, int],
    longest: int,
    most: int,
    batch_count: int,
    length_count: int,
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield batches and lengths, each exact for the other, until neither changes."""
    batches: tuple[int, ...] = (most,)
    lengths: tuple[int, ...] = (longest,)
    for _ in range(MOST_SIZES):
        before = batches, lengths
        by_rows: Counter[int] = Counter()
        by_length: Counter[int] = Counter()
        for each, count in encodings.items():
            by_rows[each.batch] += count * padded(min(each.length, longest), lengths)
        batches = _solved(folded(by_rows, most), 1, {most}, batch_count)[-1].chosen
        for each, count in encodings.items():
            by_length[min(each.length, longest)] += count * padded(each.batch, batches)
        lengths = _solved(by_length, LENGTH_MULTIPLE, {longest}, length_count)[-1].chosen
        yield batches, lengths
        if before == (batches, lengths):
            return


def _axes(log: LoggedRequests) -> Iterator[tuple[str, str, dict[int, float]]]:
    """Yield the name of each axis of a decoder, what it counts, and the weight of each value in a log."""
    prompts: Counter[int] = Counter()
    for each, count in log.generations.items():
        if each.prompt_tokens:
            prompts[each.prompt_tokens] += count
    yield "prompt", "tokens of prompts", dict(prompts)
    yield "context", "cache positions that decode steps read", _steps(log.generations)
    if log.seconds_at:
        yield "batch", "rows of decode steps", dict(log.seconds_at)
        return
    rows: dict[int, float] = {}
    for each, count in log.generations.items():
        if each.batch is None:
            return
        # A step of a batch counts once, and each of its requests is a line of the log.
        weight = count * max(each.new_tokens, 1) / each.batch
        rows[each.batch] = rows.get(each.batch, 0.0) + weight
    yield "batch", "rows of decode steps", rows


def _steps(generations: Mapping[LoggedGeneration, int]) -> dict[int, float]:
    """Return how many decode steps run at each length of a text. A request without any counts as one."""
    longest = max(max(each.length, 1) for each in generations)
    changes = np.zeros(longest + 2, np.int64)
    for each, count in generations.items():
        first = min(each.length - each.new_tokens + 1, max(each.length, 1))
        changes[first] += count
        changes[max(each.length, 1) + 1] -= count
    steps = np.cumsum(changes)
    return {int(length): float(steps[length]) for length in np.flatnonzero(steps)}


def _axis(name: str, what: str, weights: Mapping[int, float], sizes: Sequence[int]) -> SizeAxis:
    computed = sum(padded(value, sizes) * weight for value, weight in weights.items())
    return SizeAxis(name, what, _needed(weights), computed)


def _needed(weights: Mapping[int, float]) -> float:
    return sum(value * weight for value, weight in weights.items())


def _clipped(weights: Mapping[int, float], largest: int) -> dict[int, float]:
    """Return the values with those beyond the largest size as that one: they wait, or are refused."""
    found: Counter[int] = Counter()
    for value, weight in weights.items():
        found[min(value, largest)] += weight  # type: ignore[assignment]
    return dict(found)


def _solved(
    weights: Mapping[int, float], multiple: int, kept: set[int], most: int = MOST_SIZES
) -> list[Sizes]:
    """Return the best sizes of an axis for each number of them; `kept` has the largest one."""
    weights = _clipped(weights, max(kept))
    among = candidates(weights, multiple, kept)
    return [*best_sizes(weights, among, max(most, len(kept)), kept).values()]


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _count(table: Generate, most: int | None = None) -> int:
    """Return the number of a decoder's programs, counted up to a limit."""
    return sum(1 for _ in islice(decoder_specs(table), most))


@dataclass(frozen=True, slots=True)
class CompileSeconds:
    """The seconds that compiling a program took, as the mean of each kind."""

    by_kind: dict[str, float]
    mean: float

    def of(self, specs: Iterable[ProgramSpec]) -> float:
        """Return the estimate for programs, one after the other."""
        return sum(self.by_kind.get(spec.kind, self.mean) for spec in specs)


def read_seconds(path: Path) -> CompileSeconds:
    """Read the compile times in the report of a build.

    Raises:
        StoreError: the file cannot be read.
        UsageError: it is no report, or has no programs.
    """
    try:
        with store_errors(path, "read"):
            report = json.loads(path.read_bytes())
        rows = [(one["kind"], float(one["compile_seconds"])) for one in report["programs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: expected the report of a build, found something else",
            hint="`prejit build` writes it beside the bundle: NAME.report.json",
        ) from error
    if not rows:
        raise UsageError(f"{path}: expected programs, found none")
    kinds: dict[str, list[float]] = {}
    for kind, seconds in rows:
        kinds.setdefault(kind, []).append(seconds)
    means = {kind: sum(each) / len(each) for kind, each in kinds.items()}
    return CompileSeconds(means, sum(seconds for _, seconds in rows) / len(rows))
