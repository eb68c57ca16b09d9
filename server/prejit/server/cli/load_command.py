"""`prejit load`: how much load a server bears."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prejit.runtime.base.files import store_errors
from prejit.runtime.base.wording import few
from prejit.runtime.cli.command_options import (
    COUNT,
    FILE,
    JSON,
    PATH,
    TRUST,
    VERBOSE,
    Attributes,
    Number,
    page,
)
from prejit.runtime.cli.output import print_json, print_text, progress, write_text
from prejit.runtime.errors import RegressionError, UsageError

if TYPE_CHECKING:
    from prejit.server.load.load_runs import LoadOptions

_MOST_REQUESTS = 1_000_000
"""The most requests of a window: they are all made before it begins."""
_LIMITS = ("first_token_ms", "between_tokens_ms", "p95_ms")
_MS: Attributes = {"type": Number(0, 1e9, min_open=True), "metavar": "MS"}


def _lengths(_: click.Context, __: click.Parameter, text: str) -> tuple[int, int]:
    """Return the bounds of a distribution of numbers of tokens."""
    found = re.fullmatch(r"([0-9]{1,7})(?:\.\.([0-9]{1,7}))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise click.BadParameter(f"expected N or LEAST..MOST, such as 16..256, found {text!r:.40}")
    return least, most


def _rates(
    _: click.Context, __: click.Parameter, texts: tuple[str, ...]
) -> tuple[float | None, ...]:
    """Return rates in requests a second; None: that of the log."""
    number = Number(0, 1e6, min_open=True)
    return tuple(None if text == "log" else number.convert(text, None, None) for text in texts)


@click.command(
    epilog="Examples:\n\n\b\n"
    "  prejit load artifacts/demo --first-token-ms 200 --page load.html\n"
    "  prejit load http://127.0.0.1:8000 --rate 5 --rate 10 --p95-ms 2000 --json\n"
    "  prejit load http://127.0.0.1:8000 --log requests.jsonl --rate log\n\n"
    "Exit status: 9 a --rate is not within the limits."
)
@click.argument(
    "target",
    type=PATH,
    metavar="URL|BUNDLE",
    help="A server: http://HOST:PORT or https://HOST; or a bundle, which is served as long as this runs.",
)
@click.option(
    "--rate",
    "rates",
    multiple=True,
    callback=_rates,
    metavar="N|log",
    help="Measure so many requests a second, or as many as the log has; may be repeated (default: search "
    "the knee, and the highest rate within the limits).",
)
@click.option(
    "--seconds",
    type=Number(0.1, 1e6),
    default=10.0,
    metavar="SECONDS",
    help="How long a window of load lasts; a search takes up to 4 a rate, each with 30 requests or more.",
)
@click.option(
    "--first-token-ms",
    **_MS,
    help="The limit of the time to the first token, for 95 % of the requests.",
)
@click.option(
    "--between-tokens-ms",
    **_MS,
    help="The limit of the mean time of the tokens after it, for 95 %.",
)
@click.option("--p95-ms", **_MS, help="The limit of the time until the end, for 95 %.")
@click.option(
    "--api",
    type=click.Choice(("completions", "chat", "embeddings", "infer")),
    default="completions",
    help="What requests ask for; infer: a function, by the Open Inference Protocol.",
)
@click.option(
    "--model", metavar="NAME", help="The model or the function (default: the only model)."
)
@click.option(
    "--prompt-tokens",
    callback=_lengths,
    default="64",
    metavar="N|LEAST..MOST",
    help="Length of prompts; of a range the logarithm is uniform.",
)
@click.option(
    "--new-tokens",
    callback=_lengths,
    default="32",
    metavar="N|LEAST..MOST",
    help="Length of answers.",
)
@click.option(
    "--prefix-tokens",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Length of a text with which prompts begin, such as a system prompt.",
)
@click.option(
    "--prefix-share",
    type=Number(0, 1),
    default=1.0,
    metavar="SHARE",
    help="The share of prompts with it.",
)
@click.option("--rows", **COUNT, default=1, help="Open sizes of the inputs of a function.")
@click.option(
    "--burstiness",
    type=Number(0.01, 1000),
    default=1.0,
    metavar="N",
    help="As in vLLM: 1 is a Poisson process, less comes in bursts, more is regular.",
)
@click.option("--log", **FILE, help="Send the requests of a log of `prejit serve`, at its times.")
@click.option("--whole", is_flag=True, help="Ask for whole texts instead of streams.")
@click.option("--key-file", **FILE, help="A file with the server's key.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, metavar="N", help="Of all that is drawn."
)
@page("Write the curves as an HTML page.")
@TRUST
@VERBOSE
@JSON
def load(
    target: str,
    page: str | None,
    as_json: bool,
    key_file: str | None,
    log: str | None,
    whole: bool,
    **options: Any,
) -> int:
    """Send open-loop load to a server: its saturation curve, its knee, its highest rate within limits."""
    with progress() as show:
        from prejit.server.load.http_client import without_credentials
        from prejit.server.load.load_report import as_page, as_text, short
        from prejit.server.load.load_runs import LoadOptions, run_load, served_bundle
        from prejit.server.load.load_search import GOOD_SHARE, LoadLimits
        from prejit.server.load.workload import DrawnLoad, Lengths, LoggedLoad

        limits = LoadLimits(*(options.pop(name) for name in _LIMITS))
        prompt, new = (Lengths(*options.pop(f"{name}_tokens")) for name in ("prompt", "new"))
        logged = None if log is None else LoggedLoad(log)
        of_run = {name: options.pop(name) for name in ("rates", "seconds", "seed")}
        is_text = options["api"] in ("completions", "chat") and not whole
        model = options.pop("model") or ""
        drawn = DrawnLoad(model=model, prompt=prompt, new=new, is_streamed=is_text, **options)
        asked = LoadOptions(limits=limits, log=logged, drawn=drawn, **of_run)
        _check(asked)
        headers = None if key_file is None else {"Authorization": f"Bearer {_key(key_file)}"}
        is_url = target.startswith(("http://", "https://"))
        with nullcontext(target) if is_url else served_bundle(target, show) as url:
            name = without_credentials(target)
            report = run_load(url, asked, show, headers=headers, name=name)
    if as_json:
        print_json(report.to_json())
    else:
        print_text(as_text(report))
    if page is not None:
        write_text(page, as_page(report))
    rates = report.rates if asked.rates else ()
    missed = [
        short(each.rate)
        for each in rates
        if each.good_share is not None and each.good_share < GOOD_SHARE
    ]
    if missed:
        raise RegressionError(
            f"expected {GOOD_SHARE:.0%} of the requests within {limits.described()}, found fewer at "
            f"{few(missed)} requests a second",
            hint="the table has the times; without --rate, prejit searches the highest rate",
        )
    return 0


def _check(asked: LoadOptions) -> None:
    """Check options that depend on others."""
    if asked.log is None and None in asked.rates:
        raise UsageError("--rate log: expected a log, found none", hint="add --log requests.jsonl")
    for rate in asked.rates:
        if rate is not None and not 2 <= (count := rate * asked.seconds) <= _MOST_REQUESTS:
            raise UsageError(
                f"--rate {rate:g}: expected 2 to {_MOST_REQUESTS:,} requests in a window of "
                f"{asked.seconds:g} s, found {count:,.3g}",
                hint="give another rate, or another --seconds",
            )
    for option in _LIMITS[:2]:
        if not asked.is_streamed and getattr(asked.limits, option) is not None:
            raise UsageError(
                f"--{option.replace('_', '-')}: expected streamed answers, found whole ones",
                hint="use --p95-ms",
            )


def _key(path: str) -> str:
    """Return the key in a file."""
    with store_errors(path, "read the key"):
        key = Path(path).read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise UsageError(f"{path}: expected a key alone, found {len(key.split())} words")
    return key
