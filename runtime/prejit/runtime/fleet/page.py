"""A fleet's report as one HTML page that needs nothing beside itself."""

from __future__ import annotations

from html import escape
from textwrap import shorten

from prejit.runtime.fleet.candidates import Group
from prejit.runtime.fleet.machines import Machine, few
from prejit.runtime.fleet.report import Report
from prejit.runtime.verdict import Verdict

_STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfa; --card: #fff; --ink: #1d2127; --soft: #626a75;
  --line: #e2e4e1; --good: #0f766e; --bad: #b4321f; --track: #eceeeb; --bad-wash: #fbeae6; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --card: #1b1f24; --ink: #e6e8ea;
  --soft: #98a1ac; --line: #2d333a; --good: #3fbfae; --bad: #f08a75; --track: #272c33;
  --bad-wash: #38211d; } }
* { box-sizing: border-box }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem }
p { margin: .25rem 0 .75rem; max-width: 75ch } .soft { color: var(--soft) }
code, pre, .mono { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace }
.digest { overflow-wrap: anywhere }
.sums { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.5rem 0 0; padding: 0; list-style: none }
.sums li { flex: 1 1 10rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .75rem 1rem }
.sums b { display: block; font-size: 1.7rem; line-height: 1.2; font-variant-numeric: tabular-nums }
.good { color: var(--good) } .bad { color: var(--bad) }
.bars { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr auto; gap: .4rem .9rem;
  align-items: center; margin: 0 }
.bars dt { overflow-wrap: anywhere } .bars dd { margin: 0 }
.bars .n { text-align: right; font-variant-numeric: tabular-nums }
.track { background: var(--track); border-radius: 4px; height: 14px; overflow: hidden }
.track i { display: block; height: 100%; background: var(--good); min-width: 2px }
.track.out i { background: var(--bad) }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 1rem;
  overflow-x: auto; margin: 0 }
.wide { overflow: auto; border: 1px solid var(--line); border-radius: 8px; background: var(--card) }
.tall { max-height: 75vh }
table { border-collapse: collapse; width: 100%; font-size: 14px }
th, td { text-align: left; padding: .4rem .7rem; border-bottom: 1px solid var(--line);
  vertical-align: top }
tr:last-child td { border-bottom: 0 }
th { font-weight: 600; color: var(--soft); background: var(--card); white-space: nowrap }
.tall th { position: sticky; top: 0; z-index: 1 }
.machines td { white-space: nowrap } .machines td.why { white-space: normal; min-width: 22rem }
.machines th { vertical-align: bottom } .machines th.a { padding: .6rem .3rem; font-size: 12px }
.machines th.a span { writing-mode: vertical-rl; transform: rotate(180deg) }
td.y, td.n, td.o { text-align: center; padding-left: .3rem; padding-right: .3rem }
td.y { color: var(--good) } td.n { color: var(--bad); background: var(--bad-wash); font-weight: 700 }
td.o { color: var(--soft) } td.num { text-align: right; font-variant-numeric: tabular-nums }
.tools { display: flex; flex-wrap: wrap; gap: .75rem 1.25rem; align-items: center; margin: 0 0 .75rem }
input[type=search] { font: inherit; color: inherit; background: var(--card); border: 1px solid
  var(--line); border-radius: 8px; padding: .45rem .75rem; flex: 1 1 16rem; max-width: 26rem }
