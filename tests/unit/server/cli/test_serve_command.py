"""What `prejit serve` reads from its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from prejit.runtime import __main__
from prejit.runtime.errors import UsageError
from prejit.server.cli.serve_command import named_paths


def test_a_bundle_may_have_another_name(tmp_path: Path) -> None:
    strange = tmp_path / "a=b"
    strange.mkdir()
    given = ["artifacts/demo", "chat=artifacts/demo", str(strange), "v1.2-x=/a=b", "bad name=x"]
    assert named_paths(given) == [
        (None, "artifacts/demo"),
        ("chat", "artifacts/demo"),
        (None, str(strange)),  # a directory that is there is no name and path
        ("v1.2-x", "/a=b"),
        (None, "bad name=x"),
    ]
    with pytest.raises(UsageError, match="found 'a' twice"):
        named_paths(["a=x", "b=y", "a=z"])


@pytest.mark.parametrize(
    "options",
    [
        *(["--port", "-1"], ["--port", "65536"], ["--port", "x"], ["--timeout", "nan"]),
        *(["--timeout", "-1"], ["--drain-seconds", "inf"], ["--max-body", "0"]),
        *(["--max-tokens", "0"], ["--clients", "0"], ["--queue", "0"], ["--slots", "1.5"]),
        *(["--prefix-memory", "-1"], ["--prefix-memory", "1.5X"], ["--prefix-memory", "9" * 16]),
        *(["--check-seconds", "often"], ["--admin", "8001"], ["--admin", "http://127.0.0.1:8001"]),
        *(["--admin", "localhost:99999"], ["--cors", "app.example"], ["--cors", "https://a.b/"]),
    ],
)
def test_a_limit_that_is_none_is_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["serve", "artifacts/demo", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error[usage]: Invalid value for '{options[0]}': ")
    assert options[1] in error
