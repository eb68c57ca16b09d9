"""Generate pages from the code, and assemble the source of the documentation site.

    python docs/generate.py              writes the pages of docs/reference that are generated from the code
    python docs/generate.py DIRECTORY    the pages of docs/, with the figures and results that they link to

`make docs` does both, and then calls mkdocs. A test compares the generated pages with the code.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from prejit.compiler.manifest.manifest_tables import documented, manifest_schema
from prejit.runtime import errors
from prejit.runtime.cli.commands import HOUSES, commands
from prejit.runtime.format import arrays, bundle_schema
from prejit.server.served.served import Models
from prejit.server.telemetry.metrics_collector import EngineCollector

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
MODELS = ROOT / "tests" / "parity" / "models.json"
_TOP = click.Context(commands, info_name="prejit", **commands.context_settings)

Schema = Mapping[str, Any]

_MANIFEST = """\
# Manifest

A manifest is a TOML file. It says what to compile and for which machines. This page is generated from the
code that reads manifests. `prejit plan` checks a manifest and reports all errors at once, each with its line.
"""
_COMMAND_LINE = """\
# Command line

`prejit COMMAND --help` prints the same, and so does `python -m prejit.runtime COMMAND --help`. The commands
that serve need `pip install 'prejit[server]'`, those that build and compare `pip install 'prejit[compiler]'`.
`prejit --version` prints the versions of prejit, jax, jaxlib and Python. [Errors and exit
statuses](errors.md) lists what a command ends with.

A shell completes commands, options and files. For bash, put this line into `~/.bashrc`:

<!-- snippet: parsed only, because it is a line of a shell's own set-up -->
```sh
eval "$(_PREJIT_COMPLETE=bash_source prejit)"
```

For zsh it is `zsh_source` in `~/.zshrc`. For fish, write the output of `_PREJIT_COMPLETE=fish_source prejit`
to `~/.config/fish/completions/prejit.fish`.

A SIZE is a number of bytes, such as `1000`, `512M` or `10GB`. As in dd(1), `GB` is a power of 1000; `G` and
`GiB` are powers of 1024.
"""
_ERRORS = """\
# Errors and exit statuses

The command line prints `error[code]: what happened`, then a hint, and ends with the exit status. Python
raises the class. All classes can be imported from `prejit.runtime.errors`, and those that a server meets from
`prejit.runtime`.

| code | exit | class | meaning |
| --- | --- | --- | --- |"""
_BUNDLE_SCHEMA = """\
# Schema of a bundle

