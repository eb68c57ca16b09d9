"""Buckets that `prejit suggest` chooses for three loads, beside buckets that a person would write.

    python -m benchmarks.studies.suggested_buckets --report artifacts/demo.report.json     2 seconds

Loads are drawn with a seed: chat (log-normal), embedding of short documents (log-normal), and code completion
(long contexts with short answers beside short questions with long ones). The buckets by hand are powers of
two. Compile times are the mean of each kind of program in the report of a build.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish
from prejit.compiler.manifest.chosen_buckets import (
    Buckets,
    CompileSeconds,
    decoder_buckets,
    encoder_buckets,
    read_seconds,
    suggest_decoder,
    suggest_encoder,
)
from prejit.compiler.manifest.manifest import Encode, Generate
from prejit.compiler.manifest.request_log import LoggedEncoding, LoggedGeneration, LoggedRequests
from prejit.compiler.manifest.specs import decoder_specs, encoder_specs
from prejit.runtime.errors import UsageError

REQUESTS = 5_000
SEED = 20_261_122


@dataclass(frozen=True)
class Load:
    """A load, and buckets for it.

    Attributes:
        name: for people.
        log: the requests.
        by_hand: buckets of powers of two.
    """

    name: str
    log: LoggedRequests
    by_hand: Generate | Encode

    def judged(self) -> Buckets:
        """Return what the buckets by hand cost."""
        if isinstance(self.by_hand, Encode):
            return encoder_buckets(self.log, self.by_hand)
        return decoder_buckets(self.log, self.by_hand)

    def suggested(self, budget: int) -> Buckets:
        """Return the buckets that are suggested for a number of programs."""
        if isinstance(self.by_hand, Encode):
            return suggest_encoder(self.log, budget, self.by_hand)
        return suggest_decoder(self.log, budget, self.by_hand)


def loads() -> list[Load]:
    """Return the three loads."""
    draw = np.random.default_rng(SEED)

    def log_normal(middle: float, spread: float, most: int) -> Callable[[], int]:
        return lambda: int(np.clip(draw.lognormal(math.log(middle), spread), 1, most))

    prompt, answer = log_normal(150, 1.0, 4096), log_normal(180, 0.8, 1024)
    chat = [
        LoggedGeneration(prompt(), answer(), batch=int(np.clip(draw.poisson(6), 1, 16)))
        for _ in range(REQUESTS)
    ]
    length = log_normal(60, 0.5, 512)
    documents = [
        LoggedEncoding(length(), min(32, int(draw.geometric(0.15)))) for _ in range(REQUESTS)
    ]
    code = []
    for _ in range(REQUESTS):
        completes = draw.random() < 0.7
        tokens = draw.normal(1500, 250) if completes else draw.normal(220, 60)
        new = min(512, int(draw.geometric(1 / 24 if completes else 1 / 200)))
        batch = int(np.clip(draw.poisson(3), 1, 8))
        code.append(LoggedGeneration(int(np.clip(tokens, 16, 3000)), new, batch=batch))
    return [
        Load(
            "chat, log-normal",
            LoggedRequests(Counter(chat), {}, {}),
            Generate(batch=(1, 4, 16), prompt=(64, 256, 1024), context=(512, 2048, 5120)),
        ),
        Load(
            "embedding short documents",
            LoggedRequests({}, Counter(documents), {}),
            Encode(tuple(product((1, 8, 32), (32, 64, 128, 512)))),
        ),
        Load(
            "code completion, bimodal",
            LoggedRequests(Counter(code), {}, {}),
            Generate(batch=(1, 4, 8), prompt=(64, 256, 1024), context=(512, 2048, 4096)),
        ),
    ]


def overhead(buckets: Buckets) -> float:
    """Return the product of computed by needed over the axes."""
    return math.prod(axis.computed / axis.needed for axis in buckets.axes)


def fewest(load: Load, hand: Buckets) -> Buckets:
    """Return the suggestion with the fewest programs that computes no more than the buckets by hand."""
    return next(
        found
        for budget in range(1, hand.programs + 1)
        if (found := _tried(load, budget)) is not None and overhead(found) <= overhead(hand)
    )


def _tried(load: Load, budget: int) -> Buckets | None:
    try:
        return load.suggested(budget)
    except UsageError:  # the budget is too small for any buckets
        return None


def _seconds(buckets: Buckets, known: CompileSeconds) -> float:
    table = buckets.table
    return known.of(decoder_specs(table) if isinstance(table, Generate) else encoder_specs(table))


def _described(buckets: Buckets, known: CompileSeconds) -> dict[str, Any]:
    table = buckets.table
    sizes = (
        {"shapes": table.shapes}
        if isinstance(table, Encode)
        else {"batch": table.batch, "prompt": table.prompt, "context": table.context}
    )
    return {
        **sizes,
        "programs": buckets.programs,
        "compile_seconds": round(_seconds(buckets, known), 1),
        "overhead": round(overhead(buckets), 4),
        "padding": {axis.name: round(axis.padding, 4) for axis in buckets.axes},
    }


def main() -> None:
    """Compare the buckets of each load, and write the figures."""
    parser = option_parser()
    parser.add_argument("--report", type=Path, default=Path("artifacts/demo.report.json"))
    known = read_seconds(parser.parse_args().report)
    facts = begin(1, requests=REQUESTS, seed=SEED, seconds_by_kind=known.by_kind)
    found: dict[str, dict[str, Any]] = {}
    rows = []
    for load in loads():
        hand = load.judged()
        options = {
            "by hand": hand,
            "suggested, as many programs": load.suggested(hand.programs),
            "suggested, as little padding": fewest(load, hand),
        }
        found[load.name] = {name: _described(each, known) for name, each in options.items()}
        for name, each in found[load.name].items():
            padding = ", ".join(f"{axis} {share:.0%}" for axis, share in each["padding"].items())
            cells = (f"{each['overhead']:.2f} x", f"{each['programs']}")
            rows.append((load.name, name, padding, *cells, f"{each['compile_seconds']:.0f} s"))
    head = ("load", "buckets", "padding", "computed by needed", "programs", "compiling")
    note = (
        "`computed by needed` is the product over the axes. `as little padding`: the fewest programs that "
        "compute no more than those by hand. The largest sizes are those by hand. Compile times are one "
        "target's, one program after the other, from the means of the demo's kinds of programs; an encoder's "
        "kinds count with the mean of all."
    )
    facts["loads"] = found
    publish(
        facts, "suggested-buckets", "Suggested buckets", [Table("Three loads", head, rows, note)]
    )


if __name__ == "__main__":
    main()
