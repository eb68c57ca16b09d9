"""Write dashboards of Grafana, alert rules of Prometheus and runbooks into a directory. No JAX.

They are in `monitoring/`. The names of the metrics are those of metrics_collector.py; a test compares them.

Two objectives of the rules have burn-rate alerts over several windows (The Site Reliability Workbook, chapter
5): a fast burn wakes somebody, a slow one makes a ticket. The other alerts name causes. The short window of
each pair ends the alert soon after its cause has ended.
"""

from __future__ import annotations

import json
from pathlib import Path

from prejit.runtime.errors import StoreError, UsageError

_TEMPLATES = Path(__file__).parent / "monitoring"


def files(runbooks: str) -> dict[str, str]:
    """Return the text of every file by its path in the directory.

    Args:
        runbooks: where the runbooks will be: a URL, or a path that people who get alerts understand.
    """
    found = {
        str(path.relative_to(_TEMPLATES)): path.read_text(encoding="utf-8")
        for path in sorted(_TEMPLATES.rglob("*.*"))
    }
    # A string of JSON is one of YAML.
    url = json.dumps(f"{runbooks.rstrip('/')}/").removesuffix('"')
    rules = found["prometheus/prejit.rules.yml"]
    found["prometheus/prejit.rules.yml"] = rules.replace('_url: "runbooks/', f"_url: {url}")
    return found


def write(directory: Path, *, runbooks: str, force: bool) -> list[str]:
    """Write every file, and return their paths in the directory.

    Args:
        directory: where to; it is made if it is missing.
        runbooks: as of `files`.
        force: whether to overwrite files that have other content.

    Raises:
        UsageError: a file exists with other content, and `force` is not set. Nothing is written then.
        StoreError: a file cannot be read or written.
    """
    wanted = files(runbooks)
    try:
        if not force:
            _refuse_to_overwrite(directory, wanted)
        for path, text in wanted.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{error.filename}: cannot write: {error.strerror}") from error
    return sorted(wanted)


def _refuse_to_overwrite(directory: Path, wanted: dict[str, str]) -> None:
    changed = [
        path
        for path, text in wanted.items()
        if (directory / path).exists() and (directory / path).read_bytes() != text.encode()
    ]
    if changed:
        raise UsageError(
            f"{directory}: expected no other version of the files to write, found {', '.join(changed)}",
            hint="write into another directory and compare, or overwrite them with --force",
        )