The keys of a config and of its parts, from the code that reads them (`prejit.runtime.format.bundle_schema`).
A reader must refuse other keys and other types. An optional key may be absent; then its value is None. What
else must hold is in [Bundle format](../bundle-format.md#config-the-program-table).
"""
_METRICS = """\
# Metrics

`/metrics` of a server has these, in the text format of Prometheus or as OpenMetrics, and those of the
process, such as `process_open_fds`. A histogram has the series `_bucket`, `_sum` and `_count`.
[Operations](../operations.md#watch-a-server) says what to watch.

| name | type | labels | value |
| --- | --- | --- | --- |"""
_MODELS = """\
# Models beside torch

`make parity-table` writes this page: small random models of each `model_type`, with names and shapes as
transformers publishes them, beside its torch models. Every tensor is used, or a build ends with its name.

- **difference**: the largest of any logit, in 1e-6, in float32 with kernels, over {steps} greedy steps of
  three models of odd sizes. float32 itself does not say more where a difference exceeds 100: torch's
  `qwen3_next`, `qwen3_5_moe_text` and `nemotron` are 95, 106 and 119 from their logits in float64.
- **tokens**: steps whose best token is torch's, of all.
- **int8, int4**: the mean KL divergence from torch's float32 logits over {steps} steps, in 1e-3 nats, of a
  wider model whose logits have a standard deviation near 2. Random matrices have no structure to keep: the
  divergence compares rows of this table, and says nothing of a trained model.
- **4 bits**: the share of that model's values that int4 stores in four bits, the rest being int8.
- **build**: seconds of CPU time of `prejit build`: two programs of one model, and its accuracy not measured.

{versions}, {date}.

| `model_type` | difference | tokens | int8 | int4 | 4 bits | build |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |"""
_STATUSES = """\
Two statuses have no class: 0 (success) and 8 (`prejit plan`: something will compile). A command that ends
with ctrl-C has status 130, and one whose reader has gone has status 141.
"""


def reference_pages() -> dict[Path, str]:
    """Return the pages that are generated from the code, by their files."""
    pages = {
        "manifest.md": manifest_page(manifest_schema()),
        "command-line.md": command_line_page(),
        "errors.md": errors_page(),
        "metrics.md": metrics_page(),
        "models.md": models_page(json.loads(MODELS.read_text())),
        "bundle-schema.md": bundle_schema_page(),
    }
    written = {DOCS / "reference" / name: text for name, text in pages.items()}
    with_rules = (DOCS / "bundle-format.md", DOCS / "how-to" / "trust.md")
    return written | {page: with_lists_of_rules(page.read_text()) for page in with_rules}


def with_lists_of_rules(page: str) -> str:
    """Return a page with the lists that `<!-- rules: NAME -->` asks for, from the table of rules."""
    rules = tomllib.loads((ROOT / "runtime" / "check-order.toml").read_text())
    lists = {
        "loading": [each for each in rules["loading"] if each["number"].isdigit()],
        "policy": [each for each in rules["loading"] if not each["number"].isdigit()],
        "attached": rules["attached"],
    }

    def listed(found: re.Match[str]) -> str:
        texts: dict[int, list[str]] = {}
        for each in lists[found[1]]:
            texts.setdefault(int(each["number"].removeprefix("P")), []).append(each["text"])
        items = []
        for number, text in sorted(texts.items()):
            label = f"{number}. "
            wrap = textwrap.TextWrapper(124, label, " " * len(label), break_long_words=False)
            wrap.break_on_hyphens = False
            items.append(wrap.fill(" ".join(text)))
        return "\n".join((f"<!-- rules: {found[1]} -->", "", *items, "", "<!-- end of rules -->"))

    return re.sub(r"<!-- rules: (\w+) -->.*?<!-- end of rules -->", listed, page, flags=re.DOTALL)


def assemble(directory: Path) -> None:
    """Write every page of the site to a directory, which is made anew."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(DOCS, directory, ignore=shutil.ignore_patterns("*.py", "*.toml", "__pycache__"))
    overview = directory / "architecture" / "index.md"
    overview.write_text(overview.read_text().replace("<!-- rooms -->", rooms()))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text().replace("](docs/", "](")
        (directory / name.lower()).write_text(text)
    for page in [*directory.rglob("*.md")]:
        page.write_text(re.sub(r"\]\((\.\./)+benchmarks/results/", "](results/", page.read_text()))
        _copy_results(page)


def _copy_results(page: Path) -> None:
    """Copy the result pages and figures that a page links to, and those that these link to."""
    for link in re.findall(r"\]\((?:results/)?([\w.-]+\.(?:md|svg))\)", page.read_text()):
        source, target = RESULTS / link, page.parent / "results" / link
        if page.parent.name == "results":
            target = page.parent / link
        elif f"](results/{link})" not in page.read_text():
            continue
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
            if target.suffix == ".md":
                _copy_results(target)


# --- the architecture ---------------------------------------------------------------------------------------


def rooms() -> str:
    """Return a table of the packages of each root, from the docstrings of their `__init__.py`."""
    parts = []
    for root in ("runtime", "server", "compiler"):
        top = ROOT / root / "prejit" / root
        parts += [f"### prejit.{root}", "", "| room | subject |", "| --- | --- |"]
        for path in sorted(top.rglob("__init__.py")):
            if path.parent != top:
                name = ".".join(path.parent.relative_to(top).parts)
                docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
                parts.append(f"| `{name}` | {_cell(docstring)} |")
        parts.append("")
    return "\n".join(parts)


# --- the manifest ------------------------------------------------------------------------------------------


def manifest_page(schema: Schema) -> str:
    """Return the manifest reference: one section for each table, one row for each key."""
    parts = [_MANIFEST]
    for name, section in schema["properties"].items():
        if name.startswith("$"):
            continue
        section = _resolve(section, schema)
        repeated = section.get("type") == "array"
        table = _resolve(section["items"], schema) if repeated else section
        heading = f"`[[{name}]]`" if repeated else f"`[{name}]`"
        parts.append(f"## {heading}\n")
        parts.append(_section_text(table, schema))
    return "\n".join(parts)


def _section_text(table: Schema, schema: Schema) -> str:
    summary = re.sub(r"^\[+\w+\]+:\s*", "", str(table.get("description", "")))
    summary = summary[:1].upper() + summary[1:]
    lines = [summary, ""] if summary else []
    lines += ["| key | must be | default | meaning |", "| --- | --- | --- | --- |"]
    nested: list[str] = []
    required = table.get("required", ())
    for key, value in table.get("properties", {}).items():
        found = _resolve(value, schema)
        inner = next((v for v in _alternatives(found, schema) if v.get("properties")), None)
        default = "**required**" if key in required else _default(found)
        meaning = found.get("description", "")
        kind = _must_be(found, schema)
        lines.append(f"| `{key}` | {_cell(kind)} | {default} | {_cell(meaning)} |")
        if inner is not None:
            nested += ["", f"### `{key}`", "", _section_text(inner, schema)]
    return "\n".join([*lines, *nested, ""])


def _resolve(value: Schema, schema: Schema) -> Schema:
    reference = value.get("$ref")
    if reference is None:
        return value
    resolved: Schema = schema["$defs"][str(reference).rsplit("/", 1)[-1]]
    return {**resolved, **{key: item for key, item in value.items() if key != "$ref"}}


def _alternatives(value: Schema, schema: Schema) -> Iterator[Schema]:
    for each in (*value.get("anyOf", ()), *value.get("oneOf", ()), value):
        yield _resolve(each, schema)


def _default(value: Schema) -> str:
    default = value.get("default")
    return "" if default in (None, [], {}) else f"`{json.dumps(default)}`"


def _must_be(value: Schema, schema: Schema) -> str:
    """Return in words which values a schema allows."""
    if "enum" in value:
        return " or ".join(f"`{json.dumps(each)}`" for each in value["enum"])
    alternatives = [_resolve(each, schema) for each in value.get("anyOf", ())]
    if alternatives:
        words = (_must_be(each, schema) for each in alternatives)
        return " or ".join(dict.fromkeys(word for word in words if word))
    kind = value.get("type", "")
    if kind == "integer":
        least, most = value.get("minimum"), value.get("maximum")
        if least is None:
            return "an integer"
        return f"an integer from {least}" + ("" if most is None else f" to {most:,}")
    if kind == "array":
        several = " of different items" if value.get("uniqueItems") else ""
        if "$ref" in value.get("items", {}):  # it nests without end
            return f"a list{several}"
        items = _must_be(value.get("items", {}), schema)
        return f"a list{several}" + (f", each {items}" if items else "")
    if kind == "string":
        pattern = f" of the form `{value['pattern']}`" if "pattern" in value else ""
        examples = ", ".join(f"`{json.dumps(each)}`" for each in value.get("examples", ()))
        return f"a text{pattern}" + (f", such as {examples}" if examples else "")
    return {"object": "a table", "boolean": "true or false", "number": "a number"}.get(kind, "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# --- the bundle's schema ------------------------------------------------------------------------------------


_SCHEMAS = (bundle_schema.__name__, arrays.__name__)


def bundle_schema_page() -> str:
    """Return the reference of a bundle's config: one section for each class, one row for each key."""
    parts = [_BUNDLE_SCHEMA]
    for name, kind in vars(bundle_schema).items():
        if not isinstance(kind, type) or kind is arrays.Mesh or kind.__module__ not in _SCHEMAS:
            continue
        if dataclasses.is_dataclass(kind):
            summary, meanings = documented(kind)
            if not meanings:
                continue  # a file that OCI describes
            parts += [
                f"## {name}",
                "",
                summary,
                "",
                "| key | type | meaning |",
                "| --- | --- | --- |",
            ]
            for field in dataclasses.fields(kind):
                annotation, optional, _ = str(field.type).partition(" | None")
                kind_of = _in_words(annotation) + ", optional" * bool(optional)
                parts.append(f"| `{field.name}` | {kind_of} | {_cell(meanings[field.name])} |")
            parts.append("")
    return "\n".join(parts)


def _in_words(annotation: str) -> str:
    if items := re.fullmatch(r"tuple\[(.+), \.\.\.\]", annotation):
        return f"list of {_in_words(items[1])}"
    if values := re.fullmatch(r"dict\[str, (.+)\]", annotation):
        return f"{_in_words(values[1])} by name"
    if annotation in vars(bundle_schema):
        pages = {
            "Requirement": "../bundle-format.md#requirements",
            "Mesh": "../bundle-format.md#meshes",
        }
        return f"[{annotation}]({pages.get(annotation, f'#{annotation.lower()}')})"
    return {"str": "text", "int": "integer", "bool": "true or false"}[annotation]


# --- the command line ---------------------------------------------------------------------------------------


def every_command() -> Iterator[tuple[str, click.Command]]:
    """Yield the name and the command of all commands, those of a group after it."""
    for name in commands.commands:
        _, command, _ = commands.resolve_command(_TOP, [name])
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())


def command_line_page() -> str:
    """Return the reference of all commands."""
    parts = [_COMMAND_LINE]
    titles = {next(iter(house.commands)): house.title for house in HOUSES.values()}
    for name, command in every_command():
        if name in titles:
            parts.append(f"## {titles[name]}\n")
        parts.append(_described(name, command))
    return "\n".join(parts)


def _described(name: str, command: click.Command) -> str:
    context = click.Context(command, _TOP, name)
    usage = command.get_usage(context).removeprefix("Usage: ")
    records = (parameter.get_help_record(context) for parameter in command.params)
    rows = [(f"`{record[0]}`", record[1]) for record in records if record is not None]
    description = inspect.cleandoc(command.help or "")
    epilog = inspect.cleandoc(command.epilog or "").replace("\b\n", "")
    return _command(name, usage, description, rows, epilog)


def _command(
    name: str, usage: str, description: str, rows: Sequence[tuple[str, str]], epilog: str
) -> str:
    lines = [f"### prejit {name}", "", description, "", "```text", usage, "```", ""]
    if rows:
        lines += ["| | |", "| --- | --- |"]
        lines += [f"| {_cell(left)} | {_cell(right)} |" for left, right in rows]
    if epilog:
        examples = [
            line.strip() for line in epilog.splitlines() if line.strip().startswith("prejit ")
        ]
        notes = [
            line.strip()
            for line in epilog.splitlines()
            if line.strip() and not line.strip().startswith(("prejit ", "examples:", "Examples:"))
        ]
        lines += ["", "```sh", *examples, "```", ""] if examples else [""]
        lines += [" ".join(notes), ""] if notes else []
    return "\n".join([*lines, ""])


# --- errors -------------------------------------------------------------------------------------------------


def errors_page() -> str:
    """Return the table of all public errors and warnings."""
    lines = [_ERRORS]
    found = [value for value in vars(errors).values() if inspect.isclass(value)]
    for each in found:
        if issubclass(each, errors.PrejitError):
            status = str(each.exit_code)
            lines.append(f"| `{each.code}` | {status} | `{each.__name__}` | {_first_line(each)} |")
    lines += ["", "| warning | meaning |", "| --- | --- |"]
    for each in found:
        if issubclass(each, errors.PrejitWarning):
            lines.append(f"| `{each.__name__}` | {_first_line(each)} |")
    lines += ["", _STATUSES]
    return "\n".join(lines)


def metrics_page() -> str:
    """Return the table of all metrics that a server gives to Prometheus."""
    lines = [_METRICS]
    for family in EngineCollector(Models()).collect():
        ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
        # prometheus_client has no public name for the labels of a family.
        labels = ", ".join(f"`{label}`" for label in vars(family)["_labelnames"])
        lines.append(
            f"| `{family.name}{ending}` | {family.type} | {labels} | {family.documentation} |"
        )
    return "\n".join(lines) + "\n"


def models_page(measured: Mapping[str, Any]) -> str:
    """Return the table of decoders beside torch."""
    versions = ", ".join(f"{name} {number}" for name, number in measured["versions"].items())
    steps = measured["steps"]
    lines = [_MODELS.format(steps=steps, versions=versions, date=measured["date"])]
    for kind, row in measured["models"].items():
        exact = [*row["float32"].values()]
        narrow, built = (next(iter(row[key].values())) for key in ("narrow", "build"))
        cells = [f"`{kind}`", f"{max(each['difference'] for each in exact) * 1e6:.3g}"]
        cells.append(f"{sum(each['equal_tokens'] for each in exact)} / {steps * len(exact)}")
        cells += [f"{1e3 * narrow[key]:.2g}" for key in ("int8", "int4")]
        cells += [f"{narrow['share_in_four_bits']:.0%}", f"{built['cpu_seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _first_line(value: type) -> str:
    return _cell(inspect.cleandoc(value.__doc__ or "").splitlines()[0])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(f"usage: {sys.argv[0]} [DIRECTORY]")
    if sys.argv[1:]:
        assemble(Path(sys.argv[1]))
    else:
        for file, text in reference_pages().items():
            file.write_text(text)
