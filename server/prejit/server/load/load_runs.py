"""One run of `prejit load`: prepare the requests, measure rates or search, and report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
        drawn: the load that is drawn; its model may be empty: the only one of the server.
    """

    rates: Sequence[float | None]
    seconds: float
    limits: LoadLimits
    seed: int
    log: LoggedLoad | None
    drawn: DrawnLoad

    @property
    def is_streamed(self) -> bool:
        """True if all answers are streams of events."""
        return self.drawn.is_streamed if self.log is None else self.log.is_streamed


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
        # A mistake is an error now, and the server has loaded what it needs.
        runner.run(ask(client, load))

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
    load = options.drawn
    if load.api == "infer":
        if not load.model:
            raise UsageError("--api infer: expected the name of a function in --model, found none")
        return await with_inputs(client, load)
    model = await choose_model(client, load.model or None)
    return await fitted(client, replace(load, model=model))


def _rate_of(log: LoggedLoad | None) -> float:
    assert log is not None  # the command line has checked it
    return log.rate


async def _close(client: HttpClient) -> None:
    client.close()


def described(options: LoadOptions) -> str:
    """Return what is sent, in words."""
    if options.log is not None:
        return f"requests and times of {options.log.path}"
    load = options.drawn
    arrivals = "Poisson" if load.burstiness == 1 else f"burstiness {load.burstiness:g}"
    if load.api == "infer":
        return f"calls of {load.model}, {arrivals} arrivals, seed {options.seed}"
    parts = [f"{load.api}, {arrivals} arrivals", f"prompts of {_range(load.prompt)} tokens"]
    if load.prefix_tokens:
        parts.append(f"{load.prefix_share:.0%} behind {load.prefix_tokens} common ones")
    if load.api != "embeddings":
        kind = "streamed" if load.is_streamed else "whole"
        parts.append(f"{kind} answers of {_range(load.new)}")
    return ", ".join([*parts, f"seed {options.seed}"])


def _range(lengths: Lengths) -> str:
    same = lengths.least == lengths.most
    return f"{lengths.least}" if same else f"{lengths.least} to {lengths.most}"
