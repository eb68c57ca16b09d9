"""The script that counts and draws imports, on small made-up trees."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from scripts import import_graph as graph


def read(directory: Path, **files: str) -> graph.Tree:
    """Write files (`room__file` is room/file.py) of a package `root` and read it."""
    for name, text in files.items():
        path = directory.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return graph.read_tree("root", directory, ["other"])


def test_a_line_of_imports_has_a_level_for_each_file_and_no_circle(tmp_path: Path) -> None:
    tree = read(tmp_path, a="from root import b", b="from root.c import x\n" * 3, c="x = 1")
    found = graph.figures(tree)
    assert found["levels"] == 3
    assert found["circles_of_files"] == []
    assert found["largest_file"] == {"module": "b", "lines": 3}


def test_a_circle_through_an_import_in_a_function_is_found(tmp_path: Path) -> None:
    tree = read(tmp_path, a="import root.b", b="def f():\n    from root.a import y\n", c="")
    assert graph.figures(tree)["circles_of_files"] == [["a", "b"]]


def test_a_circle_through_a_type_only_import_is_found(tmp_path: Path) -> None:
    lazy = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from root.a import y\n"
    tree = read(tmp_path, a="from root import b", b=lazy)
    assert graph.figures(tree)["circles_of_files"] == [["a", "b"]]


def test_a_circle_through_an_import_by_name_is_found(tmp_path: Path) -> None:
    by_name = "from importlib import import_module\nimport_module('root.a')\n"
    tree = read(tmp_path, a="from root import b", b=by_name)
    assert graph.figures(tree)["circles_of_files"] == [["a", "b"]]


def test_a_circle_through_a_relative_import_is_found(tmp_path: Path) -> None:
    tree = read(tmp_path, one__a="from . import b", one__b="from ..one.a import y")
    assert graph.figures(tree)["circles_of_files"] == [["one.a", "one.b"]]


def test_packages_can_go_in_a_circle_where_no_files_do(tmp_path: Path) -> None:
    tree = read(
        tmp_path,
        one__a="from root.two import b",
        two__b="x = 1",
        two__c="from root.one.d import x",
        one__d="x = 1",
    )
    found = graph.figures(tree)
    assert found["circles_of_files"] == []
    assert found["circles_of_packages"] == [["one", "two"]]
    assert found["files_by_package"] == {"one": 2, "two": 2}


def test_files_of_one_circle_share_a_level() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    acyclic, members = graph.condensed(imports)
    assert members["b"] == ("b", "c")
    assert graph.levels(acyclic) == {"a": 3, "b": 2, "d": 1}


def test_arrows_that_follow_from_others_are_left_out() -> None:
    assert graph.reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {
        "a": {"b"},
        "b": {"c"},
        "c": set(),
    }


def test_a_picture_has_a_box_for_every_package_and_its_arrows_go_down(tmp_path: Path) -> None:
    tree = read(
        tmp_path,
        top__a="from root.middle.b import x\nfrom root.low import c",
        middle__b="from root.low.c import x\nimport other.thing",
        low__c="x = 1",
        alone="from root.low.c import x",
    )
    drawn = graph.draw(tree, by_module=False)
    assert drawn == graph.draw(tree, by_module=False)
    found = ElementTree.fromstring(drawn)
    svg = "{http://www.w3.org/2000/svg}"
    texts = {text.text: float(text.get("y", 0)) for text in found.iter(f"{svg}text")}
    assert {"top/  1", "middle/  1", "low/  1", "alone", "other"} <= texts.keys()
    assert texts["top/  1"] < texts["middle/  1"] < texts["low/  1"]
    arrows = [path.get("d", "") for path in found.iter(f"{svg}path") if path.get("marker-end")]
    assert len(arrows) == 4
    for arrow in arrows:
        first, last = float(arrow[1:].split("C")[0].split()[1]), float(arrow.split()[-1])
        assert first < last


def test_check_fails_where_a_picture_is_not_current(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for home in graph.ROOTS.values():
        (tmp_path / home).mkdir(parents=True)
        (tmp_path / home / "a.py").write_text("x = 1\n")
    arguments = ["--repository", str(tmp_path)]
    assert graph.main([*arguments, "--check"]) == 1
    assert graph.main(arguments) == 0
    assert graph.main([*arguments, "--check"]) == 0
    figures = tmp_path / graph.PICTURES / "imports.json"
    figures.write_text(figures.read_text().replace("{", '{"way": {"a": 1},', 1))
    assert graph.main(arguments) == 0, "what only a run can count is kept"
    assert graph.main([*arguments, "--check"]) == 0
    assert '"way"' in figures.read_text()
    changed = tmp_path / graph.ROOTS["prejit.runtime"] / "b.py"
    changed.write_text("from prejit.runtime import a\n")
    capsys.readouterr()
    assert graph.main([*arguments, "--check"]) == 1
    assert "imports-runtime.svg, docs/architecture/imports.json" in capsys.readouterr().out


def test_the_page_compares_two_states(tmp_path: Path) -> None:
    tree = read(tmp_path, one__a="from root.two import b", two__b="from root.one import a")
    side = graph.figures(tree)
    way = {"compiler.plan": {"places": 3, "calls": 9}, "runtime.b": {"places": 4, "calls": 5}}
    first = {"modules_of_prejit": 30, "modules": 300}
    state = {"runtime": side, "compiler": side, "way": way, "first_token": first}
    better = {**state, "way": {"compiler.c": {"places": 1, "calls": 1}}}
    text = graph.page(state, better)
    assert "| circles of packages | 1 | 1 | 1 | 1 |" in text
    assert "| most places of the build side | plan, 3 | c, 1 |" in text
    assert "| places of the plan | 3 | 0 |" in text
    assert "| places | 7 | 1 |" in text
    assert "first token" not in graph.page({"runtime": side, "compiler": side}, better)
