"""What `prejit serve` reads from its command line, and what it says without its packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prejit.runtime import __main__
from prejit.runtime.errors import UsageError
from prejit.server.cli.serve import named_paths


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


@pytest.mark.parametrize("command", ["serve", "replay"])
def test_without_its_packages_the_server_says_what_to_install(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert __main__.main([command, "missing"]) == 2
    printed = capsys.readouterr().err
    assert f"`prejit {command}` needs prejit's server, and uvicorn is not installed" in printed
    assert "hint: pip install 'prejit[server]'" in printed


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
