"""`prejit encode`: embeddings of sentences."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import asdict

from prejit.runtime.base.process import seconds_since_exec
from prejit.runtime.cli.loading import load_bundle
from prejit.runtime.cli.output import print_json, print_start, print_text, warnings_on_stderr


def encode(options: Namespace) -> int:
    """Print the embeddings of sentences: one line of numbers each, or JSON with statistics."""
    bundle = load_bundle(options)
    with warnings_on_stderr():
        encoded = bundle.encode_batch(options.text, on_too_long=options.on_too_long)
    rows = encoded.embeddings.tolist()
    stats = asdict(encoded.stats)
    if options.json:
        print_json(
            {
                "embeddings": rows,
                "stats": stats,
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
    if options.stats:
        used = ", ".join(f"{runs} x {bucket}" for bucket, runs in encoded.stats.buckets.items())
        print_text(
            f"{encoded.stats.tokens} tokens of {len(rows)} sentences in {used}; "
            f"{encoded.stats.padding:.0%} padding; {encoded.stats.run_seconds * 1e3:.1f} ms",
            file=sys.stderr,
        )
        print_start(bundle.start_report())
    return 0
