"""The commands of the build side: `prejit plan`, `build`, `record`, `sign` and others.

Each command reads its options, calls one function of the build side and prints what that returns.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from prejit.compiler.checking.finding import Finding
    from prejit.compiler.garbage import Found
    from prejit.compiler.manifest.manifest import Manifest
    from prejit.compiler.pipeline.plan import PlannedExecutable
    from prejit.compiler.pipeline.run import Built
    from prejit.compiler.signing.keyless import KeylessSigner
    from prejit.compiler.signing.private_key import PrivateKey
    from prejit.compiler.targets.listing import Listed

PLAN_HAS_CHANGES = 8

_path = click.Path(path_type=Path)
_targets = click.option(
    "--target", "targets", multiple=True, metavar="NAME", help="Only this target; may be repeated."
)
_cache = click.option(
    "--cache",
    type=_path,
    metavar="DIR",
    help="Build cache (default: $PREJIT_CACHE or ~/.cache/prejit/build).",
)
_shared = click.option(
    "--store",
    "shared",
    metavar="URL",
    help="A store that many machines share: http(s)://, s3://, gs://, az://, oci://, a directory, or a TOML "
    "file with several (default: $PREJIT_STORE).",
)
_forms = click.option(
    "--forms",
    type=_path,
    metavar="FILE",
    help="A table of measured forms, as builds keep it in the build cache (forms.json).",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


@click.group()
def commands() -> None:
    """Compile JAX models ahead of time and package them."""


@commands.command(
    epilog="Examples:\n\n\b\n  prejit plan manifests/demo.toml\n"
    "  prejit plan manifests/demo.toml --target cpu-x86-64-v3 --json\n\n"
    "A plan compiles and traces nothing. Only a build shows whether the executable of a [[program]] is "
    "cached, because it traces the function.\n\n"
    f"Exit status: 0 everything is cached, {PLAN_HAS_CHANGES} something compiles or is traced at build."
)
@click.argument("manifest", type=_path)
@_targets
@_forms
@_cache
@_shared
@_json
def plan(
    manifest: Path,
    targets: tuple[str, ...],
    forms: Path | None,
    cache: Path | None,
    shared: str | None,
    as_json: bool,
) -> int:
    """Show programs x targets of MANIFEST: what is cached, what will compile and why."""
    from prejit.compiler.api import plan as plan_manifest
    from prejit.compiler.pipeline.plan import CACHED, COMPILE, TRACED

    executables = plan_manifest(manifest, targets=targets, cache=cache, shared=shared, forms=forms)
    counts = {
        state: sum(each.state == state for each in executables)
        for state in (CACHED, COMPILE, TRACED)
    }
    if as_json:
        rows = [
            {
                "program": each.spec.name,
                "kind": each.spec.kind,
                "bucket": each.spec.bucket,
                "target": each.target.name,
                "state": each.state,
                "cached": each.cached,
                "where": each.where,
                "why": each.why,
            }
            for each in executables
        ]
        summary = {"to_compile": counts[COMPILE], "traced_at_build": counts[TRACED]}
        _print_json({"programs": rows, **summary})
    else:
        _print_plan(executables)
        traced = f", {counts[TRACED]} {TRACED}" if counts[TRACED] else ""
        click.echo(
            f"\n{len(executables)} programs: {counts[CACHED]} cached, "
            f"{counts[COMPILE]} to compile{traced}"
        )
    return 0 if counts[CACHED] == len(executables) else PLAN_HAS_CHANGES


def _print_plan(executables: Sequence[PlannedExecutable]) -> None:
    """Print one row for each program, one column for each target; reasons below, once each."""
    from prejit.compiler.pipeline.plan import reasons
    from prejit.compiler.store.directory import LOCAL

    targets = list(dict.fromkeys(each.target.name for each in executables))
    states: dict[str, dict[str, str]] = {}
    for each in executables:
        is_shared = each.cached and each.where != LOCAL
        states.setdefault(each.spec.name, {})[each.target.name] = (
            "shared" if is_shared else each.state
        )
    rows = [["program", *targets]] + [
        [name, *(cells[target] for target in targets)] for name, cells in states.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    if counted := reasons(executables):
        click.echo("\nwhy:")
    for reason, count in counted.items():
        click.echo(f"  {count:>4} x  {reason}")


@commands.command(
    epilog="Examples:\n\n\b\n  prejit build manifests/demo.toml\n"
    "  prejit build manifests/*.toml -o /srv/bundles --jobs 8\n"
    "  prejit build manifests/demo.toml --target cpu-x86-64-v3"
)
@click.argument("manifests", nargs=-1, required=True, type=_path, metavar="MANIFEST...")
@click.option(
    "-o",
    "--output",
    type=_path,
    default=Path("artifacts"),
    show_default=True,
    metavar="DIR",
    help="Directory of bundles; each is written to DIR/NAME.",
)
@_targets
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compile processes side by side (default: cores).",
)
@click.option(
    "--timeout",
    type=click.IntRange(min=1),
    default=3600,
    show_default=True,
    metavar="SECONDS",
    help="Give up on a program that takes longer to compile, or to measure.",
)
@click.option(
    "--skip-unbuildable",
    is_flag=True,
    help="Leave out targets that this machine cannot compile for, and name them.",
)
@_forms
@click.option(
    "--measure/--no-measure",
    default=None,
    help="Measure how products are computed fastest: all of them, or none (default: large ones that no "
    "table has).",
)
@_cache
@_shared
@_json
def build(
    manifests: tuple[Path, ...],
    output: Path,
    targets: tuple[str, ...],
    jobs: int | None,
    timeout: int,
    skip_unbuildable: bool,
    forms: Path | None,
    measure: bool | None,
    cache: Path | None,
    shared: str | None,
    as_json: bool,
) -> int:
    """Compile each MANIFEST and write its bundle. What did not change is not compiled again."""
    from prejit.compiler.api import build as build_bundle

    built = []
    for manifest in _read_all(manifests):
        started = time.perf_counter()
        only = _buildable(manifest, targets) if skip_unbuildable else targets
        if skip_unbuildable and not only:
            continue
        result = build_bundle(
            manifest,
            output,
            targets=only,
            cache=cache,
            shared=shared,
            forms=forms,
            measure=measure,
            workers=jobs,
            timeout_seconds=timeout,
        )
        seconds = time.perf_counter() - started
        built.append({**asdict(result), "path": str(result.path), "seconds": round(seconds, 3)})
        if not as_json:
            _print_built(result, seconds)
    if as_json:
        _print_json(built)
    return 0


def _read_all(paths: Sequence[Path]) -> list[Manifest]:
    """Read manifests and check that their bundle names differ. A second bundle would replace the first.

    Raises:
        UsageError: two manifests have the same bundle name.
        ManifestError, StoreError: a manifest has mistakes, or cannot be read.
    """
    from prejit.compiler.manifest.reading import read_manifest
    from prejit.runtime.errors import UsageError

    found: dict[str, Path] = {}
    manifests = []
    for path in paths:
        manifest = read_manifest(path)
        name = manifest.bundle.name
        if (first := found.setdefault(name, path)) is not path:
            raise UsageError(
                f"{path}: bundle.name: expected another name than that of {first}, found {name!r}; "
                "nothing was built",
                hint="give the bundles different names, or build them into different directories",
            )
        manifests.append(manifest)
    return manifests


def _print_built(result: Built, seconds: float) -> None:
    from prejit.compiler.progress import tell
    from prejit.runtime.cli.tables import accuracy_table

    wrote = "wrote" if result.written else "up to date:"
    tell(
        f"{wrote} {result.path}: compiled {result.compiled}, cached {result.cached}, "
        f"{seconds:.1f} s, {result.digest[:19]}"
    )
    if result.accuracy is not None:
        tell(accuracy_table(result.accuracy), sys.stdout)  # a closed stdout must not stop the rest


def _buildable(manifest: Manifest, only: tuple[str, ...]) -> tuple[str, ...]:
    """Return the targets that this machine can compile for, and print the others."""
    from prejit.compiler.pipeline.plan import why_not
    from prejit.compiler.progress import tell
    from prejit.compiler.targets.target_table import chosen

    buildable = []
    for target in chosen(manifest.targets, only, manifest.where):
        if reason := why_not(target):
            tell(f"{manifest.where}: left out {target.name}: {reason}")
        else:
            buildable.append(target.name)
    return tuple(buildable)


@commands.command(
    "check-model",
    epilog="Examples:\n\n\b\n  prejit check-model model:model\n"
    "  prejit check-model my_package.model:make_model --params weights.safetensors\n"
    "  prejit check-model model:model --against reference:logits\n\n"
    "A reference takes tokens int32 [B, T] and returns the logits after each token, [B, T, V], as an array "
    "of NumPy, jax or torch. For an encoder-decoder it takes sources, their lengths, and tokens.\n\n"
    "Exit status: 0 the model passes all checks, 1 it does not.",
)
@click.argument("model", metavar="MODULE:MODEL")
@click.option(
    "--params",
    type=_path,
    metavar="FILE",
    help="Values of the model's parameters: a .safetensors file or an orbax directory (default: its own).",
)
@click.option(
    "--against",
    metavar="MODULE:FUNCTION",
    help="Compare the logits after each token with those of a reference.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, min_open=True),
    default=1e-4,
    show_default=True,
    metavar="X",
    help="Largest difference of equal logits, relative to their spread.",
)
@click.option(
    "--source",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    metavar="N",
    help="Places of an encoder-decoder's sources, for one that takes a certain number only.",
)
def check_model(
    model: str, params: Path | None, against: str | None, tolerance: float, source: int
) -> int:
    """Check that a model of yours generates the same text however the engine cuts, pads and batches it.

    MODULE:MODEL is an object with the methods of a decoder, or a function or class that makes one without
    arguments. The module is in this directory or installed.
    """
    from prejit.compiler.checking.user_model import check_user_model

    findings = check_user_model(
        model, params=params, against=against, tolerance=tolerance, source_size=source
    )
    _print_findings(findings)
    return 0 if all(finding.passed for finding in findings) else 1


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print a table; below, what is wrong and what to change."""
    from prejit.runtime.base.tables import table
    from prejit.runtime.errors import printable

    rows = [
        (
            finding.name,
            "pass" if finding.passed else "FAIL",
            "" if finding.difference is None else f"{finding.difference:.1e}",
        )
        for finding in findings
    ]
    click.echo(table(("check", "result", "worst difference"), rows))
    failed = [finding for finding in findings if not finding.passed]
    for finding in failed:
        click.echo(printable(f"\n{finding.name}: {finding.found}\n  change: {finding.change}"))
    click.echo(
        f"\n{len(findings)} checks: {len(findings) - len(failed)} passed, {len(failed)} failed"
    )


