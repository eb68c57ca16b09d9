"""The checks of a release that was run beside the one before: what differs in answers and times.

Single times on a machine with other work scatter by far more than what is looked for. So the two sides take
turns, a request at a time, and what counts is the ratio of each pair. A process has a speed of its own, by
where its memory lies, so pairs come in groups: one for each pair of processes. The interval is a bootstrap of
groups and of pairs within them (Davison and Hinkley, Bootstrap Methods and their Application, 3.8).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from prejit.runtime.format.release_limits import ReleaseLimits
from prejit.server.releases.release_contents import ReleaseCheck, judged
from prejit.server.telemetry.requestlog import RecordedCall

Pair = tuple[float, float]
"""The time of the old bundle and of the new one for the same request, one right after the other."""

_RESAMPLES = 2000
_OUTSIDE = 0.005
"""The share of resamples below the interval, and above it: an interval of 99 %."""
_SEED = 20_251_125


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """The ratio of new to old times, and where it lies with a confidence of 99 %. 1.1 is a tenth slower.

    Attributes:
        middle: the estimate: the mean over groups of the median of each.
        low, high: the ends of the interval.
        pairs: the number of pairs behind it.
    """

    middle: float
    low: float
    high: float
    pairs: int

    def described(self) -> str:
        """Return it as a change: `+9.8 % (+8.1 to +11.9)`."""
        middle, low, high = (
            f"{(each - 1) * 100:+.1f}" for each in (self.middle, self.low, self.high)
        )
        return f"{middle} % ({low} to {high})"


def paired_ratio(groups: Sequence[Sequence[Pair]]) -> RatioInterval | None:
    """Return the ratio of pairs in groups; None: there are no pairs.

    The same pairs give the same interval: the bootstrap has a seed.
    """
    logs = [np.log(np.array(group)) for group in groups if group]
    if not logs:
        return None
    ratios = [each[:, 1] - each[:, 0] for each in logs]
    random = np.random.default_rng(_SEED)
    medians = np.stack([_resampled_medians(each, random) for each in ratios], axis=1)
    chosen = random.integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    means = np.take_along_axis(medians, chosen, axis=1).mean(axis=1)
    middle = float(np.mean([np.median(each) for each in ratios]))
    return _interval(middle, means, sum(map(len, ratios)))


def is_slower(ratio: RatioInterval | None, noise: RatioInterval | None, limit: float) -> bool:
    """Return whether a ratio shows that the new side is slower than a limit allows.

    Its estimate must exceed the limit, and its whole interval must lie above what two processes of the same
    bundle show (`noise`). So a machine with other work makes the answer no, and not yes.

    Args:
        ratio: of new to old times; None: nothing was measured.
        noise: of the old bundle beside itself; None: it was not measured. Without it no difference means
            anything, and the answer is no.
        limit: 0.05 for 5 %.
    """
    if ratio is None or noise is None:
        return False
    floor = max(1.0, noise.middle, 1 / noise.middle)
    return ratio.middle > 1 + limit and ratio.low > floor


def is_settled(ratio: RatioInterval | None, limit: float) -> bool:
    """Return whether more pairs would hardly change the answer.

    The interval lies below the limit, or it is narrow beside it.
    """
    if ratio is None:
        return False
    return ratio.high <= 1 + limit or ratio.high - ratio.low < max(limit, 0.01)


def _resampled_medians(
    values: np.ndarray[Any, Any], random: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Return the medians of resamples, float64 [resamples].

    The median of a resample is an order statistic whose place has a beta distribution (Maritz and Jarrett, "A
    Note on Estimating the Variance of the Sample Median", 1978). So no resample is made.
    """
    middle = (len(values) + 1) / 2
    medians: np.ndarray[Any, Any] = np.quantile(values, random.beta(middle, middle, _RESAMPLES))
    return medians


def _interval(middle: float, found: np.ndarray[Any, Any], pairs: int) -> RatioInterval:
    low, high = np.quantile(found, (_OUTSIDE, 1 - _OUTSIDE))
    least, most = min(float(low), middle), max(float(high), middle)
    return RatioInterval(math.exp(middle), math.exp(least), math.exp(most), pairs)


_ROUNDING = 1e-3
"""How much norms may differ, relatively, where the order of sums depends on the bucket."""


