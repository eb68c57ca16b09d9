"""`prejit fingerprint`, `explain` and `tune`: this machine, the target that it loads, times of its GPU."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from prejit.runtime.base.typed_json import to_json
from prejit.runtime.base.wording import table
from prejit.runtime.cli.command_options import (
    BUNDLE,
    FINGERPRINT,
    JSON,
    LOCAL_BUNDLE,
    TRUST,
    VERBOSE,
    bundle_files,
    output,
)
from prejit.runtime.cli.output import print_json, print_text
from prejit.runtime.format.opening import match
from prejit.runtime.format.root import read_root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.verdict import Axis, Verdict


@click.command(epilog="Examples:\n\n\b\n  prejit fingerprint > web-3.json")
def fingerprint() -> int:
    """Print the fingerprint of this machine as JSON."""
    print(to_json(Fingerprint.current()).decode())
    return 0


@click.command(epilog="Examples:\n\n\b\n  prejit tune artifacts/demo -o h200.json")
@LOCAL_BUNDLE
@TRUST
@VERBOSE
@output("FILE", "File to write; name it as `tuning` of a [[target]].", required=True)
def tune(path: str, output: str) -> int:
    """Compile a bundle on this machine's GPU and record what XLA measures, for builds elsewhere."""
    from prejit.runtime.device import tuning

    measured = tuning.tune(path, lambda line: print_text(line, file=sys.stderr))
    tuning.write(measured, Path(output))
    print_text(
        f"wrote {output} for {measured.machine.device_kind}; name it in the manifest:\n"
        f'  [[target]]\n  tuning = "{output}"',
        file=sys.stderr,
    )
    return 0


@click.command(
    epilog="Examples:\n\n\b\n  prejit explain artifacts/demo\n"
    "  prejit explain artifacts/demo --fingerprint web-3.json\n\n"
    "Exit status: 3 no target fits."
)
@BUNDLE
@FINGERPRINT
@JSON
def explain(path: str, fingerprint: str | None, as_json: bool) -> int:
    """Compare each target with this machine, axis by axis."""
    machine = Fingerprint.current() if fingerprint is None else Fingerprint.read(fingerprint)
    with bundle_files(path) as files:
        targets = match(read_root(files), machine)
    chosen = next((target.name for target in targets if target.verdict.matches), None)
    if as_json:
        print_json(
            {
                "target": chosen,
                "verdicts": [{"matches": t.verdict.matches, **asdict(t.verdict)} for t in targets],
            }
        )
        return 0 if chosen else 3
    rows = [
        (target.name, a.name, a.rule, "yes" if a.matches else "NO", a.needed, a.found)
        for target in targets
        for a in _telling_axes(target.verdict)
    ]
    print_text(table(["target", "axis", "rule", "fits", "needed", "found"], rows))
    where = "this machine" if fingerprint is None else f"the machine of {fingerprint}"
    if chosen:
        print_text(f"\n{where} loads {chosen}: nothing is compiled")
        return 0
    print_text(f"\n{where} is none of the targets: every program would be compiled there")
    return 3


def _telling_axes(verdict: Verdict) -> tuple[Axis, ...]:
    """Return the axes to show: only `platform` where that differs, since the others follow from it."""
    return tuple(a for a in verdict.axes if a.name == "platform" and not a.matches) or verdict.axes
