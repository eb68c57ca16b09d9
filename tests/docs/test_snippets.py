"""Every code block of the README and the documentation runs, or at least exists as it is written."""

import json
import re
import warnings

import pytest
from tests.extent import sampled

from prejit.compiler.manifest.reading import read_manifest

from .snippets import ROOT, check_command, commands_of, completed, snippets_of

PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
NOT_RUN = {"decisions", "performance", "reference"}
"""Commands on these pages repeat figures, for minutes, or are examples: they are checked and not run."""
LANGUAGES = {"python", "toml", "sh", "console", "text", "cpp"}
"""C++ is compiled by tests/integration/test_libraries.py."""
WILL_COMPILE = 8
DEAR = {"encode", "own-function", "own-model", "profile", "python-builds", "record"}
DEAR |= {"trained-model"}
"""Pages with several builds: `make test-all` runs them."""

_WITH_CODE = [page for page in PAGES if any(snippets_of(page))]
_RUN = [
    page
    for page in _WITH_CODE
    if any(s.language in ("python", "sh", "console") for s in snippets_of(page))
    and page.parent.name not in NOT_RUN
]


def _name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", _WITH_CODE, ids=_name)
def test_every_block_is_python_a_manifest_or_a_command_that_exists(page, page_directory):
    for snippet in snippets_of(page):
        match snippet.language:
            case "python":
                compile(snippet.code, str(snippet), "exec")
            case "toml" if "[[rules]]" in snippet.code:
                _check_policy(snippet)
            case "toml":
                _check_manifest(snippet, page_directory)
            case "sh" | "console":
                for command in commands_of(snippet):
                    known = re.match(r"(\S*python|prejit|make|pip) ", command)
                    if snippet.only_parsed is None or known:
                        check_command(command, snippet)
            case language:
                assert language in LANGUAGES, f"{snippet}: no test checks {language}"


def _check_policy(snippet):
    pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")
    if "identities" in snippet.code:
        pytest.importorskip("sigstore", reason="sigstore comes with the extra keyless")
    from tests.fake_sigstore import FakeSigstore
    from tests.signers import signer

    from prejit.runtime.trust.policy import parse_policy

    root = json.dumps(FakeSigstore().trusted_root()).encode()
    pem = signer("documented").public.pem.encode()

    def read(name, of, max_bytes):
        return pem if name.endswith(".pem") else root

    assert parse_policy(snippet.code.encode(), str(snippet), read, ROOT).rules


def _check_manifest(snippet, directory):
    for name in re.findall(r'^params = "(.*)"$', snippet.code, re.MULTILINE):
        if name.endswith(".safetensors"):
            (directory / name).write_bytes(b"")
        else:
            (directory / name).mkdir(exist_ok=True)
    manifest = directory / "snippet.toml"
    manifest.write_text(completed(snippet.code))
    if snippet.only_parsed is None:
        assert read_manifest(manifest).targets, snippet


@pytest.mark.parametrize("page", sampled(_RUN, lambda page: page.stem not in DEAR), ids=_name)
def test_a_page_runs_from_top_to_bottom(page, page_directory, shell):
    namespace = {"__name__": "__main__"}
    for snippet in snippets_of(page):
        if snippet.only_parsed is not None:
            continue
        if snippet.title is not None:
            path = page_directory / snippet.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(snippet.code)
        elif snippet.language == "python":
            code = compile("\n" * (snippet.line - 1) + snippet.code, str(page), "exec")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                exec(code, namespace)
        elif snippet.language == "sh":
            for command in commands_of(snippet):
                if command.startswith(("make ", "pip ")):
                    continue  # they change the environment of the tests
                done = shell(command, page_directory)
                allowed = {0, WILL_COMPILE} if command.startswith("prejit plan") else {0}
                assert done.returncode in allowed, (
                    f"{snippet}: {command}\n{done.stdout}{done.stderr}"
                )
        elif snippet.language == "console":
            _check_transcript(snippet, page_directory, shell)


def _check_transcript(snippet, directory, shell):
    """Compare what a command prints with what the page shows; `[...]` stands for anything."""
    (command,) = commands_of(snippet)
    done = shell(command, directory, merged=True)
    shown = snippet.code.split("\n", 1)[1]
    pattern = ".*".join(re.escape(" ".join(part.split())) for part in shown.split("[...]"))
    pattern = pattern.replace(r"\ .*", r".*").replace(r".*\ ", ".*")
    found = " ".join(done.stdout.split())
    assert re.fullmatch(pattern, found), f"{snippet}: expected\n{shown}\nfound\n{done.stdout}"
