"""`prejit generate` and `prejit encode`: text from a prompt, and embeddings of sentences."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from prejit.runtime.base.process_facts import seconds_since_exec
from prejit.runtime.base.wording import table
from prejit.runtime.cli.command_options import (
    BUNDLE,
    CHECK_FINITE,
    JSON,
    STATS,
    check_one,
    load_bundle,
    loads,
)
from prejit.runtime.cli.output import print_json, print_start, print_text, warnings_on_stderr
from prejit.runtime.errors import NumbersError, UsageError, printable
from prejit.runtime.generation.options import OPTIONS, Option

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.runtime.generation.generate import Piece

_F = TypeVar("_F")
_METAVARS = {int: "N", float: "X", list: "TEXT", str: "TEXT"}
"""The value of a generation option as the help shows it, by its type."""


def _generation_options(command: _F) -> _F:
    """Add the flags of the options of a generation. The value None means that one is not given."""
    for option in reversed(OPTIONS.values()):
        if option.flag is not None:
            command = _flag(option, option.flag)(command)
    return command


def _flag(option: Option, kind: type) -> Any:
    name, text = f"--{option.name.replace('_', '-')}", option.help[0].upper() + option.help[1:]
    if kind is bool:
        return click.option(name, is_flag=True, help=f"{text}.")
    if option.default not in (None, ()):
        own = ", unless the bundle has its own" if option.published else ""
        text = f"{text} (default: {option.default:g}{own})"
    several = kind is list
    return click.option(
        name,
        type=str if several else kind,
        multiple=several,
        metavar=_METAVARS[kind],
        help=f"{text}.",
    )


def _token_ids(text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(
            f"expected integers separated by commas, found {text!r:.80}"
        ) from error


@click.command(
    epilog="Examples:\n\n\b\n  prejit generate artifacts/demo --prompt 'def main(' --max-new-tokens 64\n"
    "  prejit generate artifacts/demo --prompt-ids 1,5,9 --temperature 0.8 --top-p 0.9 --seed 7\n"
    "  prejit generate artifacts/demo --prompt 'import' --on-mismatch error --json\n"
    "  prejit generate artifacts/assistant --chat 'Why is the sky blue?'"
)
@BUNDLE
@click.option("--prompt", metavar="TEXT", help="Text to continue.")
@click.option(
    "--prompt-ids", type=_token_ids, metavar="IDS", help="Token ids, separated by commas."
)
@click.option(
    "--chat", metavar="TEXT", help="A user's message; the bundle's chat template makes the prompt."
)
@click.option(
    "--image",
    "image_files",
    multiple=True,
    metavar="FILE",
    help="An image of the prompt, which has a mark for each; before the message of --chat. May be repeated.",
)
@_generation_options
@CHECK_FINITE
@STATS
@loads
@JSON
def generate(
    path: str,
    prompt: str | None,
    prompt_ids: list[int] | None,
    chat: str | None,
    image_files: tuple[str, ...],
    check_finite: bool,
    stats: bool,
    as_json: bool,
    on_mismatch: Literal["jit", "error"],
    fingerprint: str | None,
    **options: Any,
) -> int:
    """Generate text from a prompt and print it piece by piece."""
    prompts = {"--prompt": prompt, "--prompt-ids": prompt_ids, "--chat": chat}
    check_one(prompts, required=options["source"] is None)
    bundle = load_bundle(path, on_mismatch, fingerprint)
    if check_finite:
        bundle.check_finite()
    given: str | list[int] | None = prompt if prompt_ids is None else prompt_ids
    if chat is not None:
        parts = [*({"type": "image"} for _ in image_files), {"type": "text", "text": chat}]
        content = parts if image_files else chat
        given = bundle.apply_chat_template([{"role": "user", "content": content}])
    pieces: list[Piece] = []
    first_seconds = 0.0
    # Text of a model is data. Only a terminal acts on control characters, so they are escaped there alone.
    terminal = sys.stdout is not None and sys.stdout.isatty()
    started = time.perf_counter()
    if options["source"] is not None:
        options["source"] = _source(bundle, options["source"])
    if image_files:
        options["images"] = image_files
    if options["adapter"] is not None:
        options["adapter"] = bundle.adapters.load("adapter", options["adapter"])
    for piece in bundle.stream(given, **options):
        if not pieces:
            first_seconds, started = seconds_since_exec(), time.perf_counter()
        pieces.append(piece)
        if not as_json:
            text = piece.text
            if not bundle.has_tokenizer and piece.token_id is not None:
                text = f"{piece.token_id} "
            print(printable(text) if terminal else text, end="", flush=True)
    seconds = time.perf_counter() - started
    tokens = [piece.token_id for piece in pieces if piece.token_id is not None]
    rate = (len(tokens) - 1) / seconds if len(tokens) > 1 else 0.0
    counted = pieces[-1].stats
    assert counted is not None
    if as_json:
        print_json(
            {
                "text": "".join(piece.text for piece in pieces),
                "token_ids": tokens,
                "finish_reason": pieces[-1].finish_reason,
                "logprobs": [asdict(p.logprob) for p in pieces if p.logprob is not None],
                "stats": asdict(counted),
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
    if stats and not as_json:
        used = [report for report in bundle.report() if report.source != "unused"]
        compiled = [report.program for report in used if report.source == "compiled"]
        rows = [(r.program, r.source, f"{r.seconds * 1e3:.0f} ms") for r in used]
        print_text(f"\n{table(['program', 'how', 'took'], rows)}", file=sys.stderr)
        print_text(
            f"\n{bundle.name} for {bundle.target}, {bundle.digest[:19]}\n"
            f"first token {first_seconds:.2f} s after the start of the process, "
            f"then {rate:.0f} tokens a second; {counted.new_tokens} tokens in {counted.passes} passes, "
            f"{counted.padding:.0%} padding\n"
            f"compiled: {', '.join(compiled) or 'nothing'}",
            file=sys.stderr,
        )
        print_start(bundle.start_report())
    return 0


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
