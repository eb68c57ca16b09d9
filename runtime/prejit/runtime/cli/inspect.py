"""`prejit inspect` and `prejit verify`: read a bundle without running it, unless `--run` says so."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prejit.runtime.base.tables import size, table
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.cli.answers import forget, quarantined, run_programs
from prejit.runtime.cli.calls import calls_table
from prejit.runtime.cli.output import print_json, print_text
from prejit.runtime.cli.tables import accuracy_table, forms_table
from prejit.runtime.errors import AnswerError
from prejit.runtime.format.audit import audit
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.checks.oci import check_digest
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    GENERATION_MEDIA_TYPE,
    KERNELS_MEDIA_TYPE,
)
from prejit.runtime.format.opening import Contents, OpenTarget, match, read_contents
from prejit.runtime.format.root import Root
from prejit.runtime.format.schema import Config, RecordedProgram
from prejit.runtime.generation.defaults import check_generation
from prejit.runtime.machine.fingerprint import Fingerprint

if TYPE_CHECKING:
    from prejit.runtime.generation.defaults import Defaults
    from prejit.runtime.trust.enforcing import PolicyVerdict


def inspect(options: Namespace) -> int:
    """Print what a bundle holds: versions, layers, and the programs of each target."""

    def read(
        layout: Layout, root: Root
    ) -> tuple[str, tuple[OpenTarget, ...], list[Contents], Defaults | None]:
        targets = match(root, Fingerprint.current())
        contents = [read_contents(layout, target) for target in targets]
        return root.digest, targets, contents, _defaults(layout, contents[0])

    digest, targets, contents, defaults = read_whole(options.bundle, read)
    if options.json:
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
    sizes = [(_layer_name(x.mediaType), size(x.size)) for x in layers.values()]
    print_text(table(["layer", "size"], sizes))
    if calls := calls_table(contents[0].config):
        print_text(f"\n{calls}")
    for target, content in zip(targets, contents, strict=True):
        _print_target(target, content)
    return 0


def _print_bundle(digest: str, config: Config, defaults: Defaults | None) -> None:
    """Print what all targets of a bundle share."""
    print_text(f"{config.bundle}  {digest}")
    print_text(table(["built with", "version"], sorted(config.versions.items())))
    if (portable := config.portable) is not None:
        until = f", readable until {portable.readable_until}" if portable.readable_until else ""
        print_text(f"portable programs: jax {portable.jax}, StableHLO {portable.stablehlo}{until}")
    if defaults is not None:
        values = (f"{name} {value}" for name, value in defaults.options().items())
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
    """Return the recorded programs as a table."""
    rows = [
        (each.name, each.function or "", size(each.entry.raw_size), _shortened(each.arguments))
        for each in recorded
    ]
    return table(["recorded program", "function", "size", "arguments"], rows)


def _shortened(arguments: Sequence[str] | None) -> str:
    if arguments is None:
        return "not known"
    more = f", and {len(arguments) - 4} more" if len(arguments) > 4 else ""
    return ", ".join(arguments[:4]) + more


def _defaults(layout: Layout, content: Contents) -> Defaults | None:
    """Return the generation defaults of a decoder; None: the bundle holds no decoder.

    Raises:
        RejectError: the generation config is damaged.
    """
    manifest = content.manifest
    if content.config.decoder is None:
        return None
    if not manifest.has_layer(GENERATION_MEDIA_TYPE):
        # The import loads NumPy, which `verify` of other bundles does not need.
        from prejit.runtime.generation.defaults import Defaults

        return Defaults()
    at = manifest.layer(GENERATION_MEDIA_TYPE)
    read, path = layout.read_blob(at.digest, at.size), layout.blob_path(at.digest)
    check_digest(read, at.digest, path)
    return check_generation(read, content.config.format, path)


def verify(options: Namespace) -> int:
    """Check every byte: the digests of all blobs, every frame of every pack, each line of each table.

    With --policy check too that the policy lets every target run. With --run ask every program for its golden
    answer; exit status 3 means that one is wrong. With --forget hold no earlier failure against the bundle.
    """
    started = time.perf_counter()
    found = audit(options.bundle, check_generation)
    trusted: list[PolicyVerdict] = []
    if options.policy is not None:
        from prejit.runtime.trust.enforcing import verify_policy

        trusted = verify_policy(options.bundle, options.policy)
    seconds = time.perf_counter() - started
    if not options.json:
        print_text(
            f"{options.bundle}: ok: {found.target_count} targets, {found.program_count} programs, "
            f"{found.attached_count} attached, {size(found.hashed_bytes)} hashed in {seconds:.1f} s\n"
            f"{found.digest}"
        )
        _print_trusted(trusted)
    forgotten = [*map(str, forget(options.bundle))] if options.forget else []
    if options.forget and not options.json:
        removed = [f"removed {file}" for file in forgotten]
        print_text("\n".join(removed) or "this machine holds nothing against the bundle")
    answers = (
        run_programs(options.bundle, options.policy, say=not options.json) if options.run else ()
    )
    status = AnswerError.exit_code if any(each.difference for each in answers) else 0
    if options.json:
        counts = {"targets": found.target_count, "programs": found.program_count}
        counts["attached"] = found.attached_count
        counts["bytes"] = found.hashed_bytes
        described: dict[str, Any] = {"digest": found.digest, **counts, "seconds": round(seconds, 3)}
        if options.policy is not None:
            described["policy"] = [_described(verdict) for verdict in trusted]
        if options.forget:
            described["forgotten"] = forgotten
        if options.run:
            described["answers"] = [each._asdict() for each in answers]
        print_json(described)
    return status


def _print_trusted(verdicts: Sequence[PolicyVerdict]) -> None:
    """Print whose signatures let each target run, and what the policy only reports."""
    for verdict in verdicts:
        signers = ", ".join(verdict.decision.signers) or "nobody"
        print_text(f"{verdict.target}: {verdict.policy} lets it run, signed by {signers}")
        for reason in verdict.decision.reported:
            print_text(f"{verdict.target}: reported ({reason.case}): {reason.text}")


def _described(verdict: PolicyVerdict) -> dict[str, Any]:
    reported = [reason._asdict() for reason in verdict.decision.reported]
    return {"target": verdict.target, "signers": verdict.decision.signers, "reported": reported}


def _layer_name(media_type: str) -> str:
    return media_type.removeprefix("application/vnd.prejit.")
