"""The saturation curve of a server, its knee, and the highest rate at which it keeps its limits.

Two questions have yes or no at each rate: does the server keep up, and are enough requests within the limits?
A search doubles the rate until the answer is no, then halves the ratio of the bracket. A rate is measured in
windows until the confidence interval of what decides is on one side of its bound, or there are four. The
windows of all rates have the same seeds: the requests of two rates differ in their times alone, so that noise
of the load does not change the answer.

A window is open: a request is sent when it is due, not when an earlier one has its answer, and each latency
counts from then. A server that stands still for a second therefore costs every request of that second. A
closed loop would send nothing meanwhile and leave them out (coordinated omission).
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import msgspec
import numpy as np

from prejit.server.load.http_client import Exchange, HttpClient
from prejit.server.load.workload import Floats, LoadRequest, Workload, arrival_times

_PATIENCE_SECONDS = 60.0
"""How long after the last request an answer may come, or twice the length of the window if that is longer."""
_SHOW_SECONDS = 1.0
GOOD_SHARE = 0.95
"""The share of requests that must be within the limits: a limit is one for the 95th percentile."""
MOST_LAG_SECONDS = 0.010
"""If the 99th percentile of the generator's own lag is longer, it is too slow for the rate."""
_MOST_GROWTH = 0.02
"""Seconds by which latency may grow in a second of load: as behind a server that is 2 % too slow."""
_MOST_FAILED = 0.01
_RESOLUTION = 1.025
"""The ratio of the two rates between which a search ends."""
_MOST_WINDOWS = 4
_BLOCKS = 10
"""Parts of a window whose means are compared: neighbours in a queue are not independent."""
_SPREAD = 16.0
"""Twice the standard deviation of the growth near saturation, relative to the spread of the blocks around the
fit: that of computed queues of four servers. A regression's own error would be far too small."""
_Z = 1.96
_WARM = 0.2
"""The part of a window that is left out where growth is measured: the queue fills to its usual length."""
_MOST_HALVINGS = 8


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """The measures of one request, in seconds, all from the time when it was due.

    Attributes:
        due: when it was due, from the start of the window.
        lag: how much later the generator sent it.
        first: until the first token; NaN: it was not streamed. Infinite where it failed.
        whole: until the end. Infinite where it failed.
        gaps: between the parts of a stream that have tokens.
        per_token: mean time of the tokens after the first; NaN: there are none, or it was not streamed.
        prompt_tokens, new_tokens: as the server counts them; parts of a stream if it does not.
        failed: why it failed; empty: it did not.
    """

    due: float
    lag: float
    first: float
    whole: float
    gaps: tuple[float, ...] = ()
    per_token: float = math.nan
    prompt_tokens: int = 0
    new_tokens: int = 0
    failed: str = ""


async def send_window(
    client: HttpClient,
    load: Workload,
    rate: float,
    seconds: float,
    seed: int,
    number: int,
    show: Callable[[str], None],
) -> list[LoadAnswer]:
    """Send requests at a rate for some seconds, and wait for their answers.

    Every second window is the one before it backwards: requests that one of the two has too early for its
    mean rate, the other has too late. A pair says more than two that are drawn apart (antithetic variates).

    Args:
        client: of the server.
        load: gives arrivals and requests.
        rate: requests a second.
        seconds: how long they are sent.
        seed: of all that is drawn.
        number: which window at this rate it is, from 0.
        show: takes a line of progress each second.

    Returns:
        The measures of each request, in the order in which they were due.
    """
    count = max(2, round(rate * seconds))
    pair, order = number // 2, -1 if number % 2 else 1
    # Drawn apart, so that the same requests come in the same order at every rate.
    gaps = load.gaps(count, np.random.default_rng([seed, pair, 0]))
    requests = load.requests(count, np.random.default_rng([seed, pair, 1]))
    return await send(client, requests[::order], arrival_times(gaps[::order], rate), show)


async def send(
    client: HttpClient, requests: Sequence[LoadRequest], times: Floats, show: Callable[[str], None]
) -> list[LoadAnswer]:
    """Send each request at its time, and return their measures."""
    tasks: list[asyncio.Task[Exchange]] = []
    gc.collect()
    gc.disable()  # a collection would make the generator late
    try:
        start = shown = time.monotonic()
        for request, at in zip(requests, times.tolist(), strict=True):
            due = start + at
            while (left := due - time.monotonic()) > 0:
                await asyncio.sleep(left)
            tasks.append(asyncio.create_task(client.exchange(request, due)))
            if due - shown > _SHOW_SECONDS:
                shown = due
                show(f"{at:.0f} s of {times[-1]:.0f}, {len(tasks)} of {len(times)} requests")
        show(f"all {len(tasks)} requests are sent, the last answers come")
        # A task that was made just now has not run yet; the wait lets it.
        await asyncio.wait(tasks, timeout=max(_PATIENCE_SECONDS, 2 * float(times[-1])))
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
    finally:
        gc.enable()
    show("")
    answers = []
    for task, request, at in zip(tasks, requests, times.tolist(), strict=True):
        if task.cancelled():
            answers.append(LoadAnswer(at, 0.0, math.inf, math.inf, failed="no answer in time"))
        else:
            answers.append(measure(task.result(), request.is_streamed, start))
    return answers


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    def has_tokens(self) -> bool:
        """Return whether a part of a stream brings anything that the model wrote."""
        delta = self.delta
        return bool(
            self.text or (delta and (delta.content or delta.reasoning_content or delta.tool_calls))
        )


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


