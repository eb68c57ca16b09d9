"""`prejit replay`: run the requests of a server's log again."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

from prejit.runtime.cli.output import print_json, print_text, progress, warnings_on_stderr
from prejit.runtime.cli.serve import check_server_packages, named_paths


def replay(options: Namespace) -> int:
    """Run the requests of a log again. The status is 1 if one of them gives something else."""
    check_server_packages("replay")
    with warnings_on_stderr(), progress() as show:
        from prejit.runtime.server import replay as replaying

        report = replaying.replay(options.log, named_paths(options.bundle), show)
    if options.json:
        print_json(asdict(report))
    else:
        for note in report.notes:
            print_text(f"note: {note}")
        for each in report.differences:
            print_text(f"{each.id}  {each.path}  {each.reason}")
        print_text(
            f"{report.equal} equal, {report.rounded} differ by rounding, "
            f"{len(report.differences)} differ, {report.skipped} skipped"
        )
    return 1 if report.differences else 0
