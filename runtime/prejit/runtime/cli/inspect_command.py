"""`prejit inspect`: read a bundle without running it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

import click

from prejit.runtime.base.typed_json import to_json
from prejit.runtime.base.wording import few, size, table
from prejit.runtime.cli.command_options import (
    BUNDLE,
    JSON,
    SIZE,
    bundle_files,
    check_one,
    local_bundle,
)
from prejit.runtime.cli.inspect_tables import (
    accuracy_table,
    calls_table,
    capacity,
    capacity_table,
    forms_table,
)
from prejit.runtime.cli.output import print_json, print_text
from prejit.runtime.cli.verify_command import quarantined
from prejit.runtime.errors import UsageError
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.bundle_schema import Config, RecordedProgram
from prejit.runtime.format.layout import LayoutFiles
from prejit.runtime.format.names import GENERATION_MEDIA_TYPE, KERNELS_MEDIA_TYPE
from prejit.runtime.format.opening import Contents, OpenTarget, match, read_contents
from prejit.runtime.format.root import Root, read_root
from prejit.runtime.generation.options import Defaults, check_generation
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.recorded.hook.jax_texts import CALLS_PREFIX, OURS_PREFIX
from prejit.runtime.ship.reference import is_reference

_TEXTS = {
    "stablehlo": "StableHLO: the portable program",
    "hlo": "HLO, as XLA optimized it for the target",
    "asm": "machine code, function by function",
}
_PROGRAM_VIEWS = "prejit.compiler.cli.program_views"


def _texts(command: Callable[..., int]) -> Callable[..., int]:
    for name, text in reversed(_TEXTS.items()):
        shown = f"Print a program as {text} (needs prejit[compiler])."
        command = click.option(f"--{name}", metavar="PROGRAM", help=shown)(command)
    return command


@click.command(
    epilog="Examples:\n\n\b\n  prejit inspect artifacts/demo\n  prejit inspect artifacts/demo --json\n"
    "  prejit inspect artifacts/demo --hlo decode/b1-c128 --for-target cpu-x86-64-v3\n"
    "  prejit inspect artifacts/demo --roofline\n"
    "  prejit inspect artifacts/demo --capacity --memory 4GiB"
)
@BUNDLE
@_texts
@click.option(
    "--costs",
    is_flag=True,
    help="Print what a run of each program computes and moves (needs prejit[compiler]).",
)
@click.option(
    "--roofline",
    is_flag=True,
    help="Run each program too, and say how near it comes to what this machine can do at most.",
)
@click.option(
    "--for-target",
    "target",
    metavar="NAME",
    help="The target for these options. Default: the one that this machine loads, or else the first.",
)
@click.option(
    "--capacity",
    "shows_capacity",
    is_flag=True,
    help="Print the memory of a server with a decoder, by context and slots.",
)
@click.option("--memory", **SIZE, help="With --capacity: say which slots fit into so much memory.")
@JSON
def inspect(
    path: str,
    stablehlo: str | None,
    hlo: str | None,
    asm: str | None,
    costs: bool,
    roofline: bool,
    target: str | None,
    shows_capacity: bool,
    memory: int | None,
    as_json: bool,
) -> int:
    """Show what a bundle holds: targets, programs, sizes, versions; or look into its programs."""
    texts = {"stablehlo": stablehlo, "hlo": hlo, "asm": asm}
    given = {"costs": costs, "roofline": roofline, "capacity": shows_capacity}
    flags = {name: value or None for name, value in given.items()}
    check_one({f"--{name}": value for name, value in {**texts, **flags}.items()})
    form = next((name for name, value in texts.items() if value is not None), None)
    if form is not None or costs or roofline:
        views = importlib.import_module(_PROGRAM_VIEWS)  # of the build side, which may be missing
        path = local_bundle(path, every=True)
        if form is not None:
            views.show_text(path, form, texts[form], target, as_json=as_json)
        else:
            show = views.show_costs if costs else views.show_roofline
            show(path, target, as_json=as_json)
        return 0
    if target is not None:
        raise UsageError(
            "--for-target: expected --stablehlo, --hlo, --asm, --costs or --roofline beside it, found "
            + ("--capacity" if shows_capacity else "none"),
            hint="else `prejit inspect` shows all targets",
        )
    if memory is not None and not shows_capacity:
        raise UsageError("--memory: expected --capacity, found none", hint="add --capacity")

    def read(
        layout: LayoutFiles, root: Root
    ) -> tuple[str, tuple[OpenTarget, ...], list[Contents], Defaults | None]:
        targets = match(root, Fingerprint.current())
        contents = [read_contents(layout, target) for target in targets]
        return root.digest, targets, contents, _defaults(layout, contents[0])

    if is_reference(path):
        with bundle_files(path) as files:
            digest, targets, contents, defaults = read(files, read_root(files))
    else:
        digest, targets, contents, defaults = read_whole(path, read)
    if shows_capacity:
        _print_capacity(targets, contents, memory, as_json=as_json)
        return 0
    if as_json:
        described = [
            {
                "config": json.loads(to_json(c.config)),
                "layers": [asdict(x) for x in c.manifest.layers],
            }
            for c in contents
        ]
        described_defaults = None if defaults is None else asdict(defaults)
        print_json({"digest": digest, "targets": described, "defaults": described_defaults})
        return 0
    _print_bundle(digest, contents[0].config, defaults)
    layers = {layer.digest: layer for c in contents for layer in c.manifest.layers}
    sizes = [(x.mediaType.removeprefix("application/vnd.prejit."), x.size) for x in layers.values()]
    print_text(table(["layer", "size"], [(name, size(count)) for name, count in sizes]))
    if calls := calls_table(contents[0].config):
        print_text(f"\n{calls}")
    for each, content in zip(targets, contents, strict=True):
        _print_target(each, content)
    return 0


def _print_capacity(
    targets: Sequence[OpenTarget],
    contents: Sequence[Contents],
    memory: int | None,
    *,
    as_json: bool,
) -> None:
    found = [
        capacity(target.name, content, memory)
        for target, content in zip(targets, contents, strict=True)
    ]
    if as_json:
        print_json([asdict(each) for each in found])
    else:
        print_text("\n\n".join(capacity_table(each, memory) for each in found))


def _print_bundle(digest: str, config: Config, defaults: Defaults | None) -> None:
    """Print what all targets of a bundle share."""
    print_text(f"{config.bundle}  {digest}")
    print_text(table(["built with", "version"], sorted(config.versions.items())))
    if (portable := config.portable) is not None:
        until = f", readable until {portable.readable_until}" if portable.readable_until else ""
        print_text(f"portable programs: jax {portable.jax}, StableHLO {portable.stablehlo}{until}")
    if defaults is not None:
        own = ("logit_bias", "begin_suppress_tokens")
        values = [
            f"{name} {value}" for name, value in defaults.options().items() if name not in own
        ]
        if defaults.suppress_tokens:
            values.append(f"{len(defaults.suppress_tokens)} tokens suppressed")
        if defaults.begin_suppress_tokens:
            values.append(f"{len(defaults.begin_suppress_tokens)} suppressed at the beginning")
        print_text(f"generates by default with: {', '.join(values) or 'the most likely tokens'}")
    if config.accuracy is not None:
        print_text(accuracy_table(config.accuracy))


def _print_target(target: OpenTarget, content: Contents) -> None:
    """Print whether a target fits this machine, its kernels and its programs."""
    fits = "fits this machine" if target.verdict.matches else target.verdict.reason()
    print_text(f"\n{target.name}: {fits}")
    if (kernels := content.config.kernels) is not None:
        held = content.manifest.layer(KERNELS_MEDIA_TYPE).size
        names = ", ".join(kernels.handlers)
        print_text(f"kernels {kernels.level}, {kernels.compiler}, {size(held)}: {names}")
    held_bytes = {at.digest: at.size for at in content.manifest.layers}
    for library in content.config.libraries or ():
        names = ", ".join(library.handlers)
        print_text(f"library {library.name}, {size(held_bytes[library.digest])}: {names}")
    if content.config.recorded is not None:
        print_text(_recorded_table(content.config.recorded))
        return
    rows = []
    for program in content.config.programs:
        sizes = (program.executable.size, program.portable.size, program.memory.temp_bytes)
        golden = "none" if program.golden is None else f"of {program.golden.source}"
        rows.append((program.name, program.kind, *map(size, sizes), golden))
    heads = ["program", "kind", "executable", "StableHLO", "temporary memory", "golden answer"]
    print_text(table(heads, rows))
    for name, found in quarantined(content).items():
        print_text(
            f"{name}: in quarantine on this machine: {found}. `prejit verify --run` asks it again, "
            "and --forget lifts it"
        )
    if content.config.forms:
        print_text(forms_table(content.config.forms))


def _recorded_table(recorded: Sequence[RecordedProgram]) -> str:
    """Return the recorded programs as a table, and how many commands start without tracing."""
    rows = [
        (
            each.name,
            each.function or "",
            size(each.entry.raw_size),
            "not known" if each.arguments is None else few(each.arguments, 4),
        )
        for each in recorded
        if not each.file.startswith(OURS_PREFIX)
    ]
    commands = sum(each.file.startswith(CALLS_PREFIX) for each in recorded)
    programs = table(["recorded program", "function", "size", "arguments"], rows)
    return f"{programs}\ncommands that start without tracing: {commands}"


def _defaults(layout: LayoutFiles, content: Contents) -> Defaults | None:
    """Return the generation defaults of a decoder; None: the bundle holds no decoder."""
    manifest = content.manifest
    if content.config.decoder is None:
        return None
    if not manifest.has_layer(GENERATION_MEDIA_TYPE):
        return Defaults()
    at = manifest.layer(GENERATION_MEDIA_TYPE)
    return check_generation(layout.read_blob(at), layout.blob_path(at.digest))