def measure(exchange: Exchange, is_streamed: bool, start: float) -> LoadAnswer:
    """Return the measures of a request.

    Args:
        exchange: what was sent and came back.
        is_streamed: whether it asked for a stream.
        start: of the window.
    """
    due = exchange.due
    at, lag = due - start, exchange.begun - due
    tokens: list[float] = []
    usage: _Usage | None = None
    failed = exchange.failed
    try:
        if not failed and exchange.status != 200:
            failed = f"status {exchange.status}: {_message(exchange.body)}"
        elif not failed and is_streamed:
            tokens, usage = _read_events(exchange)
        elif not failed:
            usage = _decode(exchange.body).usage
    except (msgspec.DecodeError, ValueError) as error:
        failed = f"expected an answer of OpenAI's API or of /v2, found another: {error}"
    if failed:
        return LoadAnswer(at, lag, math.inf, math.inf, failed=failed)
    first = per_token = math.nan
    gaps: tuple[float, ...] = ()
    new_tokens = len(tokens) if usage is None else usage.completion_tokens
    if tokens:
        first = tokens[0] - due
        gaps = tuple(later - earlier for earlier, later in pairwise(tokens))
        if new_tokens > 1:
            per_token = (tokens[-1] - tokens[0]) / (new_tokens - 1)
    return LoadAnswer(
        at,
        lag,
        first,
        exchange.ended - due,
        gaps,
        per_token,
        0 if usage is None else usage.prompt_tokens,
        new_tokens,
    )


def _message(body: bytes) -> str:
    """Return the message of an error, in OpenAI's form or in that of /v2; else how the body begins."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error if isinstance(error, str) else error["message"])[:300]
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:80].decode("utf-8", "replace")


def _read_events(exchange: Exchange) -> tuple[list[float], _Usage | None]:
    """Return when the parts with tokens came, and the usage."""
    times: list[float] = []
    usage: _Usage | None = None
    rest, is_whole = b"", False
    for at, part in exchange.parts:
        *lines, rest = (rest + part).split(b"\n")
        had_tokens = False
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            content = line[5:].strip()
            if content == b"[DONE]":
                is_whole = True
                continue
            event = _decode(content)
            if event.error is not None:
                raise ValueError(f"an error in the stream: {event.error!s:.200}")
            usage = event.usage or usage
            had_tokens = had_tokens or any(choice.has_tokens() for choice in event.choices)
        if had_tokens:
            times.append(at)
    if not is_whole:
        raise ValueError("a stream that ends without [DONE]")
    return times, usage


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """The limits of a request, in milliseconds; None: no limit.

    Attributes:
        first_token_ms: until its first token.
        between_tokens_ms: the mean between its tokens.
        whole_ms: until its end.
    """

    first_token_ms: float | None = None
    between_tokens_ms: float | None = None
    whole_ms: float | None = None

    @property
    def is_any(self) -> bool:
        """True if there is a limit."""
        return any(
            each is not None
            for each in (self.first_token_ms, self.between_tokens_ms, self.whole_ms)
        )

    def allow(self, answer: LoadAnswer) -> bool:
        """Return whether a request is within the limits. One that failed is not."""
        pairs = (
            (answer.first, self.first_token_ms),
            (answer.per_token, self.between_tokens_ms),
            (answer.whole, self.whole_ms),
        )
        return not answer.failed and not any(
            most is not None and value * 1e3 > most for value, most in pairs
        )

    def described(self) -> str:
        """Return the limits as text."""
        named = {"TTFT": self.first_token_ms, "TPOT": self.between_tokens_ms, "E2E": self.whole_ms}
        return ", ".join(
            f"{name} <= {most:g} ms" for name, most in named.items() if most is not None
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def is_at_most(self, bound: float) -> bool | None:
        """Return whether the value is at most a bound; None: the interval has the bound in it."""
        if self.high <= bound:
            return True
        return False if self.low > bound else None


_Estimate = Callable[[Sequence[Sequence[LoadAnswer]]], Interval]


@dataclass(frozen=True, slots=True)
class FoundRate:
    """The result of a search.

    Attributes:
        rate: the highest rate with the answer yes, requests a second; 0: there is none.
        above: the lowest one with the answer no.
        is_certain: False if one of the two was decided by its estimate, not by its interval.
    """

    rate: float
    above: float
    is_certain: bool


def growth(windows: Sequence[Sequence[LoadAnswer]]) -> Interval:
    """Return by how many seconds latency grows in a second of load.

    The latency is that of the first token, or of the whole where nothing is streamed. Near saturation it also
    grows because more requests than usual were due until then, by chance. How many is known, so the fit takes
    that away, as a control variate.
    """
    slopes, spreads = [], []
    for window in windows:
        kept = [each for each in window if not each.failed]
        if len(window) - len(kept) > _MOST_FAILED * len(window):
            return Interval(math.inf, math.inf, math.inf)
        due = np.array([each.due for each in kept])
        late = np.array([each.whole if math.isnan(each.first) else each.first for each in kept])
        blocks = np.array_split(np.flatnonzero(due >= _WARM * due[-1]), _BLOCKS)
        if not len(blocks[-1]):
            return Interval(0.0, -math.inf, math.inf)  # too few requests
        # Seconds of load that came too early.
        early = np.arange(len(due)) / len(due) * due[-1] - due
        x, y, ahead = (
            np.array([of[block].mean() for block in blocks]) for of in (due, late, early)
        )
        fitted = np.stack([x, np.ones(_BLOCKS), ahead], axis=1)
        slope, level, share = np.linalg.lstsq(fitted, y)[0]
        if share < 0:  # far from saturation
            slope, level, share = *np.polyfit(x, y, 1), 0.0
        slopes.append(slope)
        spreads.append(np.std(y - fitted @ [slope, level, share]) / (x[-1] - x[0]))
    value = float(np.mean(slopes))
    error = _SPREAD * float(np.mean(spreads)) / math.sqrt(len(windows))
    return Interval(value, value - error, value + error)


def bad_share(windows: Sequence[Sequence[LoadAnswer]], limits: LoadLimits) -> Interval:
    """Return the share of requests that are not within the limits.

    The interval is Wilson's, for as many independent requests as vary as much as the blocks do.
    """
    bad = [np.array([not limits.allow(each) for each in window], float) for window in windows]
    every = np.concatenate(bad)
    blocks = [b for window in bad for b in np.array_split(window, _BLOCKS) if len(b)]
    share, count = float(every.mean()), float(len(every))
    if 0 < share < 1 and len(blocks) > 2:
        of_means = float(np.var([b.mean() for b in blocks], ddof=1)) / len(blocks)
        count = min(count, max(1.0, share * (1 - share) / of_means)) if of_means else count
    middle = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    half *= _Z / (1 + _Z**2 / count)
    return Interval(share, middle - half, middle + half)


def generator_lag(windows: Sequence[Sequence[LoadAnswer]]) -> float:
    """Return the 99th percentile of the generator's own lag in seconds."""
    return float(np.quantile([each.lag for window in windows for each in window], 0.99))