:focus-visible { outline: 2px solid var(--good); outline-offset: 2px }
"""

_SCRIPT = """
const rows = [...document.querySelectorAll('#machines tbody tr')];
const text = rows.map(row => row.textContent.toLowerCase());
const search = document.getElementById('search'), only = document.getElementById('only');
function show() {
  const words = search.value.toLowerCase().split(/\\s+/);
  let shown = 0;
  rows.forEach((row, i) => {
    const fits = words.every(word => text[i].includes(word)) &&
      (!only.checked || row.dataset.out !== undefined);
    row.hidden = !fits;
    shown += fits;
  });
  document.getElementById('shown').textContent = `${shown} of ${rows.length}`;
}
search.addEventListener('input', show);
only.addEventListener('change', show);
show();
"""


def page(bundle: str, digest: str, fleet: str, report: Report) -> str:
    """The page. All text that comes from files is escaped.

    Args:
        bundle: name of the bundle.
        digest: of the bundle.
        fleet: the directory of fingerprints.
        report: of the fleet.
    """
    total, out = len(report.verdicts), report.fallen_back
    sums = [
        ("", total, "machines"),
        ("good", total - out, "load a target, nothing is compiled"),
        ("bad" if out else "", out, "would compile every program"),
    ]
    tiles = "".join(f'<li><b class="{kind}">{count}</b>{text}</li>' for kind, count, text in sums)
    bars = "".join(_bar(name, count, total) for name, count in report.serves.items())
    bars += _bar("none: compiles", out, total, out=True) if out else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<title>{escape(bundle)}: machines of {escape(fleet)}</title>"
        f"<style>{_STYLE}</style></head><body><main>"
        f"<h1>Bundle <code>{escape(bundle)}</code>, machines of <code>{escape(fleet)}</code></h1>"
        f'<p class="soft mono digest">{escape(digest)}</p>'
        f'<ul class="sums">{tiles}</ul>'
        f'<h2>Machines by target</h2><dl class="bars">{bars}</dl>'
        f"{_advice(report)}{_reasons('Why machines compile', report.groups)}"
        f"{_reasons('Beyond help: no target that can be added serves', report.beyond_help)}"
        f"{_unreadable(report)}"
        f"{_machines(report)}</main><script>{_SCRIPT}</script></body></html>\n"
    )


def _bar(name: str, count: int, total: int, *, out: bool = False) -> str:
    filled = f'<i style="width:{100 * count / total:.2f}%"></i>' if count else ""
    kind = "track out" if out else "track"
    soft = "" if count else ' class="soft"'
    return (
        f'<dt{soft}>{escape(name)}</dt><dd><div class="{kind}">{filled}</div></dd>'
        f'<dd class="n{"" if count else " soft"}">{count}</dd>'
    )


def _advice(report: Report) -> str:
    if not report.additions:
        return ""
    tables = "\n\n".join(
        f"# serves {len(a.machines)} machine{'s' * (len(a.machines) > 1)}\n{a.toml()}"
        for a in report.additions
    )
    sentence = report.advice()
    return (
        f"<h2>Targets to add</h2><p>{escape(sentence[0].upper() + sentence[1:])}. Paste into the "
        f"manifest; the path of a file is relative to it.</p><pre>{escape(tables)}</pre>"
    )


def _reasons(title: str, groups: tuple[Group, ...]) -> str:
    rows = "".join(
        f'<tr><td class="num">{len(group.machines)}</td><td>{escape(few(group.machines))}</td>'
        f"<td>{escape(group.target)}</td><td>{_why(Verdict(group.target, group.mismatches))}</td></tr>"
        for group in groups
        if group.mismatches
    )
    head = "<tr><th>machines</th><th>which</th><th>closest target</th><th>why not</th></tr>"
    if not rows:
        return ""
    table = f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
    return f'<h2>{title}</h2><div class="wide">{table}</div>'


def _unreadable(report: Report) -> str:
    if not report.unreadable:
        return ""
    files = "".join(f"<li>{escape(file.why)}</li>" for file in report.unreadable)
    return f"<h2>Files that could not be read, and are not in this report</h2><ul>{files}</ul>"


def _why(verdict: Verdict) -> str:
    return "<br>".join(
        f"<b>{escape(a.name)}</b>: needs {_cut(a.needed)}, found {_cut(a.found)}"
        for a in verdict.mismatches
    )


def _cut(text: str) -> str:
    """A long text's beginning, the whole of it under the pointer."""
    short = shorten(text, 60, placeholder=" ...")
    return escape(text) if short == text else f'<span title="{escape(text)}">{escape(short)}</span>'


def _machines(report: Report) -> str:
    names: dict[str, None] = {}  # in the order of compare, whichever targets have which
    for _, verdict in sorted(report.verdicts, key=lambda item: -len(item[1].axes)):
        names.update(dict.fromkeys(axis.name for axis in verdict.axes))
    head = "".join(f'<th class="a" scope="col"><span>{name}</span></th>' for name in names)
    rows = "".join(_machine(machine, verdict, tuple(names)) for machine, verdict in report.verdicts)
    return (
        '<h2>Every machine</h2><div class="tools"><input type="search" id="search" '
        'placeholder="Search: name, device, version, axis" aria-label="Search machines">'
        '<label><input type="checkbox" id="only"> only those that compile</label>'
        '<span class="soft" id="shown" aria-live="polite"></span></div>'
        '<p class="soft">Against the target that the machine loads, or the closest: ✓ fits, ✗ does not, '
        "· not asked for.</p>"
        '<div class="wide tall"><table class="machines" id="machines"><thead><tr><th>machine</th>'
        f"<th>device</th><th>jaxlib</th><th>loads</th>{head}<th>why not</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _machine(machine: Machine, verdict: Verdict, names: tuple[str, ...]) -> str:
    found = machine.fingerprint
    fits = {axis.name: axis.matches for axis in verdict.axes}
    marks = {
        True: '<td class="y">✓</td>',
        False: '<td class="n">✗</td>',
        None: '<td class="o">·</td>',
    }
    cells = "".join(marks[fits.get(name)] for name in names)
    count = f"{found.device_count} x " if (found.device_count or 0) > 1 else ""
    loads = escape(verdict.target) if verdict.matches else '<span class="bad">compiles</span>'
    return (
        f"<tr{'' if verdict.matches else ' data-out'}><td>{escape(machine.name)}</td>"
        f"<td>{count}{escape(found.device_kind or found.cpu_model)}</td><td>{escape(found.jaxlib)}</td>"
        f'<td>{loads}</td>{cells}<td class="why">{_why(verdict)}</td></tr>'
    )
