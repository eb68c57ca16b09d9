"""One run of `prejit load`: the server that gets the load, the rates, and the report."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import uvloop

from prejit.runtime.base.child_process import end_with_parent, ending, last_line
from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.errors import NetworkError, ProcessError, UsageError
from prejit.server.load.http_client import HttpClient, without_credentials
from prejit.server.load.load_report import LoadReport, measures, short
from prejit.server.load.load_search import (
    FoundRate,
    LoadAnswer,
    LoadLimits,
    LoadSearch,
    measure,
    send_window,
)
from prejit.server.load.workload import DrawnLoad, Lengths, LoadRequest, LoggedLoad, Workload
from prejit.server.served.process_upkeep import allow_many_connections

_READY = re.compile(r"^(http://\S+)  .*  ready in ", re.MULTILINE)
_END_SECONDS = 10.0
_PATIENCE_SECONDS = 300.0
"""How long the first requests may take: a server may load or compile for them."""
_PROBE_TOKENS = 64
"""Words of the prompt by which tokens are counted, at most."""


@contextmanager
def served_bundle(path: str, show: Callable[[str], None]) -> Iterator[str]:
    """Serve a bundle in a process of its own, and give its URL when it is ready.

    Args:
        path: the bundle.
        show: takes a line of progress.

    Raises:
        ProcessError: it does not become ready.
    """
    shown = without_credentials(path)
    command = [sys.executable, "-m", "prejit.runtime", "serve", path, "--port", "0"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            preexec_fn=end_with_parent,  # no other thread runs yet
        )
        try:
            while (found := _READY.search(_all_of(errors))) is None:
                if (status := process.poll()) is not None:
                    raise ProcessError(
                        f"prejit serve {shown} {ending(status)}: {_why(_all_of(errors))}",
                        status,
                        hint="start it by hand to see why",
                    )
                show(f"prejit serve {shown} starts")
                time.sleep(0.05)
            yield found[1]
        finally:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _why(text: str) -> str:
    """Return the error in what `prejit serve` wrote, without its hint; else the last line."""
    found = re.findall(r"^error\[[\w-]+\]: (.+)", text, re.MULTILINE)
    return found[-1] if found else last_line(text)


def _all_of(errors: Any) -> str:
    errors.seek(0)
    return str(errors.read())


async def _get(client: HttpClient, path: str) -> Any:
    """Return the JSON at a path."""
    request = LoadRequest(path, b"", {}, False)
    found = await client.exchange_within(request, _PATIENCE_SECONDS, "GET")
    if found.failed or found.status != 200:
        why = found.failed or f"expected status 200, found {found.status}"
        raise NetworkError(
            f"{client.url}{path}: {why}",
            hint="start the server, or correct the URL; --key-file has the key of a server that wants one",
        )
    try:
        return msgspec.json.decode(found.body)
    except msgspec.DecodeError as error:
        raise NetworkError(
            f"{client.url}{path}: expected JSON, found {found.body!r:.80}"
        ) from error


async def choose_model(client: HttpClient, model: str | None) -> str:
    """Return the name of the model that requests name: the given one, or the only one of the server.

    Raises:
        NetworkError: the server does not list its models.
        UsageError: it has no model of this name, or several and none is given.
    """
    listed = await _get(client, "/v1/models")
    try:
        names = [str(each["id"]) for each in listed["data"]]
    except (KeyError, TypeError) as error:
        raise NetworkError(
            f"{client.url}/v1/models: expected a list of models, found {listed!r:.80}"
        ) from error
    if model is None and len(names) == 1:
        return names[0]
    if model is None or model not in names:
        guess = "" if model is None else did_you_mean(model, names)
        if not names:
            raise UsageError(f"--model: expected a server with models, found none at {client.url}")
        raise UsageError(
            f"--model: expected one of {', '.join(names)}, found {model or 'none'}{guess}"
        )
    return model


async def fitted(client: HttpClient, load: DrawnLoad) -> DrawnLoad:
    """Return the load with as many words in a prompt as make its tokens.

    One request counts the tokens that this server makes of some words. Answers go on to their length with
    `ignore_eos`, where the server knows this field.

    Raises:
        NetworkError: the server refuses the request.
    """
    count = min(load.prompt.most, _PROBE_TOKENS)
    probe = replace(
        load, prompt=Lengths(count, count), new=Lengths(1, 1), prefix_tokens=0, is_streamed=False
    )
    if load.api != "embeddings":
        load = replace(load, more={"ignore_eos": True})
        if (await _exchange(client, replace(probe, more=load.more))).failed:
            load = replace(load, more={})
    tokens = (await ask(client, probe)).prompt_tokens or count
    return replace(load, words_per_token=count / tokens)


async def ask(client: HttpClient, load: Workload) -> LoadAnswer:
    """Send the first request of a load, and return its measures.

    Raises:
        NetworkError: it is refused, or the answer is not one of such a request.
    """
    found = await _exchange(client, load)
    if found.failed:
        raise NetworkError(
            f"{client.url}: a request of this load failed: {found.failed}",
            hint="change what is sent: --api, --model, --prompt-tokens, --new-tokens, --rows",
        )
    return found


async def _exchange(client: HttpClient, load: Workload) -> LoadAnswer:
    [request] = load.requests(1, np.random.default_rng(0))
    found = await client.exchange_within(request, _PATIENCE_SECONDS)
    return measure(found, request.is_streamed, found.due)


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
        found = await _get(client, f"/v2/models/{load.model}")
        return replace(load, inputs=tuple(found["inputs"]))
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
