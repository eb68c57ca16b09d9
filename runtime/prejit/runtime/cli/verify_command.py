"""`prejit verify`: check every byte of a bundle, and run its programs if `--run` says so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from prejit.runtime.base.process_facts import policy_paths
from prejit.runtime.base.wording import size
from prejit.runtime.cli.command_options import FILE, JSON, VERBOSE, WHOLE_BUNDLE
from prejit.runtime.cli.golden_commands import forget_failures, run_programs
from prejit.runtime.cli.output import print_json, print_text
from prejit.runtime.errors import AnswerError
from prejit.runtime.format.audit import audit
from prejit.runtime.generation.options import check_generation

if TYPE_CHECKING:
    from prejit.runtime.trust.enforcing import PolicyVerdict


@click.command(
    epilog="Examples:\n\n\b\n  prejit verify artifacts/demo\n"
    "  prejit verify artifacts/demo --trust trust.toml\n"
    "  prejit verify artifacts/demo --run\n  prejit verify artifacts/demo --forget"
)
@WHOLE_BUNDLE
@click.option(
    "--trust",
    **FILE,
    help="Check too that this trust policy and those of $PREJIT_TRUST and the machine let every target run "
    "(exit 5: one does not).",
)
@click.option(
    "--run",
    is_flag=True,
    help="Then run every program that this machine would load, and compare what it returns with the golden "
    "answer of its build (exit 3: one is wrong, and in quarantine on this machine).",
)
@click.option(
    "--forget",
    is_flag=True,
    help="Then forget what this machine holds against the bundle: first loads that crashed, and executables "
    "in quarantine.",
)
@VERBOSE
@JSON
def verify(path: str, trust: str | None, run: bool, forget: bool, as_json: bool) -> int:
    """Check every byte: the digests of all blobs, every frame of every pack, each line of each table.

    Without --run nothing runs. The network is not needed.
    """
    started = time.perf_counter()
    found = audit(path, check_generation)
    trusted: list[PolicyVerdict] = []
    if trust is not None:
        from prejit.runtime.trust.enforcing import verify_policies

        trusted = verify_policies(path, policy_paths(trust))
    seconds = time.perf_counter() - started
    if not as_json:
        print_text(
            f"{path}: ok: {found.target_count} targets, {found.program_count} programs, "
            f"{found.attached_count} attached, {size(found.hashed_bytes)} hashed in {seconds:.1f} s\n"
            f"{found.digest}"
        )
        _print_trusted(trusted)
    forgotten = [*map(str, forget_failures(path))] if forget else []
    if forget and not as_json:
        removed = [f"removed {file}" for file in forgotten]
        print_text("\n".join(removed) or "this machine holds nothing against the bundle")
    answers = run_programs(path, trust, say=not as_json) if run else ()
    status = AnswerError.exit_code if any(each.difference for each in answers) else 0
    if as_json:
        counts = {"targets": found.target_count, "programs": found.program_count}
        counts["attached"] = found.attached_count
        counts["bytes"] = found.hashed_bytes
        described: dict[str, Any] = {"digest": found.digest, **counts, "seconds": round(seconds, 3)}
        if trust is not None:
            described["policy"] = [_described(verdict) for verdict in trusted]
        if forget:
            described["forgotten"] = forgotten
        if run:
            described["answers"] = [asdict(each) for each in answers]
        print_json(described)
    return status


def _print_trusted(verdicts: Sequence[PolicyVerdict]) -> None:
    """Print whose signatures let each target run, and what the policies only report."""
    for verdict in verdicts:
        _, _, signers, release = verdict.decision
        by = [f"signed by {', '.join(signers) or 'nobody'}"] if signers or not release else []
        if release is not None:
            by.append(
                f"as release {release.version} of channel {release.channel}, signed by "
                f"{', '.join(release.signers)}"
            )
        print_text(f"{verdict.target}: {verdict.policy} lets it run, {'; '.join(by)}")
        for reason in verdict.decision.reported:
            print_text(f"{verdict.target}: reported ({reason.case}): {reason.text}")


def _described(verdict: PolicyVerdict) -> dict[str, Any]:
    reported = [reason._asdict() for reason in verdict.decision.reported]
    release = verdict.decision.release
    return {
        "target": verdict.target,
        "policy": verdict.policy,
        "signers": verdict.decision.signers,
        "release": None if release is None else release._asdict(),
        "reported": reported,
    }
