"""One window of load at one rate: requests go out at their times, whatever the server does.

The loop is open: a request is sent when it is due, not when an earlier one has its answer, and each latency
counts from then. A server that stands still for a second therefore costs every request of that second.
A closed loop would send nothing meanwhile and leave them out (coordinated omission).
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from prejit.server.load.http_client import Exchange, HttpClient
from prejit.server.load.workload import Floats, LoadRequest, Workload, arrival_times

_PATIENCE_SECONDS = 60.0
"""How long after the last request an answer may come, or twice the length of the window if that is longer."""
_SHOW_SECONDS = 1.0


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
