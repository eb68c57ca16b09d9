"""One run of `prejit load`: prepare the requests, measure rates or search, and report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import uvloop

from prejit.runtime.errors import UsageError
from prejit.server.load.http_client import HttpClient
from prejit.server.load.load_report import LoadReport, measures, short
from prejit.server.load.load_search import FoundRate, LoadLimits, LoadSearch
from prejit.server.load.load_target import ask, choose_model, fitted, with_inputs
from prejit.server.load.load_window import LoadAnswer, send_window
from prejit.server.load.workload import DrawnLoad, Lengths, LoggedLoad, Workload
from prejit.server.served.open_files import allow_many_connections

_SHARES_OF_KNEE = (0.25, 0.5, 0.75, 0.9)
"""Rates of the curve that a search may leave out."""
_LEAST_REQUESTS = 30
"""Requests of a window of a search, at least: fewer would not show that latency grows."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of one measurement.

    Attributes:
        rates: requests a second; None among them: as many as the log has. Empty: search.
        seconds: length of a window; those of a search may be longer.
        limits: what requests must keep.
        seed: of all that is drawn.
        log: requests that are sent as they are; None: they are drawn.
        model: the model of drawn requests; None: the only one of the server.
        api, burstiness, prompt, new, prefix_tokens, prefix_share, is_streamed, rows: as of DrawnLoad.
    """

    rates: Sequence[float | None]
    seconds: float
    limits: LoadLimits
    seed: int
    log: LoggedLoad | None
    api: str
    model: str | None
    burstiness: float
    prompt: Lengths
    new: Lengths
    prefix_tokens: int
    prefix_share: float
    is_streamed: bool
    rows: int


def run_load(
    url: str,
    options: LoadOptions,
    show: Callable[[str], None],
    *,
    headers: Mapping[str, str] | None = None,
    name: str | None = None,
) -> LoadReport:
    """Measure a server.

    Args:
        url: where it is.
        options: what is measured.
        show: takes lines of progress.
        headers: headers of each request.
        name: the server in the report; None: its URL.

    Raises:
        NetworkError: it does not answer, or refuses such a request.
        UsageError: it has no such model.
    """
    client = HttpClient(url, headers)
    allow_many_connections()
    # One loop for all windows, because connections stay open between them.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        load = runner.run(_workload(client, options))
        runner.run(
            ask(client, load)
        )  # a mistake is an error now, and the server has loaded what it needs

        def measure(rate: float, number: int) -> Sequence[LoadAnswer]:
            def say(line: str) -> None:
                show(f"{short(rate)} requests a second: {line}" if line else "")

            seconds = options.seconds
            if not options.rates:  # a search of a slow server needs more time
                seconds = max(seconds, _LEAST_REQUESTS / rate)
            window = send_window(client, load, rate, seconds, options.seed, number, say)
            return runner.run(window)

        search = LoadSearch(measure, options.limits)
        knee: FoundRate | None = None
        within: FoundRate | None = None
        if options.rates:
            for rate in options.rates:
                search.look(_rate_of(options.log) if rate is None else rate)
        else:
            knee = search.knee(0.5 / runner.run(ask(client, load)).whole)
            if options.limits.is_any:
                within = search.within_limits(knee.rate or knee.above)
            for share in _SHARES_OF_KNEE:
                search.look(share * (knee.rate or knee.above))
        runner.run(_close(client))
    rates = tuple(
        measures(rate, windows, options.limits) for rate, windows in sorted(search.windows.items())
    )
    return LoadReport(name or client.url, described(options), options.limits, rates, knee, within)


async def _workload(client: HttpClient, options: LoadOptions) -> Workload:
    if options.log is not None:
        return options.log
    given = options.model
    if options.api == "infer":
        if given is None:
            raise UsageError("--api infer: expected the name of a function in --model, found none")
        model = given
    else:
        model = await choose_model(client, given)
    load = DrawnLoad(
        options.api,
        model,
        options.burstiness,
        options.prompt,
        options.new,
        options.prefix_tokens,
        options.prefix_share,
        options.is_streamed,
        rows=options.rows,
    )
    return await (with_inputs if options.api == "infer" else fitted)(client, load)


def _rate_of(log: LoggedLoad | None) -> float:
    assert log is not None  # the command line has checked it
    return log.rate


async def _close(client: HttpClient) -> None:
    client.close()


def described(options: LoadOptions) -> str:
    """Return what is sent, in words."""
    if options.log is not None:
        return f"requests and times of {options.log.path}"
    arrivals = "Poisson" if options.burstiness == 1 else f"burstiness {options.burstiness:g}"
    if options.api == "infer":
        return f"calls of {options.model}, {arrivals} arrivals, seed {options.seed}"
    parts = [f"{options.api}, {arrivals} arrivals", f"prompts of {_range(options.prompt)} tokens"]
    if options.prefix_tokens:
        parts.append(f"{options.prefix_share:.0%} behind {options.prefix_tokens} common ones")
    if options.api != "embeddings":
        kind = "streamed" if options.is_streamed else "whole"
        parts.append(f"{kind} answers of {_range(options.new)}")
    return ", ".join([*parts, f"seed {options.seed}"])


def _range(lengths: Lengths) -> str:
    same = lengths.least == lengths.most
    return f"{lengths.least}" if same else f"{lengths.least} to {lengths.most}"
