"""What the pages say of files, names, options and variables is so."""

import contextlib
import importlib
import pkgutil
import re
import sys

import pytest
from tests.campaigns.drill_records import PAGE, with_table
from tests.processes import ran

from .snippets import ROOT

DOCS = ROOT / "docs"
TRACKED = {ROOT / name for name in ran("git", "ls-files", cwd=ROOT).stdout.splitlines()}
"""The files of a fresh checkout."""
THERE = TRACKED.union(*(path.parents for path in TRACKED))
"""These files, and the directories that they are in."""
PAGES = sorted(path for path in TRACKED if path.suffix == ".md")
DECISIONS = sorted(DOCS.glob("decisions/0*.md"))
NAMING = (*DOCS.glob("architecture/*.md"), DOCS / "tour.md", DOCS / "glossary.md")
"""Pages on which `package.module.name` in backquotes is a name of the code."""


def _sentences(page):
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def _script(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate():
    return _script("generate")


def test_the_readme_is_short_with_the_manifest_and_figures_of_the_performance_pages():
    text = (ROOT / "README.md").read_text()
    shown = re.search(r"\[manifests/demo\.toml\]\(.*?\).*?```toml\n(.*?)```", text, re.DOTALL)
    assert shown[1] == (ROOT / "manifests" / "demo.toml").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| .*\d", line)]
    pages = [(DOCS / "performance" / name).read_text() for name in ("first-starts.md", "xeon.md")]
    assert rows
    assert [row for row in rows if not any(row in page for page in pages)] == []
    assert len(text.splitlines()) <= 135


def test_a_module_that_a_sentence_says_to_run_exists():
    pattern = r"`[^`\n]*python -m ((?:benchmarks|scripts|tests|prejit)[\w.]*)"
    named = {name: page for page in PAGES for name in re.findall(pattern, _sentences(page))}
    assert {n: p for n, p in named.items() if importlib.util.find_spec(n) is None} == {}


def test_every_relative_link_leads_to_a_file_and_every_anchor_to_a_heading():
    dead = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", _sentences(page)):
            path, _, anchor = link.partition("#")
            if "://" in path:
                continue
            target = (page.parent / path).resolve() if path else page
            if target not in THERE or (anchor and anchor not in _anchors(target)):
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert dead == []


def _anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]


def test_pages_are_those_of_the_code_and_of_the_last_drills(generate):
    for file, text in generate.reference_pages().items():
        assert file.read_text() == text, f"{file.name}: python docs/generate.py writes it"
    drills = PAGE.read_text()
    assert drills == with_table(drills), "python -m tests.campaigns.drill_records"


def test_pages_by_hand_have_at_most_45000_words(generate):
    """Pages and lists that are generated from the code count apart, and nobody reads comments."""
    reference = DOCS / "reference"
    generated = {page for page in generate.reference_pages() if page.parent == reference}
    generated.add(reference / "jax-coverage.md")  # its tables: jax_functions.py
    hidden = re.compile(r"<!-- rules: .*?<!-- end of rules -->|<!--.*?-->", re.DOTALL)
    by_hand = [page for page in PAGES if page.is_relative_to(DOCS) and page not in generated]
    assert sum(len(hidden.sub("", page.read_text()).split()) for page in by_hand) <= 45_000


def test_a_name_of_the_code_exists():
    pattern = r"`([a-z_]\w*(?:\.\w+)+)`"
    files = (".py", ".md", ".toml", ".json", ".safetensors", ".cc", ".h", ".svg")
    roots = ("prejit.runtime.", "prejit.server.", "prejit.compiler.", "prejit.", "")
    for page in NAMING:
        for name in re.findall(pattern, _sentences(page)):
            known = name.endswith(files) or any(_found(f"{root}{name}") for root in roots)
            assert known, f"{page.name}: {name}"


def _found(path):
    owner, _, name = path.rpartition(".")
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        if name not in getattr(pkgutil.resolve_name(owner), "__dataclass_fields__", ()):
            pkgutil.resolve_name(path)
        return True
    return False


