"""`prejit encode`: embeddings of sentences."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any, Literal

import click

from prejit.runtime.base.process_facts import seconds_since_exec
from prejit.runtime.cli.bundle_references import load_bundle
from prejit.runtime.cli.command_options import BUNDLE, CHECK_FINITE, JSON, STATS, loads
from prejit.runtime.cli.output import print_json, print_start, print_text, warnings_on_stderr


@click.command(
    epilog="Examples:\n\n\b\n"
    "  prejit encode artifacts/encoder 'a sentence' 'another' --json > embeddings.json"
)
@BUNDLE
@click.argument("text", metavar="TEXT...", nargs=-1, required=True, help="A sentence.")
@click.option(
    "--on-too-long",
    type=click.Choice(("truncate", "error")),
    default="truncate",
    help="For a sentence that is longer than the model takes.",
)
@CHECK_FINITE
@STATS
@loads
@JSON
def encode(
    path: str,
    text: tuple[str, ...],
    on_too_long: Literal["truncate", "error"],
    check_finite: bool,
    stats: bool,
    as_json: bool,
    **loading: Any,
) -> int:
    """Print the embeddings of sentences: one line of numbers each, or JSON with statistics."""
    bundle = load_bundle(path, **loading)
    if check_finite:
        bundle.check_finite()
    with warnings_on_stderr():
        encoded = bundle.encode_batch(text, on_too_long=on_too_long)
    rows = encoded.embeddings.tolist()
    if as_json:
        print_json(
            {
                "embeddings": rows,
                "stats": asdict(encoded.stats),
                "load_seconds": round(bundle.load_seconds, 4),
                "first_embedding_seconds_since_exec": round(seconds_since_exec(), 4),
                "target": bundle.target,
                "matched": bundle.matched,
                "start": asdict(bundle.start_report()),
            }
        )
        return 0
    for row in rows:
        print_text(" ".join(f"{value:.6g}" for value in row))
    if stats:
        used = ", ".join(f"{runs} x {bucket}" for bucket, runs in encoded.stats.buckets.items())
        print_text(
            f"{encoded.stats.tokens} tokens of {len(rows)} sentences in {used}; "
            f"{encoded.stats.padding:.0%} padding; {encoded.stats.run_seconds * 1e3:.1f} ms",
            file=sys.stderr,
        )
        print_start(bundle.start_report())
    return 0