@commands.command(epilog="Examples:\n\n\b\n  prejit targets\n  prejit targets --json")
@_json
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
        _print_json({"targets": rows})
    else:
        _print_targets(listed)
    return 0


def _print_targets(listed: Sequence[Listed]) -> None:
    """Print a table for each platform; notes below, once each."""
    from prejit.runtime.base.tables import size, table
    from prejit.runtime.machine.requirement import PLATFORMS

    heads = {
        "cpu": ("cpu", "architecture", "extensions"),
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
        click.echo(table((platform, *heads[platform], "builds here"), rows))
        for note, names in notes.items():
            click.echo(f"  {', '.join(names)}: {note}" if names else f"  {note}")
        click.echo("")


@commands.command(
    epilog="Examples:\n\n\b\n  prejit schema > prejit.schema.json\n\n"
    "Editors with a TOML language server (taplo, Even Better TOML) complete and check a manifest whose first "
    "line is `#:schema prejit.schema.json`."
)
def schema() -> int:
    """Print the JSON Schema of manifests."""
    from prejit.compiler.manifest.schema import manifest_schema

    _print_json(manifest_schema())
    return 0


@commands.command(
    epilog="Examples:\n\n\b\n  prejit record -- python serve.py\n"
    "  prejit record -o artifacts/serve -- gunicorn serve:app\n"
    "  prejit record --manifest serve.toml -- python serve.py\n\n"
    "End a server with Ctrl-C or SIGTERM; the bundle is written then. `prejit run` gives it to the program. "
    "The exit status is that of COMMAND."
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option(
    "-o",
    "--output",
    type=_path,
    metavar="BUNDLE",
    help="Directory of the bundle; one that is there gets the recording in addition (default: artifacts/ "
    "and the name of the program).",
)
@click.option(
    "--manifest",
    type=_path,
    metavar="FILE",
    help="Write a manifest of the functions and shapes that the program called.",
)
@_json
def record(
    command: tuple[str, ...], output: Path | None, manifest: Path | None, as_json: bool
) -> int:
    """Run COMMAND and pack what jax compiles for it into a bundle."""
    from prejit.compiler.progress import tell
    from prejit.compiler.recording.manifest_text import manifest_text
    from prejit.compiler.recording.recorder import default_name
    from prejit.compiler.recording.recorder import record as record_command
    from prejit.runtime.cli.output import write_text

    output = Path("artifacts", default_name(command)) if output is None else output
    recording = record_command(command, output)
    if manifest is not None:
        write_text(os.fspath(manifest), manifest_text(recording.name, recording.requests))
    for line in recording.left_out:
        tell(f"left out {line}")
    tell(
        f"recorded {recording.added} programs: {recording.path} has {recording.programs} for "
        f"{', '.join(recording.targets)}, {recording.digest[:19]}"
    )
    if as_json:
        described = {**asdict(recording), "path": str(recording.path)}
        _print_json({name: value for name, value in described.items() if name != "requests"})
    return recording.status


@commands.command(
    epilog="Examples:\n\n\b\n  openssl ecparam -name prime256v1 -genkey -noout -out release.pem\n"
    "  prejit sign artifacts/demo --key release.pem\n  prejit sign artifacts/demo --keyless\n\n"
    "PREJIT_KEY_PASSWORD is the password of an encrypted key. Several people sign one after the other.\n\n"
    "PREJIT_IDENTITY_TOKEN is the identity token of --keyless where the CI offers none by itself."
)
@click.argument("bundle", type=_path)
@click.option(
    "--key",
    type=_path,
    metavar="FILE",
    help="Private key in PEM: ECDSA on P-256, P-384 or P-521.",
)
@click.option(
    "--keyless",
    is_flag=True,
    help="Sign as the identity that the CI vouches for, by sigstore, over the network. Its public log keeps "
    "the identity and digests for ever.",
)
@click.option(
    "--sigstore",
    "config",
    type=_path,
    metavar="FILE",
    help="Client configuration of another sigstore than the public one, for --keyless.",
)
@_json
def sign(bundle: Path, key: Path | None, keyless: bool, config: Path | None, as_json: bool) -> int:
    """Attach signatures to BUNDLE and to each of its targets, and write BUNDLE.sig.

    cosign and trust policies verify the signatures, and the OpenSSF's model_signing verifies BUNDLE.sig. The
    bundle's digest stays the same.
    """
    from prejit.compiler.progress import tell
    from prejit.compiler.signing.sign import sign as sign_bundle
    from prejit.runtime.errors import UsageError

    if (key is None) != keyless:
        raise UsageError(
            "expected one of --key and --keyless, found " + ("both" if key else "none")
        )
    if config is not None and not keyless:
        raise UsageError("expected --keyless beside --sigstore, found none")
    signed = sign_bundle(bundle, _keyless(config) if key is None else _private_key(key))
    tell(
        f"signed {bundle}: attached {signed.added} signatures, wrote {signed.model_signature}, "
        f"{signed.digest[:19]}" + (f", as {signed.key}" if keyless else "")
    )
    if as_json:
        _print_json({**asdict(signed), "model_signature": str(signed.model_signature)})
    return 0


def _keyless(config: Path | None) -> KeylessSigner:
    from prejit.compiler.signing.keyless import TOKEN_VARIABLE, keyless_signer

    return keyless_signer(os.environ.get(TOKEN_VARIABLE) or None, config)


def _private_key(path: Path) -> PrivateKey:
    from prejit.compiler.signing.private_key import PASSWORD_VARIABLE, read_private_key

    return read_private_key(path, os.environ.get(PASSWORD_VARIABLE) or None)


_channel_name = click.option("--name", required=True, metavar="NAME", help="Name of the channel.")
_signing_keys = click.option(
    "--key",
    "keys",
    type=_path,
    multiple=True,
    required=True,
    metavar="FILE",
    help="Private key in PEM; may be repeated.",
)


@commands.group()
def channel() -> None:
    """Say which bundle is the current one, so that no machine goes back to an older one."""


@channel.command(
    epilog="Examples:\n\n\b\n"
    "  prejit channel release stable.json artifacts/demo --name stable --key release.pem --days 30"
)
@click.argument("file", type=_path)
@click.argument("bundle", type=_path)
@_channel_name
@_signing_keys
@click.option(
    "--days",
    type=click.IntRange(min=1),
    default=90,
    show_default=True,
    metavar="N",
    help="How long this is known to be the current bundle. Release again before.",
)
def release(file: Path, bundle: Path, name: str, keys: tuple[Path, ...], days: int) -> int:
    """Make BUNDLE the current one of the channel in FILE, with the next version.

    To go back to an older bundle, release that one.
    """
    from prejit.compiler.progress import tell
    from prejit.compiler.signing.channel_file import release_bundle

    version = release_bundle(file, bundle, name, [_private_key(key) for key in keys], days)
    tell(f"released {bundle} as version {version} of channel {name}: wrote {file}")
    return 0


@channel.command(
    epilog="Examples:\n\n\b\n  prejit channel rotate stable.json --name stable --public new.pub.pem "
    "--key old.pem --key new.pem"
)
@click.argument("file", type=_path)
@_channel_name
@click.option(
    "--public",
    "publics",
    type=_path,
    multiple=True,
    required=True,
    metavar="FILE",
    help="Public key of the next version, in PEM; repeat it for each key.",
)
@_signing_keys
@click.option(
    "--threshold",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="How many of the public keys must sign.",
)
@click.option(
    "--days",
    type=click.IntRange(min=1),
    default=365,
    show_default=True,
    metavar="N",
    help="How long the keys count. Rotate again before.",
)
def rotate(
    file: Path,
    name: str,
    publics: tuple[Path, ...],
    keys: tuple[Path, ...],
    threshold: int,
    days: int,
) -> int:
    """Give the channel in FILE other keys, signed by the old ones and by the new ones."""
    from prejit.compiler.progress import tell
    from prejit.compiler.signing.channel_file import rotate_keys

    private = [_private_key(key) for key in keys]
    version = rotate_keys(file, name, publics, threshold, private, days)
    tell(f"channel {name} has version {version} of its keys: wrote {file}")
    return 0


@channel.command(
    "add-signature",
    epilog="Examples:\n\n\b\n  prejit channel add-signature stable.json --key second.pem",
)
@click.argument("file", type=_path)
@click.option("--key", type=_path, required=True, metavar="FILE", help="Private key in PEM.")
def add_signature(file: Path, key: Path) -> int:
    """Sign the release and the newest keys of the channel in FILE with another key, to reach a threshold."""
    from prejit.compiler.progress import tell
    from prejit.compiler.signing.channel_file import sign_channel

    sign_channel(file, _private_key(key))
    tell(f"signed {file}")
    return 0


@commands.command(
    epilog="Examples:\n\n\b\n  prejit gc --dry-run\n  prejit gc --days 7\n\n"
    "Environments are in $PREJIT_ENVIRONMENTS, or in `environments` of the default build cache. With --cache "
    "nothing outside of DIR is touched."
)
@click.option(
    "--days",
    type=click.IntRange(min=0),
    default=30,
    show_default=True,
    metavar="N",
    help="Remove what was not used for N days.",
)
@click.option("--dry-run", is_flag=True, help="Remove nothing; only print what would be removed.")
@_cache
@_json
def gc(days: int, dry_run: bool, cache: Path | None, as_json: bool) -> int:
    """Remove cache entries and environments that were not used for some days, and leftovers."""
    from prejit.compiler.garbage import collect

    result = collect(cache, days=days, dry_run=dry_run)
    gone = [found for found in result.found if found.reason]
    freed = sum(found.size for found in gone)
    if as_json:
        summary = {
            "dry_run": dry_run,
            "days": days,
            "builds_running": result.builds_running,
            "freed_bytes": freed,
            "kept_bytes": sum(found.size for found in result.found) - freed,
            "removed": [asdict(found) for found in gone],
        }
        _print_json(summary)
        return 0
    from prejit.runtime.base.tables import size

    _print_collection(result.found, dry_run)
    if result.builds_running:
        click.echo("\na build is running: what was used in the last day stays")
    click.echo(f"\n{'would free' if dry_run else 'freed'} {size(freed)}")
    return 0


def _print_collection(found: Sequence[Found], dry_run: bool) -> None:
    """Print one row for each kind, then each environment that is removed."""
    from prejit.runtime.base.tables import size, table

    rows = []
    for kind in dict.fromkeys(("environments", "results", "contents", *(f.kind for f in found))):
        gone = [f.size for f in found if f.kind == kind and f.reason]
        kept = [f.size for f in found if f.kind == kind and not f.reason]
        counts = (str(len(gone)), size(sum(gone)), str(len(kept)), size(sum(kept)))
        rows.append((kind, *counts))
    verbs = ("to remove", "to free") if dry_run else ("removed", "freed")
    click.echo(table(("", *verbs, "kept", "size"), rows))
    for each in found:
        if each.kind == "environments" and each.reason:
            click.echo(f"  environment of {each.name}: {each.reason}, {size(each.size)}")


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


def run(arguments: Sequence[str]) -> int:
    """Run a command. The caller prints the errors of prejit, and handles a closed stdout.

    Returns:
        The exit status.
    """
    _open_closed_streams()
    try:
        # Not `commands.main`, which turns a closed stdout into exit status 1.
        with commands.make_context("prejit", list(arguments)) as context:
            return commands.invoke(context) or 0
    except click.exceptions.Exit as done:  # --help
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130


def _open_closed_streams() -> None:
    """Open stdin, stdout and stderr if they are closed, or a file of ours would get their number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