@final
class LoadSearch:
    """Measures rates, each once or in several windows, and answers both questions.

    Attributes:
        windows: what was measured, by the rate.
    """

    def __init__(
        self, measure_window: Callable[[float, int], Sequence[LoadAnswer]], limits: LoadLimits
    ) -> None:
        """Measure nothing yet.

        Args:
            measure_window: returns the answers of the n-th window at a rate.
            limits: what requests must keep.
        """
        self._measure_window = measure_window
        self._limits = limits
        self.windows: dict[float, list[Sequence[LoadAnswer]]] = {}

    def look(self, rate: float) -> list[Sequence[LoadAnswer]]:
        """Return what was measured at a rate, at least one window."""
        return self.windows.get(rate) or self._more(rate)

    def knee(self, start: float) -> FoundRate:
        """Return the highest rate with which the server keeps up; begin the search at a rate."""
        return self._highest(growth, _MOST_GROWTH, start)

    def within_limits(self, start: float) -> FoundRate:
        """Return the highest rate at which enough requests are within the limits."""
        return self._highest(lambda found: bad_share(found, self._limits), 1 - GOOD_SHARE, start)

    def _highest(self, estimate: _Estimate, bound: float, start: float) -> FoundRate:
        certain: dict[float, bool] = {}

        def holds(rate: float) -> bool:
            found = self.look(rate)
            while (answer := estimate(found).is_at_most(bound)) is None and len(
                found
            ) < _MOST_WINDOWS:
                found = self._more(rate)
            certain[rate] = answer is not None
            return estimate(found).value <= bound if answer is None else answer

        # What another search has measured is a bracket already.
        low, high, rate = 0.0, math.inf, start
        for known in sorted(self.windows, reverse=True):
            if holds(known):
                low = known
                break
            high = known
        while math.isinf(high):
            rate = low * 2 or start
            low, high = (rate, high) if holds(rate) else (low, rate)
        halvings = 0
        while not low:
            if halvings == _MOST_HALVINGS:
                return FoundRate(0.0, high, certain[high])
            halvings += 1
            low, high = (high / 2, high) if holds(high / 2) else (low, high / 2)
        while high / low > _RESOLUTION:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if holds(middle) else (low, middle)
        return FoundRate(low, high, certain[low] and certain[high])

    def _more(self, rate: float) -> list[Sequence[LoadAnswer]]:
        found = self.windows.setdefault(rate, [])
        found.append(self._measure_window(rate, len(found)))
        return found
