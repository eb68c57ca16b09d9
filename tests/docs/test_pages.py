"""What the README shows is what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("manifests/**/*.md")))


def test_the_manifest_that_is_shown_is_the_file_that_is_named() -> None:
    text = (ROOT / "README.md").read_text()
    shown = re.search(r"\[manifests/demo\.toml\]\(.*?\).*?```toml\n(.*?)```", text, re.DOTALL)
    assert shown is not None
    assert shown[1] == (ROOT / "manifests" / "demo.toml").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_every_anchor_to_a_heading(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in anchors, f"{page.name}: {link}"


def test_figures_of_one_thing_stand_in_the_readme_once() -> None:
    """The start of an encoder is measured by one page of results."""
    text = (ROOT / "README.md").read_text()
    assert len(re.findall("exec to first embedding", text)) == 1
