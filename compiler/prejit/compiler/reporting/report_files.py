"""Write the report of a build beside its bundle: `NAME.report.json` and `NAME.report.html`."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from prejit.compiler.pipeline.build_interface import Built
from prejit.compiler.progress import Progress
from prejit.compiler.reporting.build_report import REPORT_VERSION, PeakMemory, change, make_report
from prejit.runtime.base.written_files import write_file
from prejit.runtime.errors import PrejitError, StoreError
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.opening import Contents, match, read_contents
from prejit.runtime.format.root import Root
from prejit.runtime.machine.fingerprint import Fingerprint


def report_build(built: Built, progress: Progress, fetched: Mapping[str, str]) -> None:
    """Write the report of a build that has ended.

    Nothing happens if the build changed and compiled nothing and the report of the bundle is there. A report
    that cannot be written is a note: the bundle is what the build is for.
    """
    path = built.path.parent / f"{built.path.name}.report.json"
    if not built.written and not built.compiled and _is_of(path, built.digest):
        return
    try:
        _write(built, progress, fetched, path)
    except PrejitError as error:
        progress.note(f"no report was written: {error}")


def _write(built: Built, progress: Progress, fetched: Mapping[str, str], path: Path) -> None:
    from prejit.compiler.reporting.build_page import report_page

    def read(layout: Layout, root: Root) -> tuple[str, list[Contents]]:
        targets = sorted(match(root, Fingerprint.current()), key=lambda target: target.name)
        return root.digest, [read_contents(layout, target) for target in targets]

    digest, contents = read_whole(built.path, read)
    if digest != built.digest:
        return  # another build has replaced the bundle just now, and writes its own report
    report = make_report(
        built,
        contents,
        progress.steps,
        seconds=progress.seconds,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        fetched=fetched,
        peak_memory=PeakMemory(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        ),
    )
    if (last := _last(path)) is not None and last.get("digest") != digest:
        try:
            report = replace(report, change=change(last, asdict(report)))
        except (KeyError, TypeError):  # another version wrote it
            progress.note(f"{path}: expected a report of this version of prejit, found another")
    content = json.dumps(asdict(report), separators=(",", ":"), default=list)
    write_file(path.with_suffix(".html"), report_page(report).encode("utf-8", "backslashreplace"))
    write_file(path, content.encode() + b"\n")


def _is_of(path: Path, digest: str) -> bool:
    """Return whether a file is the report of a bundle. Only its first values are read."""
    begins = f'{{"report":{REPORT_VERSION},"digest":"{digest}"'.encode()
    try:
        with path.open("rb") as file:
            return file.read(len(begins)) == begins and path.with_suffix(".html").exists()
    except OSError:
        return False


def _last(path: Path) -> dict[str, Any] | None:
    """Return the last report; None: there is none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot read: {error.strerror}") from error
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
