"""Code blocks of Markdown pages. Those behind `<!-- snippet: parsed only, because REASON -->` do not run."""

import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from prejit.runtime.base.process_facts import TRUST_VARIABLE
from prejit.runtime.cli.commands import commands

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(
    r"^```(\w+)(?: title=\"([^\"]+)\")?[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
_MARKER = re.compile(r"<!-- snippet: parsed only, because (.+) -->\n\s*\Z")


@dataclass(frozen=True)
class Snippet:
    """A code block, which begins on a line of a page."""

    page: Path
    line: int
    language: str
    title: str | None
    """The file that the block is; None: it is no file."""
    code: str
    only_parsed: str | None
    """Why it cannot run here; None: it runs."""

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets_of(page):
    """Return the code blocks of a page in their order."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        before = text[: found.start()]
        marker = _MARKER.search(before)
        line = before.count("\n") + 2
        yield Snippet(page, line, *found.groups(), marker[1] if marker else None)


def commands_of(snippet):
    """Return the commands of a shell block, without comments; of a transcript those behind `$ `."""
    lines = snippet.code.splitlines()
    if snippet.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [stripped for line in lines if (stripped := re.sub(r"(^|\s)#.*$", "", line).strip())]


def check_command(command, where):
    """Check that a command and its options exist, without running it."""
    words = shlex.split(command.partition(";")[0].partition(" > ")[0])
    if words[0] in ("python", ".venv/bin/python"):
        words = words[1:]
        if words[:2] == ["-m", "prejit.runtime"]:
            words = ["prejit", *words[2:]]
    if words[0].endswith("prejit"):
        _check_prejit(words[1:], where)
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets, f"{where}: no target {words[1]} in the Makefile"
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "runtime" / "pyproject.toml").read_text())["project"]
        found = re.fullmatch(r"prejit(?:\[([\w,]+)\])?", words[2])
        assert found, f"{where}: expected prejit, found {words[2]}"
        extras = {*filter(None, (found[1] or "").split(","))}
        assert extras <= {*project["optional-dependencies"]}, f"{where}: no such extra"
    elif words[:2] == ["-m", "pytest"]:
        for path in words[2:]:
            assert (ROOT / path.partition("::")[0]).exists(), f"{where}: no file {path}"
    elif words[0] == "openssl":
        assert words[1] in ("ecparam", "pkey"), f"{where}: no test runs openssl {words[1]}"
    elif words[0] == "-m":
        _check_script([f"{words[1].replace('.', '/')}.py", *words[2:]], where)
    else:
        assert words[0].endswith(".py"), f"{where}: a command that no test knows: {command}"
        _check_script(words, where)


def _check_prejit(words, where):
    command = commands
    top = click.Context(commands, **commands.context_settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRUST_VARIABLE, "")  # --trust changes it
        try:
            while isinstance(command, click.Group):
                _, command, words = command.resolve_command(top, words)
            command.make_context("prejit", words, top).close()
        except click.exceptions.Exit:
            return  # prejit --version
        except click.ClickException as error:
            pytest.fail(f"{where}: {error.format_message()}")


def _check_script(words, where):
    script = ROOT / words[0]
    titles = [each.title for each in snippets_of(where.page)] if isinstance(where, Snippet) else []
    assert script.is_file() or words[0] in titles, f"{where}: no file {words[0]}"
    source = script.read_text() if script.is_file() else ""
    for option in (word for word in words[1:] if word.startswith("--")):
        assert f'"{option}"' in source, f"{where}: {words[0]} has no option {option}"


def completed(code):
    """Return a manifest with the sections that a fragment of one leaves out."""
    found = tomllib.loads(code).keys()
    generate = "[generate]\nbatch = [2]\nprompt = [16]\ncontext = [128]\n"
    sections = (
        ({"bundle"}, '[bundle]\nname = "snippet"\n'),
        ({"model", "program"}, '[model]\nsource = "demo-model"\n'),
        ({"generate", "encode", "program"}, generate),
        ({"target"}, '[[target]]\nname = "cpu-x86-64-v3"\n'),
    )
    return "\n".join([code, *(text for names, text in sections if not found & names)])
