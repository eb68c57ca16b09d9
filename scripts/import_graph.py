"""Draw and count the imports of both roots, and check that the committed pictures are current.

    python -m scripts.import_graph                   write the pictures and figures of docs/architecture
    python -m scripts.import_graph --check            fail where they are not current
    python -m scripts.import_graph --way MANIFEST     count also what a cached build and a first token enter

Every import counts: at the top of a file, inside a function, and under `if TYPE_CHECKING`. A circle is a set
of files (or of packages) that reach each other through imports. A level is a place in the longest chain of
imports: a file that imports nothing of its root is on level 1. All files of a circle share one level.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PICTURES = Path("docs", "architecture")
ROOTS = {
    "prejit.runtime": Path("runtime", "prejit", "runtime"),
    "prejit.compiler": Path("compiler", "prejit", "compiler"),
}
OWN = "__init__"
"""Node that stands for the `__init__` of the root itself."""

Graph = dict[str, set[str]]
"""Names of nodes, each with the nodes that it imports."""


@dataclass(frozen=True)
class Tree:
    """Source files of one root and the imports between them.

    Attributes:
        name: dotted name of the root.
        lines: number of lines by module; modules are named relative to the root.
        imports: modules that each module imports, within the root.
        outside: other roots of this repository that each module imports.
    """

    name: str
    lines: Mapping[str, int]
    imports: Graph
    outside: Graph

    def rooms(self) -> Graph:
        """Return the graph of packages: a file directly under the root is a node of its own."""
        found: Graph = {room_of(module): set() for module in self.imports}
        for module, targets in self.imports.items():
            room = room_of(module)
            found[room] |= {room_of(target) for target in targets} - {room}
        return found


def room_of(module: str) -> str:
    """Return the first part of a module's name: its package, or itself when it has none."""
    return module.partition(".")[0]