@dataclass(frozen=True, slots=True)
class BundleAnswer:
    """The answer of a bundle to a request.

    Attributes:
        status: of the response.
        calls: the calls of engines.
        said: the text in the response; empty: it has none, or it is not compared.
        seconds: time from the request to the end of its response.
        cpu_seconds: CPU time that it took; 0: not known.
    """

    status: int
    calls: tuple[RecordedCall, ...]
    said: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """The difference of two answers.

    Attributes:
        reasons: what was expected and what was found; empty: nothing differs.
        compared: the number of results that were compared: tokens, or arrays of a call as one.
        changed: how many of them differ. All tokens after the first one that differs do.
        rounded: whether arrays differ by rounding alone.
        is_failure: whether the second one has no answer at all.
    """

    reasons: tuple[str, ...]
    compared: int
    changed: int
    rounded: bool = False
    is_failure: bool = False


def difference_of(old: BundleAnswer, new: BundleAnswer) -> AnswerDifference:
    """Return how two answers differ. Calls that gave nothing yet when they were cut are not compared."""
    compared = changed = 0
    rounded = False
    reasons: list[str] = []
    whole = sum(map(_results, old.calls))
    if new.status != 200:
        failed = (f"expected status {old.status}, found {new.status}",)
        return AnswerDifference(failed, whole, whole, is_failure=True)
    if len(new.calls) != len(old.calls):
        counts = (f"expected {len(old.calls)} calls of engines, found {len(new.calls)}",)
        return AnswerDifference(counts, whole, whole)
    for was, now in zip(old.calls, new.calls, strict=True):
        if was.token_ids is None and was.arrays is None:
            continue
        compared += _results(was)
        if was.arrays is not None:
            reason, by_rounding = _array_difference(was.arrays, now.arrays or {})
            rounded = rounded or by_rounding
            changed += bool(reason)
        else:
            reason, count = _token_difference(was, now)
            changed += count
        reasons += [reason] if reason else []
    if not reasons and old.said != new.said:
        reasons.append(
            f"the same tokens as text: expected {old.said[-80:]!r}, found {new.said[-80:]!r}"
        )
        changed = compared
    if not reasons and (reason := _prompt_difference(old.calls, new.calls)):
        reasons.append(reason)
        changed = compared
    return AnswerDifference(tuple(reasons), compared, changed, rounded)


def _results(call: RecordedCall) -> int:
    return 1 if call.arrays is not None else len(call.token_ids or ())


def _token_difference(was: RecordedCall, now: RecordedCall) -> tuple[str, int]:
    """Return how the tokens differ, and how many do. A request that was cut short has the first ones."""
    old, new = was.token_ids or [], now.token_ids or []
    if not was.finish_reason:
        new = new[: len(old)]
    if old == new and was.finish_reason in ("", now.finish_reason):
        return "", 0
    if old == new:
        return f"expected finish_reason {was.finish_reason!r}, found {now.finish_reason!r}", 1
    place = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    if place is None:
        least = min(len(old), len(new))
        return f"expected {len(old)} tokens, found {len(new)}", max(1, len(old) - least)
    return f"token {place}: expected {old[place]}, found {new[place]}", len(old) - place


def _prompt_difference(old: Sequence[RecordedCall], new: Sequence[RecordedCall]) -> str:
    """Return how the length of prompts differs, where both say it: another tokenizer or template."""
    for was, now in zip(old, new, strict=True):
        before, after = (each.stats.get("prompt_tokens") for each in (was, now))
        if before is not None and after is not None and before != after:
            return f"expected a prompt of {before:g} tokens, found {after:g}"
    return ""


def _array_difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, bool]:
    """Return how arrays differ, and whether they differ by rounding at least."""
    if was.keys() != now.keys():
        return f"expected the arrays {', '.join(was)}, found {', '.join(now) or 'none'}", False
    rounded = False
    for name, old in was.items():
        new = now[name]
        if (old["dtype"], old["shape"]) != (new["dtype"], new["shape"]):
            described = (f"{each['dtype']}{each['shape']}" for each in (old, new))
            return "{}: expected {}, found {}".format(name, *described), False
        if old["digest"] == new["digest"]:
            continue
        norms = old.get("norm", math.nan), new.get("norm", math.nan)
        if not math.isclose(*norms, rel_tol=_ROUNDING):
            return f"{name}: expected other values: norm {norms[0]}, found {norms[1]}", False
        rounded = True
    return "", rounded


