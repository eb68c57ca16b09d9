"""`prejit generate`: text from a prompt."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prejit.runtime.base.process import seconds_since_exec
from prejit.runtime.base.tables import table
from prejit.runtime.cli.loading import load_bundle
from prejit.runtime.cli.output import print_json, print_start, print_text
from prejit.runtime.errors import NumbersError, UsageError, printable
from prejit.runtime.generation.options import OPTIONS

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.runtime.generation.generate import Piece


def generate(options: Namespace) -> int:
    """Generate text and print each piece as it arrives."""
    bundle = load_bundle(options)
    prompt = _prompt(bundle, options)
    pieces: list[Piece] = []
    first_seconds = 0.0
    # Text of a model is data. Only a terminal acts on control characters, so they are escaped there alone.
    terminal = sys.stdout is not None and sys.stdout.isatty()
    started = time.perf_counter()
    flags = {name: getattr(options, name) for name, option in OPTIONS.items() if option.flag}
    given: Any = {name: value for name, value in flags.items() if value is not None}
    if options.source is not None:
        given["source"] = _source(bundle, options.source)
    for piece in bundle.stream(prompt, **given):
        if not pieces:
            first_seconds, started = seconds_since_exec(), time.perf_counter()
        pieces.append(piece)
        if not options.json:
            text = (
                piece.text
                if bundle.has_tokenizer
                else f"{piece.token_id} " * (piece.token_id is not None)
            )
            print(printable(text) if terminal else text, end="", flush=True)
    seconds = time.perf_counter() - started
    tokens = [piece.token_id for piece in pieces if piece.token_id is not None]
    rate = (len(tokens) - 1) / seconds if len(tokens) > 1 else 0.0
    stats = pieces[-1].stats
    assert stats is not None
    if options.json:
        print_json(
            {
                "text": "".join(piece.text for piece in pieces),
                "token_ids": tokens,
                "finish_reason": pieces[-1].finish_reason,
                "logprobs": [asdict(p.logprob) for p in pieces if p.logprob is not None],
                "stats": asdict(stats),
                "first_token_seconds_since_exec": round(first_seconds, 4),
                "load_seconds": round(bundle.load_seconds, 4),
                "tokens_per_second": round(rate, 2),
                "target": bundle.target,
                "matched": bundle.matched,
                "programs": [asdict(report) for report in bundle.report()],
                "start": asdict(bundle.start_report()),
            }
        )
    else:
        print_text()
    if pieces[-1].finish_reason == "nan":
        raise NumbersError(
            f"{bundle.name}: expected logits that are numbers, found NaN or infinity after {len(tokens)} "
            "new tokens",
            hint="the model's weights are broken, or too large for the cache_dtype of the manifest",
        )
    if options.stats and not options.json:
        used = [report for report in bundle.report() if report.source != "unused"]
        compiled = [report.program for report in used if report.source == "compiled"]
        rows = [(r.program, r.source, f"{r.seconds * 1e3:.0f} ms") for r in used]
        print_text(f"\n{table(['program', 'how', 'took'], rows)}", file=sys.stderr)
        print_text(
            f"\n{bundle.name} for {bundle.target}, {bundle.digest[:19]}\n"
            f"first token {first_seconds:.2f} s after the start of the process, "
            f"then {rate:.0f} tokens a second; {stats.new_tokens} tokens in {stats.passes} passes, "
            f"{stats.padding:.0%} padding\n"
            f"compiled: {', '.join(compiled) or 'nothing'}",
            file=sys.stderr,
        )
        print_start(bundle.start_report())
    return 0


def _prompt(bundle: Bundle, options: Namespace) -> str | list[int] | None:
    if options.chat is not None:
        return bundle.apply_chat_template([{"role": "user", "content": options.chat}])
    if options.prompt_ids is not None:
        return _token_ids(options.prompt_ids)
    prompt: str | None = options.prompt
    return prompt


def _source(bundle: Bundle, given: str) -> Any:
    """Return what an encoder-decoder is to read: a text if it reads tokens, else the array of a file."""
    array = bundle.decoder.source
    if array is None or array.dtype == "int32":
        return given
    import numpy as np

    try:
        return np.load(given, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(
            f"--source: expected a .npy file of {array.dtype}, cannot read {given}: {error}"
        ) from error


def _token_ids(text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError as error:
        raise UsageError(
            f"--prompt-ids: expected integers separated by commas, found {text!r:.80}"
        ) from error