def imported_names(source: str, package: str) -> set[str]:
    """Return dotted names of everything that a source file imports, wherever the import stands.

    Args:
        source: text of the file.
        package: dotted name of the package that holds it, for relative imports.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parents = parts[: len(parts) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                found.add(str(first.value))
    return found


def read_tree(name: str, directory: Path, others: Iterable[str] = ()) -> Tree:
    """Read every Python file under a directory.

    Args:
        name: dotted name of the package that the directory is.
        directory: of the package.
        others: dotted names of other roots, whose imports are kept in `outside`.
    """
    files = {_module_name(path.relative_to(directory)): path for path in directory.rglob("*.py")}
    lines: dict[str, int] = {}
    imports: Graph = {}
    outside: Graph = {}
    for module, path in sorted(files.items()):
        source = path.read_text(encoding="utf-8")
        inside = path.parent.relative_to(directory).parts
        names = imported_names(source, ".".join([name, *inside]))
        lines[module] = source.count("\n")
        resolved = (_resolve(each, name, files) for each in names)
        imports[module] = {each for each in resolved if each is not None} - {module}
        outside[module] = {o for o in others for each in names if f"{each}.".startswith(f"{o}.")}
    return Tree(name, lines, imports, outside)


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts) or OWN


def _resolve(dotted: str, root: str, modules: Mapping[str, Path]) -> str | None:
    """Return the module of the root that a name is, or is in. None when it is of another package."""
    if dotted == root:
        return OWN if OWN in modules else None
    if not dotted.startswith(f"{root}."):
        return None
    inner = dotted.removeprefix(f"{root}.")
    while inner:
        if inner in modules:
            return inner
        inner = inner.rpartition(".")[0]
    return OWN if OWN in modules else None


def reached(graph: Graph) -> Graph:
    """Return everything that each node imports, directly or through others."""
    found: Graph = {}
    for start in graph:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in graph[waiting.pop()] - seen:
                seen.add(target)
                waiting.append(target)
        found[start] = seen
    return found


def groups(graph: Graph) -> list[tuple[str, ...]]:
    """Return the nodes in groups that reach each other; a node outside every circle is alone."""
    closure = reached(graph)
    return sorted({tuple(sorted({n} | {m for m in closure[n] if n in closure[m]})) for n in graph})


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """Return the groups of more than one node."""
    return [group for group in groups(graph) if len(group) > 1]


def condensed(graph: Graph) -> tuple[Graph, dict[str, tuple[str, ...]]]:
    """Return the graph with each circle as one node, and the members of every node."""
    members = {group[0]: group for group in groups(graph)}
    home = {node: name for name, group in members.items() for node in group}
    found = {
        name: {home[target] for node in group for target in graph[node]} - {name}
        for name, group in members.items()
    }
    return found, members


def levels(acyclic: Graph) -> dict[str, int]:
    """Return the level of every node: one more than the highest that it imports."""
    found: dict[str, int] = {}

    def level(node: str) -> int:
        if node not in found:
            found[node] = 1 + max((level(target) for target in acyclic[node]), default=0)
        return found[node]

    for node in sorted(acyclic):
        level(node)
    return found


def reduced(acyclic: Graph) -> Graph:
    """Return the graph without the edges that follow from longer ways."""
    closure = reached(acyclic)
    return {
        node: {
            target
            for target in targets
            if not any(target in closure[other] for other in targets - {target})
        }
        for node, targets in acyclic.items()
    }


def figures(tree: Tree) -> dict[str, Any]:
    """Return what is counted of a root."""
    rooms = tree.rooms()
    largest = max(sorted(tree.lines), key=lambda module: tree.lines[module])
    packages = {module.rpartition(".")[0] for module in tree.lines} - {""}
    sizes = dict.fromkeys(packages, 0)
    for module in tree.lines:
        package = module.rpartition(".")[0]
        if package and module not in packages:
            sizes[package] += 1
    return {
        "modules": len(tree.imports),
        "packages": len(sizes),
        "files_by_package": dict(sorted(sizes.items())),
        "imports": sum(map(len, tree.imports.values())),
        "levels": max(levels(condensed(tree.imports)[0]).values(), default=0),
        "levels_of_packages": max(levels(condensed(rooms)[0]).values(), default=0),
        "circles_of_files": [list(circle) for circle in circles(tree.imports)],
        "circles_of_packages": [list(circle) for circle in circles(rooms)],
        "largest_file": {"module": largest, "lines": tree.lines[largest]},
    }


# The picture: boxes in layers, the importer above what it imports.

_LINE, _PAD, _GAP, _RISE, _CHAR, _MARGIN, _TOP = 17, 9, 22, 46, 7.3, 24, 66
_STYLE = """
    text { fill: #1f2328; }
    .box { fill: #f6f8fa; stroke: #57606a; }
    .room { fill: #ddf4ff; stroke: #0969da; }
    .circle { fill: #ffebe9; stroke: #cf222e; }
    .other { fill: none; stroke: #57606a; stroke-dasharray: 4 3; }
    .line { fill: none; stroke: #57606a; stroke-width: 1.2; }
    .head { fill: #57606a; }
    .small { font-size: 12px; fill: #57606a; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .box { fill: #161b22; stroke: #8b949e; }
      .room { fill: #0c2d6b; stroke: #58a6ff; }
      .circle { fill: #4c1216; stroke: #f85149; }
      .other { stroke: #8b949e; }
      .line { stroke: #8b949e; }
      .head { fill: #8b949e; }
      .small { fill: #9da7b3; }
    }"""


@dataclass
class _Box:
    """A box of the picture, or a bend of a long arrow when it has no text."""

    text: tuple[str, ...]
    style: str
    level: int
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        return max((len(line) * _CHAR for line in self.text), default=0) + 2 * _PAD * bool(
            self.text
        )

    @property
    def height(self) -> float:
        return len(self.text) * _LINE + _PAD if self.text else 0


def draw(tree: Tree, *, by_module: bool) -> str:
    """Return an SVG of a root's imports.

    Args:
        tree: what to draw.
        by_module: draw every module, rather than every package.
    """
    graph = {n: set(t) for n, t in (tree.imports if by_module else tree.rooms()).items()}
    outside: Graph = {}
    for module, targets in tree.outside.items():
        outside.setdefault(module if by_module else room_of(module), set()).update(targets)
    for node, targets in outside.items():
        graph[node] |= targets
        graph |= {target: set() for target in targets - set(graph)}
    acyclic, members = condensed(graph)
    rows = levels(acyclic)
    others = {each for targets in outside.values() for each in targets}
    for other in others:
        rows[other] = min(rows[node] for node in acyclic if other in acyclic[node]) - 1
    sizes: dict[str, int] = {}
    for package, count in figures(tree)["files_by_package"].items():
        sizes[room_of(package)] = sizes.get(room_of(package), 0) + count
    boxes = {}
    for name, group in members.items():
        text = tuple(f"{n}/  {sizes[n]}" if n in sizes and not by_module else n for n in group)
        style = "circle" if len(group) > 1 else "room" if name in sizes else "box"
        style = "other" if name in others else style
        boxes[name] = _Box(text, style, rows[name])
    return _svg(tree, boxes, reduced(acyclic), by_module=by_module)


def _svg(tree: Tree, boxes: dict[str, _Box], arrows: Graph, *, by_module: bool) -> str:
    ways = _bend(boxes, arrows)
    order = _order(boxes, ways)
    width, height = _place(boxes, order, ways)
    found = figures(tree)
    what = "modules" if by_module else "packages, with their number of files, and files beside them"
    title = f"{tree.name}: {what}"
    note = (
        f"{found['modules']} files on {found['levels']} levels; {len(found['circles_of_files'])} circles "
        f"of files, {len(found['circles_of_packages'])} of packages. "
        "An arrow points to what is imported; those that follow from others are left out."
    )
    wide = max(width, (len(note) + 4) * 6.4)
    for box in boxes.values():
        box.x += (wide - width) / 2
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {height:.0f}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img" '
        f'aria-label="{escape(title)}. {escape(note)}">',
        f"  <style>{_STYLE}\n  </style>",
        '  <defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
        f'  <text x="{_MARGIN}" y="26" font-size="15" font-weight="600">{escape(title)}</text>',
        f'  <text class="small" x="{_MARGIN}" y="46">{escape(note)}</text>',
    ]
    for way in ways:
        out.append(f'  <path class="line" marker-end="url(#a)" d="{_curve(boxes, way)}"/>')
    for name, box in sorted(boxes.items()):
        if not box.text:
            continue
        left, top = box.x - box.width / 2, box.y
        out.append(
            f'  <rect class="{box.style}" x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" '
            f'height="{box.height:.1f}" rx="5"><title>{escape(name)}</title></rect>'
        )
        for row, line in enumerate(box.text):
            out.append(
                f'  <text x="{box.x:.1f}" y="{top + _LINE * (row + 1) - 1:.1f}" '
                f'text-anchor="middle">{escape(line)}</text>'
            )
    return "\n".join([*out, "</svg>", ""])


def _bend(boxes: dict[str, _Box], arrows: Graph) -> list[list[str]]:
    """Give every arrow a point in each layer that it crosses; return the ways of all arrows."""
    ways = []
    for node, targets in sorted(arrows.items()):
        for target in sorted(targets):
            way = [node]
            for level in range(boxes[node].level - 1, boxes[target].level, -1):
                name = f"{node} > {target} {level:03}"
                boxes[name] = _Box((), "", level)
                way.append(name)
            ways.append([*way, target])
    return ways


def _order(boxes: dict[str, _Box], ways: list[list[str]]) -> list[list[str]]:
    """Return the layers from the top, ordered so that few arrows cross."""
    above: dict[str, list[str]] = {name: [] for name in boxes}
    below: dict[str, list[str]] = {name: [] for name in boxes}
    for way in ways:
        for upper, lower in itertools.pairwise(way):
            above[lower].append(upper)
            below[upper].append(lower)
    highest = max((box.level for box in boxes.values()), default=0)
    layers = [
        sorted(name for name, box in boxes.items() if box.level == level)
        for level in range(highest, 0, -1)
    ]
    at = {name: float(i) for layer in layers for i, name in enumerate(layer)}
    best, fewest = [list(layer) for layer in layers], _crossings(layers, below)
    for sweep in range(24):
        down = sweep % 2 == 0
        near = above if down else below
        for layer in layers if down else layers[::-1]:
            mean = {
                n: sum(at[o] for o in near[n]) / len(near[n]) if near[n] else at[n] for n in layer
            }
            layer.sort(key=lambda n: (mean[n], at[n], n))
            at.update({name: float(i) for i, name in enumerate(layer)})
        crossed = _crossings(layers, below)
        if crossed < fewest:
            best, fewest = [list(layer) for layer in layers], crossed
    return best


def _crossings(layers: list[list[str]], below: Mapping[str, list[str]]) -> int:
    crossed = 0
    for upper, lower in itertools.pairwise(layers):
        at = {name: i for i, name in enumerate(lower)}
        ends = [at[target] for name in upper for target in sorted(below[name], key=at.__getitem__)]
        crossed += sum(a > b for i, a in enumerate(ends) for b in ends[i + 1 :])
    return crossed


def _place(
    boxes: dict[str, _Box], layers: list[list[str]], ways: list[list[str]]
) -> tuple[float, float]:
    """Give every box its place; return the size of the picture."""
    near: dict[str, list[str]] = {name: [] for name in boxes}
    for way in ways:
        for upper, lower in itertools.pairwise(way):
            near[lower].append(upper)
            near[upper].append(lower)
    y = float(_TOP)
    for layer in layers:
        x = 0.0
        tallest = max(boxes[name].height for name in layer)
        for name in layer:
            box = boxes[name]
            box.x, box.y = x + box.width / 2, y + (tallest - box.height) / 2
            x += box.width + _GAP
        y += tallest + _RISE
    for _ in range(60):
        for layer in layers:
            wanted = [
                sum(boxes[o].x for o in near[n]) / len(near[n]) if near[n] else boxes[n].x
                for n in layer
            ]
            for name, x in zip(layer, _spread_out(layer, wanted, boxes), strict=True):
                boxes[name].x = x
    left = min(box.x - box.width / 2 for box in boxes.values())
    for box in boxes.values():
        box.x += _MARGIN - left
    return max(box.x + box.width / 2 for box in boxes.values()) + _MARGIN, y - _RISE + _MARGIN


def _spread_out(layer: list[str], wanted: list[float], boxes: Mapping[str, _Box]) -> list[float]:
    """Return places as near to the wanted ones as room and order allow."""

    def apart(one: str, two: str) -> float:
        return (boxes[one].width + boxes[two].width) / 2 + _GAP

    right = list(wanted)
    for i in range(1, len(layer)):
        right[i] = max(right[i], right[i - 1] + apart(layer[i - 1], layer[i]))
    left = list(wanted)
    for i in range(len(layer) - 2, -1, -1):
        left[i] = min(left[i], left[i + 1] - apart(layer[i], layer[i + 1]))
    return [(a + b) / 2 for a, b in zip(left, right, strict=True)]


def _curve(boxes: Mapping[str, _Box], way: list[str]) -> str:
    points = []
    for i, name in enumerate(way):
        box = boxes[name]
        points.append((box.x, box.y + box.height if i == 0 else box.y))
    # A smooth line through all points that leaves and arrives straight down.
    slopes = [(x1 - x0, y1 - y0) for (x0, y0), (x1, y1) in zip(points, points[2:], strict=False)]
    slopes = [
        (0.0, 2 * (points[1][1] - points[0][1])),
        *slopes,
        (0.0, 2 * (points[-1][1] - points[-2][1])),
    ]
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for i, ((x0, y0), (x1, y1)) in enumerate(itertools.pairwise(points)):
        leave, arrive = slopes[i], slopes[i + 1]
        path += (
            f"C{x0 + leave[0] / 6:.1f} {y0 + leave[1] / 4:.1f} "
            f"{x1 - arrive[0] / 6:.1f} {y1 - arrive[1] / 4:.1f} {x1:.1f} {y1:.1f}"
        )
    return path


# What a run enters: counted in a fresh process.

_COUNT_WAY = """
import json, sys, threading
from pathlib import Path

from prejit.runtime.cli.commands import commands

homes, arguments = json.loads(sys.argv[1]), sys.argv[2:]
modules = {}  # by file name; None when it is of no root


def module(filename):
    if filename not in modules:
        found = None
        for name, home in homes.items():
            if filename.startswith(home + "/"):
                inner = Path(filename).relative_to(home).with_suffix("").parts
                found = ".".join([name.removeprefix("prejit."), *inner]).removesuffix(".__init__")
        modules[filename] = found
    return modules[filename]


calls, places = {}, {}


def enter(frame, event, _):
    if event != "call" or frame.f_code.co_name == "<module>":
        return
    here = module(frame.f_code.co_filename)
    if here is None:
        return
    back = frame.f_back
    while back is not None and module(back.f_code.co_filename) is None:
        back = back.f_back
    if back is None or module(back.f_code.co_filename) == here:
        return
    calls[here] = calls.get(here, 0) + 1
    place = module(back.f_code.co_filename), back.f_lineno, frame.f_code.co_qualname
    places.setdefault(here, set()).add(place)


threading.setprofile(enter)
sys.setprofile(enter)
try:
    commands.main(arguments, standalone_mode=False)
finally:
    sys.setprofile(None)
    counted = {
        name: {"places": len(places[name]), "calls": calls[name]}
        for name in sorted(places, key=lambda name: (-len(places[name]), name))
    }
    print(json.dumps(counted))
"""

_COUNT_START = """
import json, sys
from prejit.runtime import load

bundle = load(sys.argv[1], on_mismatch="error")
next(bundle.stream("def main(", max_new_tokens=1))
own = [name for name in sys.modules if name.startswith("prejit.")]
print(json.dumps({"modules_of_prejit": len(own), "modules": len(sys.modules)}))
"""


def count_way(repository: Path, manifest: Path) -> dict[str, Any]:
    """Build a manifest twice, count what the second build enters and what a first token imports.

    Args:
        repository: checkout whose code is counted.
        manifest: a decoder with a tokenizer. Only its target `cpu-host` is built.

    Returns:
        "way": by module, `places` (call sites in other modules that enter it) and `calls`.
        "first_token": how many modules are imported when the first token is there.
    """
    homes = json.dumps({name: str(repository / home) for name, home in ROOTS.items()})
    with tempfile.TemporaryDirectory() as scratch:
        command = ["build", str(manifest), "-o", scratch, "--target", "cpu-host", "--json"]
        for _ in range(2):  # the first one fills the cache
            way = _run([sys.executable, "-c", _COUNT_WAY, homes, *command])
        bundle = next(path for path in Path(scratch).iterdir() if path.is_dir())
        first = [_run([sys.executable, "-c", _COUNT_START, str(bundle)]) for _ in range(2)][1]
    return {"way": way, "first_token": first}


def _run(command: list[str]) -> Any:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


# The page.

_INTRODUCTION = """\
# Imports, before and after

`make graphs` writes this page and its pictures; `make lint` fails when they are not current. Before is the
state with one folder for each side. Every import counts, also inside functions and for types only. A level
is a place in the longest chain of imports. A circle is a set of files, or of packages, that reach each other.
A file directly in the root counts as a package of its own.
"""


def page(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the figures of two states as Markdown."""

    def row(name: str, *cells: object) -> str:
        return f"| {name} | {' | '.join(map(str, cells))} |"

    sides = [(state, root) for root in ("runtime", "compiler") for state in (before, after)]
    lines = [
        *(_INTRODUCTION, "## Files and packages", ""),
        row("", "runtime, before", "now", "compiler, before", "now"),
        row("---", *["---:"] * 4),
        row("files", *(state[root]["modules"] for state, root in sides)),
        row("packages", *(state[root]["packages"] for state, root in sides)),
        row("levels of files", *(state[root]["levels"] for state, root in sides)),
        row("levels of packages", *(state[root]["levels_of_packages"] for state, root in sides)),
        row("circles of files", *(len(state[root]["circles_of_files"]) for state, root in sides)),
        row(
            "circles of packages",
            *(len(state[root]["circles_of_packages"]) for state, root in sides),
        ),
        row("largest file", *(_largest(state[root]) for state, root in sides)),
        "",
    ]
    if "way" in before and "way" in after:
        lines += [
            "## The way of a build, and the first token",
            "",
            "A build of manifests/demo.toml for this machine, everything cached. A place is a line of",
            "another file that calls into the file; a call is a time that it does.",
            "",
            row("", "before", "now"),
            row("---", "---:", "---:"),
            row("files that the build enters", *(len(state["way"]) for state in (before, after))),
            row("places", *(_sum(state, "places") for state in (before, after))),
            row("calls", *(_sum(state, "calls") for state in (before, after))),
            row("most places of the build side", *(_most(state) for state in (before, after))),
            row("places of the plan", *(_plan(state) for state in (before, after))),
            *(
                row(title, *(state["first_token"][key] for state in (before, after)))
                for title, key in (
                    ("modules of prejit at the first token", "modules_of_prejit"),
                    ("all modules at the first token", "modules"),
                )
            ),
            "",
        ]
    for root in ("runtime", "compiler"):
        lines += [
            *(f"## prejit.{root}", "", f"![Packages of prejit.{root} now](imports-{root}.svg)", ""),
            *(f"![Modules of prejit.{root} before](imports-before-{root}.svg)", ""),
        ]
    return "\n".join(lines)


def _largest(side: Mapping[str, Any]) -> str:
    return f"{side['largest_file']['module']}, {side['largest_file']['lines']} lines"


def _sum(state: Mapping[str, Any], key: str) -> int:
    return sum(counted[key] for counted in state["way"].values())


def _most(state: Mapping[str, Any]) -> str:
    own = {name: at["places"] for name, at in state["way"].items() if name.startswith("compiler.")}
    name = max(sorted(own), key=own.__getitem__)
    return f"{name.removeprefix('compiler.')}, {own[name]}"


def _plan(state: Mapping[str, Any]) -> int:
    return sum(at["places"] for name, at in state["way"].items() if name.endswith(".plan"))


# The command line.


def outputs(repository: Path, name: str, *, by_module: bool) -> Iterator[tuple[Path, str]]:
    """Yield every file that is generated from the sources alone, with its text."""
    found = {}
    for root, home in ROOTS.items():
        others = [other for other in ROOTS if other != root]
        tree = read_tree(root, repository / home, others)
        short = root.rpartition(".")[2]
        found[short] = figures(tree)
        yield PICTURES / f"{name}-{short}.svg", draw(tree, by_module=by_module)
    yield PICTURES / f"{name}.json", json.dumps(found, indent=1) + "\n"


def _counted(path: Path) -> dict[str, Any]:
    """Return what the figures of a file hold that only a run can count."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    return {key: kept[key] for key in ("way", "first_token") if key in kept}


def main(argv: list[str] | None = None) -> int:
    """Write or check; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when not current")
    parser.add_argument("--way", type=Path, metavar="MANIFEST", help="count what a run enters")
    parser.add_argument("--name", default="imports", help="of the files (default: imports)")
    parser.add_argument("--modules", action="store_true", help="draw modules, not packages")
    parser.add_argument("--repository", type=Path, default=REPOSITORY, help="checkout to read")
    given = parser.parse_args(argv)
    stale = []
    files = dict(outputs(given.repository, given.name, by_module=given.modules))
    figures_file = PICTURES / f"{given.name}.json"
    if given.way:
        counted = count_way(given.repository, given.way)
    else:
        counted = _counted(given.repository / figures_file)
    after = json.loads(files[figures_file]) | counted
    files[figures_file] = json.dumps(after, indent=1) + "\n"
    before = given.repository / PICTURES / f"{given.name}-before.json"
    if before.exists():
        files[PICTURES / f"{given.name}.md"] = page(json.loads(before.read_text()), after)
    for relative, text in files.items():
        path = given.repository / relative
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if given.check:
            stale.append(str(relative))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {relative}")
    if stale:
        print(f"not current: {', '.join(stale)}\n\nhint: run `make graphs` and commit the files")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