FIRST, NEXT, WHOLE = "first token", "next token", "whole request"
CPU = "CPU time"
"""What is timed of a request. CPU time shows on a machine with other work what other times hide there."""
_FEW_REASONS = 3
_ROUND_SECONDS = 1.0
"""How long one bundle may take for all requests that are timed, unless there is only one."""

Line = Mapping[str, Any]
"""A request as a line of a log has it."""


def times_of(answer: BundleAnswer) -> dict[str, float]:
    """Return the times of an answer in seconds, as far as it has them."""
    found = {WHOLE: answer.seconds}
    if answer.cpu_seconds:
        found[CPU] = answer.cpu_seconds
    texts = [call.stats for call in answer.calls if call.kind == "generate"]
    firsts = [each["first_token_seconds"] for each in texts if each.get("first_token_seconds")]
    if firsts:
        found[FIRST] = max(firsts)
        count = max(each.get("new_tokens", 0) for each in texts)
        if count > 1 and answer.seconds > found[FIRST]:
            found[NEXT] = (answer.seconds - found[FIRST]) / (count - 1)
    return found


def quick_enough(played: Sequence[tuple[float, Line]]) -> list[Line]:
    """Return the requests to play again and again: all, or without the slowest, so that a round is short.

    Args:
        played: each with the seconds that it took.
    """
    found: list[Line] = []
    total = 0.0
    for seconds, line in sorted(played, key=lambda each: each[0]):
        total += seconds
        if not found or total < _ROUND_SECONDS:
            found.append(line)
    return found


@dataclass(frozen=True, slots=True)
class RequestDifference:
    """A request whose answers differ.

    Attributes:
        id: of the request in the log; `own 3` for a request of the gate's own.
        path: its path.
        reason: what was expected and what was found.
        changed: the number of results that differ.
    """

    id: str
    path: str
    reason: str
    changed: int


@final
@dataclass(slots=True)
class ComparedAnswers:
    """Counts of the answers that were compared.

    Attributes:
        requests: how many requests both answered, or only the old bundle.
        compared, changed: results, as in `AnswerDifference`.
        rounded: requests whose arrays differ by rounding alone.
        failures: requests that only the old bundle answered.
        differences: the requests that differ.
    """

    requests: int = 0
    compared: int = 0
    changed: int = 0
    rounded: int = 0
    failures: int = 0
    differences: list[RequestDifference] = field(default_factory=list)

    def add(self, name: str, path: str, old: BundleAnswer, new: BundleAnswer) -> AnswerDifference:
        """Compare the answers to a request, and count them."""
        found = difference_of(old, new)
        self.requests += 1
        self.compared += found.compared
        self.changed += found.changed
        self.rounded += found.rounded
        self.failures += found.is_failure
        if found.reasons:
            text = "; ".join(found.reasons)
            self.differences.append(RequestDifference(name, path, text, found.changed))
        return found

    @property
    def share(self) -> float:
        """The share of results that differ."""
        return self.changed / self.compared if self.compared else float(bool(self.differences))

    def checks(self, limits: ReleaseLimits) -> Iterator[ReleaseCheck]:
        """Yield whether requests fail, and whether more results differ than the limit allows."""
        if not self.requests:
            why = "no request was played; for functions, give those of a log"
            yield ReleaseCheck("answers", "noted", why=why)
            return
        failed = [each for each in self.differences if each.reason.startswith("expected status")]
        shown = f"{self.requests} requests", f"{self.requests - self.failures} answered"
        why = "; ".join(f"{each.id}: {each.reason}" for each in failed[:_FEW_REASONS])
        yield judged("answers", bool(failed), shown, why)
        most = limits.share("max_changed_tokens")
        is_bad = self.share > most
        why = f"expected at most {most * 100:g} % to differ; " if is_bad else ""
        why += "; ".join(f"{each.id}: {each.reason}" for each in self.differences[:_FEW_REASONS])
        found = (
            f"{self.changed} differ ({self.share * 100:.2f} %) in {len(self.differences)} requests"
        )
        yield judged("tokens", is_bad, (f"{self.compared} results", found), why)


