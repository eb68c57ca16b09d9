"""`prejit verify`: check every byte of a bundle, run its programs if `--run` says so, lift its quarantines.

`prejit inspect` shows these, too.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prejit.runtime.base.process_facts import policy_paths
from prejit.runtime.base.wording import size, table
from prejit.runtime.cli.command_options import FILE, JSON, VERBOSE, WHOLE_BUNDLE
from prejit.runtime.cli.output import print_json, print_text
from prejit.runtime.errors import AnswerError, FallbackWarning, RejectError, StoreError
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE
from prejit.runtime.format.opening import Contents, match, read_contents
from prejit.runtime.format.root import Root
from prejit.runtime.generation.options import check_generation
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.kept_files import KeptAnswer, read_answer
from prejit.runtime.programs.canary import answer_file_of
from prejit.runtime.trust.first_load import forget_failed_loads

if TYPE_CHECKING:
    from prejit.runtime.programs.quarantine import CheckedAnswer
    from prejit.runtime.trust.enforcing import PolicyVerdict


def run_programs(path: str, policy: str | None, *, say: bool) -> list[CheckedAnswer]:
    """Ask every program of a bundle for its golden answer; print a table of what was found if `say`.

    Raises:
        PrejitError: as `load`.
    """
    from prejit.runtime.loader import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # the table says it
        bundle = load(path, trust=policy, canary="off")
    with bundle:
        if say and not bundle.matched:
            print_text(
                "this machine is none of the targets: the portable programs are compiled and run"
            )
        answers = list(_counted(bundle.check_answers(), len(bundle.config.programs)))
    if say:
        heads = ["program", "ran", "golden answer of", "difference / tolerance", "answer"]
        print_text(table(heads, [_row(each) for each in answers]))
    return answers


def _counted(answers: Iterator[CheckedAnswer], count: int) -> Iterator[CheckedAnswer]:
    """Yield answers, and show on a terminal how many there are."""
    shows = sys.stderr.isatty()
    for place, each in enumerate(answers, 1):
        if shows:
            end = "\n" if place == count else ""
            print(f"\rran {place} of {count} programs", end=end, file=sys.stderr, flush=True)
        yield each


def _row(checked: CheckedAnswer) -> tuple[str, ...]:
    if not checked.source:
        return checked.program, "", "none", "", "not asked"
    kept = f"WRONG: {checked.difference}" if checked.difference else "right"
    if checked.difference and checked.ran == "executable":
        kept += "; in quarantine"
    if checked.lifted:
        kept += "; its quarantine is lifted"
    return checked.program, checked.ran, checked.source, f"{checked.share:.3f}", kept


def quarantined(content: Contents) -> dict[str, str]:
    """Return the programs of a target that are in quarantine on this machine, and what each returned."""
    return {program: kept.difference for program, _, kept in _wrong_answers(content)}


def forget_failures(path: str) -> list[Path]:
    """Forget that first loads of a bundle failed on this machine, and lift its quarantines.

    Returns:
        The files that are removed.

    Raises:
        RejectError: the bundle is damaged.
        StoreError: it cannot be read, or a file cannot be removed.
    """

    def read(layout: Layout, root: Root) -> tuple[list[str], list[Path]]:
        contents = [read_contents(layout, each) for each in match(root, Fingerprint.current())]
        files = [file for content in contents for _, file, _ in _wrong_answers(content)]
        return [at.digest for at in root.bundle.manifests], files

    manifests, files = read_whole(path, read)
    try:
        for file in files:
            file.unlink(missing_ok=True)
        return [*forget_failed_loads(manifests), *files]
    except OSError as error:
        raise StoreError(f"{error.filename}: cannot remove: {error.strerror}") from error


def _wrong_answers(content: Contents) -> Iterator[tuple[str, Path, KeptAnswer]]:
    """Yield the programs of a target whose answers were wrong on this machine, with the files of these."""
    manifest, machine = content.manifest, Fingerprint.current()
    has_weights = manifest.has_layer(WEIGHTS_MEDIA_TYPE)
    weights = manifest.layer(WEIGHTS_MEDIA_TYPE).digest if has_weights else ""
    for program in content.config.programs:
        if program.golden is None:
            continue
        file = answer_file_of(weights, program, machine)
        try:
            kept = read_answer(file)
        except RejectError as error:
            print_text(f"{program.name}: what is kept of its answer counts as none: {error}")
            continue
        if kept is not None and not kept.right:
            yield program.name, file, kept


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
    from prejit.runtime.format.audit import audit

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