def test_a_path_exists():
    """A path in capitals, such as NAME.py, stands for a file of the reader's own."""
    pattern = r"`((?:compiler|runtime|server|tests|docs|benchmarks)/[^`\s]*)`"
    for page in (*NAMING, ROOT / "CONTRIBUTING.md"):
        for path in re.findall(pattern, page.read_text()):
            is_own = re.search(r"NAME|PLATFORM|MODULE|vN|<|\*", path)
            assert is_own or (ROOT / path).exists(), f"{page.name}: {path}"


def test_a_decision_is_short_with_a_date_a_figure_and_a_command():
    listed = (DOCS / "decisions" / "index.md").read_text()
    navigation = (ROOT / "mkdocs.yml").read_text()
    for record in DECISIONS:
        text = record.read_text()
        assert len(text.split()) <= 200, record.name
        assert re.match(r"# .+\n\n\*\d{4}-\d\d-\d\d\*\n", text), record.name
        figure = text.partition("\n**Figure:** ")[2]
        assert re.search(r"\d|No figure", figure.partition("```")[0]), record.name
        assert re.search(r"```sh\n.+\n```\n\Z", figure, re.DOTALL), record.name
        title = text.splitlines()[0].removeprefix("# ")
        assert f"- [{title}]({record.name})\n" in listed
        assert f"decisions/{record.name}" in navigation


def test_the_list_of_long_test_files_names_files():
    longest = re.findall(r'"(test_\w+\.py)"', (ROOT / "tests" / "conftest.py").read_text())
    names = {path.name for path in TRACKED}
    assert longest
    assert [name for name in longest if name not in names] == []


def test_every_variable_of_the_code_is_on_the_page_and_no_other():
    roots = [ROOT / root for root in ("runtime", "server", "compiler")]
    code = "\n".join(path.read_text() for root in roots for path in root.rglob("*.py"))
    page = (DOCS / "reference" / "environment.md").read_text()
    of_page, of_code = ({*re.findall(r"PREJIT_[A-Z_]+[A-Z]", text)} for text in (page, code))
    assert of_page == of_code


def test_the_command_line_page_has_every_command_and_option(generate, tmp_path):
    generate.assemble(tmp_path / "source")
    page = (tmp_path / "source" / "reference" / "command-line.md").read_text()
    for name, command in generate.every_command():
        assert f"### prejit {name}\n" in page
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                assert not option.startswith("--") or option in page, f"{name} {option}"


def test_the_site_check_finds_dead_links_dead_anchors_and_other_hosts(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1>')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">good</a><a href="b.html#gone">anchor</a><a href="c.html">file</a>'
        '<script src="https://example.com/x.js"></script><a href="https://example.com">fine</a>'
    )
    assert _script("check_site").problems(tmp_path) == [
        "a.html: loads https://example.com/x.js",
        "a.html: b.html#gone leads to no anchor",
        "a.html: c.html leads to no file",
    ]


def test_the_python_reference_has_the_names_of_both_doors():
    """mkdocstrings finds a wrong name only in `make docs`."""
    text = (ROOT / "docs" / "reference" / "python.md").read_text()
    named = re.findall(r"^::: ([\w.]+)$", text, re.M)
    assert named
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert attribute in importlib.import_module(module).__all__, name


def test_a_package_names_modules_that_it_has():
    """In the list of its modules, and behind `Begin with`: they go stale when a file gets another name."""
    wrong = []
    for package in (path for path in TRACKED if path.name == "__init__.py"):
        text = (ROOT / package).read_text()
        listed = re.findall(r"^    ([\w.]+(?:, [\w.]+)*)  +\S", text, re.MULTILINE)
        named = [name.removesuffix(".py") for row in listed for name in row.split(", ")]
        named += re.findall(r"(?:[Bb]egin with|, then) `(\w+)", text)
        here = {each.stem for each in (ROOT / package).parent.iterdir()}
        wrong += [f"{package}: {name}" for name in named if name not in here]
    assert wrong == []