@final
class PairedTimes:
    """Times of both bundles for the same requests, in groups: see above."""

    def __init__(self) -> None:
        """Begin without times."""
        self._groups: list[dict[str, list[Pair]]] = []

    def begin_group(self) -> None:
        """Begin a group: of two new processes."""
        self._groups.append({})

    def add(self, old: Mapping[str, float], new: Mapping[str, float]) -> None:
        """Add the times of a request to the last group."""
        for name in old.keys() & new.keys():
            self._groups[-1].setdefault(name, []).append((old[name], new[name]))

    def ratio(self, name: str) -> RatioInterval | None:
        """Return the ratio of new to old times; None: there are none."""
        return paired_ratio([group.get(name, []) for group in self._groups])

    def side(self, name: str, place: int) -> list[float]:
        """Return the times of the old (0) or the new (1) bundle."""
        return [pair[place] for group in self._groups for pair in group.get(name, ())]

    def names(self) -> list[str]:
        """Return what was timed, in a fixed order."""
        found = {name for group in self._groups for name in group}
        return [name for name in (FIRST, NEXT, WHOLE, CPU) if name in found]


def time_checks(
    times: PairedTimes, noise: PairedTimes, limits: ReleaseLimits
) -> Iterator[ReleaseCheck]:
    """Yield whether requests are slower than before, and whether they keep the limits in milliseconds.

    Args:
        times: of the old and the new bundle.
        noise: of the old bundle beside itself.
        limits: the limits.
    """
    share = limits.share("max_slower")
    for name in times.names():
        ratio, still = times.ratio(name), noise.ratio(name)
        old, new = (float(np.median(times.side(name, place))) for place in (0, 1))
        yield slower_check(name, old, new, ratio, still, share)
    yield from absolute_checks({name: times.side(name, 1) for name in times.names()}, limits)


def slower_check(
    name: str,
    old: float,
    new: float,
    ratio: RatioInterval | None,
    noise: RatioInterval | None,
    share: float,
) -> ReleaseCheck:
    """Check that the new side does not take longer than a share allows. Medians are in seconds."""
    is_bad = is_slower(ratio, noise, share)
    texts = []
    if is_bad:
        texts.append(f"expected at most {share * 100:g} % more")
    elif ratio is not None and ratio.high > 1 + share:
        texts.append(f"times vary too much to rule out {share * 100:g} % more")
    texts += [] if ratio is None else [ratio.described()]
    texts += [] if noise is None else [f"the old one beside itself: {noise.described()}"]
    return judged(name, is_bad, (in_ms(old), in_ms(new)), "; ".join(texts))


def absolute_checks(
    seconds: Mapping[str, Sequence[float]], limits: ReleaseLimits
) -> Iterator[ReleaseCheck]:
    """Yield whether the times of the new bundle keep the limits that do not depend on the old one."""
    first, rest, whole = (seconds.get(name, ()) for name in (FIRST, NEXT, WHOLE))
    if limits.first_token_ms is not None and first:
        found = float(np.median(first))
        yield limit_check("first token", found, limits.first_token_ms)
    if limits.p95_ms is not None and whole:
        found = float(np.quantile(whole, 0.95))
        yield limit_check("95 % of whole requests", found, limits.p95_ms)
    if limits.tokens_per_second is not None and rest:
        found = 1 / float(np.median(rest))
        is_bad = found < limits.tokens_per_second
        why = f"expected at least {limits.tokens_per_second} tokens a second" if is_bad else ""
        shown = (str(limits.tokens_per_second), f"{found:.1f}")
        yield judged("tokens a second: limit", is_bad, shown, why)


def limit_check(name: str, seconds: float, most_ms: int) -> ReleaseCheck:
    """Check a time against a limit of its own."""
    is_bad = (found := seconds * 1e3) > most_ms
    why = f"expected at most {most_ms} ms" if is_bad else ""
    return judged(f"{name}: limit", is_bad, (f"{most_ms} ms", f"{found:.1f}"), why)


def in_ms(seconds: float) -> str:
    """Return a time as text: `12.3 ms`."""
    return f"{seconds * 1e3:.4g} ms"
