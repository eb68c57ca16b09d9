"""`prejit check-model`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prejit.compiler.cli.build_options import FILE
from prejit.runtime.cli.command_options import COUNT, Number

if TYPE_CHECKING:
    from prejit.compiler.checking.check_finding import Finding


@click.command(
    "check-model",
    epilog="Examples:\n\n\b\n  prejit check-model model:model\n"
    "  prejit check-model my_package.model:make_model --params weights.safetensors\n"
    "  prejit check-model model:model --reference reference:logits\n\n"
    "A reference takes tokens int32 [B, T] and returns the logits after each token, [B, T, V], as an array "
    "of NumPy, jax or torch. For an encoder-decoder it takes sources, their lengths, and tokens.\n\n"
    "Exit status: 0 the model passes all checks, 1 it does not.",
)
@click.argument("model", metavar="MODULE:MODEL", help="A decoder, or what makes one.")
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

    MODULE:MODEL is an object with the methods of a decoder, or a function or class that makes one without
    arguments. The module is in this directory or installed.
    """
    from prejit.compiler.checking.user_model import check_user_model

    findings = check_user_model(
        model, params=params, against=reference, tolerance=tolerance, source_size=source_size
    )
    _print_findings(findings)
    return 0 if all(finding.passed for finding in findings) else 1


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print a table; below, what is wrong and what to change."""
    from prejit.runtime.base.text_table import table
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
