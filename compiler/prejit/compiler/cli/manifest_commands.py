"""`prejit targets`, `schema`, `suggest` and `check-model`: what helps to write a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prejit.compiler.cli.shared_options import FILE, PATH
from prejit.runtime.cli.command_options import COUNT, JSON, Number
from prejit.runtime.cli.output import print_json, print_text

if TYPE_CHECKING:
    from prejit.compiler.checking.subject import Finding
    from prejit.compiler.manifest.chosen_buckets import Buckets
    from prejit.compiler.manifest.manifest import Manifest
    from prejit.compiler.manifest.request_log import LoggedRequests
    from prejit.compiler.targets.listing import Listed


@click.command(epilog="Examples:\n\n\b\n  prejit targets\n  prejit targets --json")
@JSON
def targets(as_json: bool) -> int:
    """List the targets that a manifest may name, and which of them this machine compiles for."""
    from importlib.metadata import version

    from prejit.compiler.targets.listing import NO, list_targets

    listed = list_targets(version("jax"))
    if as_json:
        rows = [
            {**asdict(each.target), "builds": each.builds != NO, "packages": each.packages}
            | {"how": each.builds, "note": each.note}
            for each in listed
        ]
        print_json({"targets": rows})
    else:
        _print_targets(listed)
    return 0


def _print_targets(listed: Sequence[Listed]) -> None:
    from prejit.runtime.base.wording import size, table
    from prejit.runtime.machine.fingerprint import PLATFORMS

    heads = {
        "cpu": ("cpu", "architecture", "extensions", "loops for"),
        "cuda": ("device", "capability", "memory", "lowest driver"),
        "tpu": ("device", "chips", "memory of each"),
    }
    for platform in PLATFORMS:
        rows, notes = [], dict[str, list[str]]()
        for each in listed:
            found = each.target
            if found.platform != platform:
                continue
            memory = size(found.memory_bytes) if found.memory_bytes else ""
            features = found.cpu_features
            cells = {
                "cpu": (
                    found.cpu or "this machine",
                    found.architecture,
                    "all of this machine" if features is None else f"{len(features)}",
                    f"{found.cpus} CPUs",
                ),
                "cuda": (
                    found.device_kind or "",
                    found.compute_capability or "",
                    memory,
                    found.driver or "",
                ),
                "tpu": (found.device_kind or "", found.topology or "", memory),
            }
            rows.append((found.name, *cells[platform], each.builds))
            if each.packages:
                note = f"the first download: {', '.join(each.packages)}"
                notes.setdefault(note, [])
            if each.note:
                notes.setdefault(each.note, []).append(found.name)
        print_text(table((platform, *heads[platform], "builds here"), rows))
        for note, names in notes.items():
            print_text(f"  {', '.join(names)}: {note}" if names else f"  {note}")
        print_text("")


@click.command(
    epilog="Examples:\n\n\b\n  prejit schema > prejit.schema.json\n\n"
    "Editors with a TOML language server (taplo, Even Better TOML) complete and check a manifest whose first "
    "line is `#:schema prejit.schema.json`."
)
def schema() -> int:
    """Print the JSON Schema of manifests."""
    from prejit.compiler.manifest.manifest_tables import manifest_schema

    print_json(manifest_schema())
    return 0


@click.command(
    epilog="Examples:\n\n\b\n  prejit suggest requests.jsonl --manifest manifests/demo.toml\n"
    "  prejit suggest lengths.csv --programs 24\n\n"
    "LOG is what `prejit serve --log` wrote; or JSON lines, or CSV with a line of names, that have "
    "prompt_tokens and new_tokens for a decoder, or length for an encoder, and batch where it is known."
)
@click.argument("log", type=PATH, metavar="LOG", help="Recorded requests.")
@click.option(
    "--manifest", **FILE, help="Compare with the buckets of this manifest. Its largest sizes stay."
)
@click.option(
    "--programs",
    **COUNT,
    help="The most programs for each target (default: as many as the manifest has).",
)
@click.option("--model", metavar="NAME", help="Only requests to this bundle of the log.")
@click.option(
    "--build-report",
    "report",
    **FILE,
    help="Report of a build, for its compile times (default: artifacts/NAME.report.json, if it is there).",
)
@JSON
def suggest(
    log: Path,
    manifest: Path | None,
    programs: int | None,
    model: str | None,
    report: Path | None,
    as_json: bool,
) -> int:
    """Choose the buckets that pad the requests of LOG least, for a budget of programs."""
    from prejit.compiler.manifest.reading import read_manifest
    from prejit.compiler.manifest.request_log import read_log
    from prejit.runtime.errors import UsageError

    of = None if manifest is None else read_manifest(manifest)
    today, suggested = _buckets(read_log(log, model), of, programs)
    if report is None and of is not None:
        there = Path("artifacts", f"{of.bundle.name}.report.json")
        report = there if there.exists() else None
    if report is not None and today is None:
        raise UsageError("--build-report: expected --manifest beside it, found none")
    seconds = _seconds(report, of, (today, suggested))
    if as_json:
        print_json(
            {
                "today": None if today is None else _described(today, seconds[0]),
                "suggested": _described(suggested, seconds[1]),
            }
        )
        return 0
    _print_buckets(today, suggested, seconds)
    return 0


def _buckets(
    log: LoggedRequests, manifest: Manifest | None, programs: int | None
) -> tuple[Buckets | None, Buckets]:
    """Return the buckets of today, if there is a manifest, and the suggested ones."""
    from prejit.compiler.manifest.chosen_buckets import (
        decoder_buckets,
        encoder_buckets,
        suggest_decoder,
        suggest_encoder,
    )
    from prejit.runtime.errors import UsageError

    generate = None if manifest is None else manifest.generate
    encode = None if manifest is None else manifest.encode
    if manifest is not None and generate is None and encode is None:
        raise UsageError(
            f"{manifest.where}: expected [generate] or [encode], found [[program]] alone",
            hint="`suggest` chooses the buckets of models",
        )
    if manifest is None and log.generations and log.encodings:
        raise UsageError(
            "expected a log of a decoder or of an encoder, found both",
            hint="name the bundle: --model NAME, or give --manifest FILE",
        )
    is_decoder = bool(log.generations) if manifest is None else generate is not None
    if not (log.generations if is_decoder else log.encodings):
        what = "a decoder (prompt_tokens)" if is_decoder else "an encoder (length)"
        raise UsageError(f"expected requests to {what} in the log, found none")
    today: Buckets | None = None
    if generate is not None:
        today = decoder_buckets(log, generate)
    elif encode is not None:
        today = encoder_buckets(log, encode)
    budget = today.programs if programs is None and today is not None else programs
    if budget is None:
        raise UsageError(
            "expected a budget of programs, found none",
            hint="give --programs N, or the buckets of today: --manifest FILE",
        )
    if is_decoder:
        mesh = None if manifest is None else manifest.mesh
        rows = 1 if mesh is None else mesh.data
        return today, suggest_decoder(log, budget, generate, batch_multiple=rows)
    return today, suggest_encoder(log, budget, encode)


def _seconds(
    report: Path | None, manifest: Manifest | None, each: tuple[Buckets | None, Buckets]
) -> list[float | None]:
    """Return the estimated compile seconds of buckets for all targets; None: not known."""
    from prejit.compiler.manifest.chosen_buckets import read_seconds
    from prejit.compiler.manifest.manifest import Generate
    from prejit.compiler.manifest.specs import decoder_specs, encoder_specs

    if report is None or manifest is None:
        return [None for _ in each]
    known = read_seconds(report)
    found: list[float | None] = []
    for one in each:
        assert one is not None
        table = one.table
        specs = decoder_specs(table) if isinstance(table, Generate) else encoder_specs(table)
        found.append(known.of(specs) * len(manifest.targets))
    return found


def _sizes(buckets: Buckets) -> dict[str, Any]:
    from prejit.compiler.manifest.manifest import Encode

    table = buckets.table
    if isinstance(table, Encode):
        return {"shapes": [list(shape) for shape in table.shapes]}
    return {name: list(getattr(table, name)) for name in ("batch", "prompt", "context")}


def _described(buckets: Buckets, seconds: float | None) -> dict[str, Any]:
    return {
        **_sizes(buckets),
        "programs": buckets.programs,
        "compile_seconds": None if seconds is None else round(seconds, 1),
        "beyond": buckets.beyond,
        "padding": [{**asdict(axis), "share": round(axis.padding, 4)} for axis in buckets.axes],
    }


def _print_buckets(today: Buckets | None, suggested: Buckets, seconds: list[float | None]) -> None:
    from prejit.compiler.manifest.manifest import Encode
    from prejit.runtime.base.wording import table

    columns = [each for each in (today, suggested) if each is not None]
    rows = [
        (f"padding in {axis.what}", *(f"{each.axes[place].padding:.1%}" for each in columns))
        for place, axis in enumerate(suggested.axes)
    ]
    rows.append(("programs for each target", *(f"{each.programs}" for each in columns)))
    if seconds[-1] is not None:
        estimates = [f"{each:.0f} s" for each in seconds if each is not None]
        rows.append(("compiling all targets, on one core", *estimates))
    if any(each.beyond for each in columns):
        rows.append(("requests longer than that", *(f"{each.beyond}" for each in columns)))
    head = ["", *(("today",) if today is not None else ()), "suggested"]
    print_text(table(head, rows))
    if len(suggested.axes) == 2:
        print_text(
            "\nThe log has neither times nor batches: the batches are "
            + ("those of today." if today is not None else "a guess.")
        )
    section = "encode" if isinstance(suggested.table, Encode) else "generate"
    print_text(f"\n[{section}]")
    for name, sizes in _sizes(suggested).items():
        print_text(f"{name} = {sizes}")


@click.command(
    "check-model",
    epilog="Examples:\n\n\b\n  prejit check-model model:model\n"
    "  prejit check-model my_package.model:make_model --params weights.safetensors\n"
    "  prejit check-model model:model --reference reference:logits\n"
    "  prejit check-model models/Qwen3-0.6B\n\n"
    "A reference takes tokens int32 [B, T] and returns the logits after each token, [B, T, V], as an array "
    "of NumPy, jax or torch. For an encoder-decoder it takes sources, their lengths, and tokens.\n\n"
    "Exit status: 0 the model passes all checks, 1 it does not.",
)
@click.argument(
    "model",
    metavar="MODEL",
    help="A decoder as module:object, or what makes one; a published model's directory or .gguf file; or the "
    "directory of an adapter of PEFT.",
)
@click.option(
    "--params",
    **FILE,
    help="Values of the model's parameters: a .safetensors file or an orbax directory (default: its own).",
)
@click.option(
    "--reference",
    metavar="MODULE:FUNCTION",
    help="Compare the logits after each token with those of a reference.",
)
@click.option(
    "--tolerance",
    type=Number(0, min_open=True),
    default=1e-4,
    metavar="X",
    help="Largest difference of equal logits, relative to their spread.",
)
@click.option(
    "--source-size",
    **COUNT,
    default=16,
    help="Places of an encoder-decoder's sources, for one that takes a certain number only.",
)
def check_model(
    model: str, params: Path | None, reference: str | None, tolerance: float, source_size: int
) -> int:
    """Check that a model of yours generates the same text however the engine cuts, pads and batches it.

    MODEL is an object with the methods of a decoder, or a function or class that makes one without
    arguments. The module is in this directory or installed. With the directory of a published model, in the
    layout of Hugging Face, print what a build would make of it: its sizes, the memory that a build takes,
    the most tokens a second that this machine's memory allows; or what is not supported. With that of an
    adapter, print what a manifest says to take it.
    """
    published = Path(model)
    if published.suffix == ".gguf" and published.is_file():
        from prejit.compiler.checkpoint.model_source import model_directory

        directory = model_directory(published)
        _print_published(directory, directory / published.name)
        return 0
    from prejit.compiler.checkpoint.adapters import describe_adapter, is_adapter

    if is_adapter(published):
        print_text(describe_adapter(published))
        return 0
    if published.is_dir():
        _print_published(published)
        return 0
    from prejit.compiler.checking.kit import check_user_model

    findings = check_user_model(
        model, params=params, against=reference, tolerance=tolerance, source_size=source_size
    )
    _print_findings(findings)
    return 0 if all(finding.passed for finding in findings) else 1


def _print_published(directory: Path, weights: Path | None = None) -> None:
    """Print the sizes and estimates of a published model, and what is missing."""
    from prejit.compiler.checking.published_model import check_published
    from prejit.compiler.comparing.inspected_programs import measure_reading
    from prejit.runtime.base.wording import size, table

    found = check_published(directory, weights)
    decodes = found.section == "generate"
    rate = measure_reading() if decodes else 0.0
    rows = [
        (
            each.dtype,
            size(each.weights_bytes),
            size(each.build_bytes),
            size(each.read_bytes),
            *([f"{rate / each.read_bytes:,.0f}"] if decodes else []),
        )
        for each in found.sizes
    ]
    head = ("dtype", "weights", "memory to build", "read for a token")
    print_text(table((*head, *(["tokens/s at most"] if decodes else [])), rows))
    if decodes:
        print_text(
            f"\ntokens/s: of one text, at {rate / 1e9:.1f} GB/s from memory, measured just now"
        )
    reads = (
        f"texts up to {found.positions:,} tokens" if found.positions else "it reads images alone"
    )
    print_text(
        f"\n{found.family}, for [{found.section}]: {found.parameters:,} parameters in {found.tensors} "
        f"arrays, all used; {reads}"
    )
    if found.cache_bytes is not None:
        whole = size(found.cache_bytes * found.positions)
        print_text(f"KV cache in float32: {size(found.cache_bytes)} for a token, {whole} for all")
    if found.positions and not found.tokenizer:
        print_text(f"missing: {directory / 'tokenizer.json'}; requests have to give token ids")


def _print_findings(findings: Sequence[Finding]) -> None:
    from prejit.runtime.base.wording import table

    rows = [
        (
            finding.name,
            "pass" if finding.passed else "FAIL",
            "" if finding.difference is None else f"{finding.difference:.1e}",
        )
        for finding in findings
    ]
    print_text(table(("check", "result", "worst difference"), rows))
    failed = [finding for finding in findings if not finding.passed]
    for finding in failed:
        print_text(f"\n{finding.name}: {finding.found}\n  change: {finding.change}")
    print_text(
        f"\n{len(findings)} checks: {len(findings) - len(failed)} passed, {len(failed)} failed"
    )
