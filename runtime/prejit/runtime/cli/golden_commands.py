"""Golden answers on the command line: `verify --run`, `verify --forget` and the quarantine in `inspect`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prejit.runtime.base.wording import table
from prejit.runtime.cli.output import print_text
from prejit.runtime.errors import FallbackWarning, RejectError, StoreError
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE
from prejit.runtime.format.opening import Contents, match, read_contents
from prejit.runtime.format.root import Root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.kept_files import KeptAnswer, read_answer
from prejit.runtime.programs.canary import answer_file_of
from prejit.runtime.trust.first_load import forget_failed_loads

if TYPE_CHECKING:
    from prejit.runtime.programs.quarantine import CheckedAnswer


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
