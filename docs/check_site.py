"""Check the built site: `python docs/check_site.py site`.

mkdocs checks the links of the pages that it renders. This script checks the HTML: every internal link and
anchor leads somewhere, those of generated pages too, and no page loads anything from another host.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class _Page(HTMLParser):
    """Collect the anchors, the links and the loaded files of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if found.get("rel") != "canonical" and (loaded := found.get(_LOADS.get(tag, ""))):
            self.loads.append(loaded)


def problems(site: Path) -> list[str]:
    """Return one line for each link that leads nowhere and for each file from another host."""
    pages: dict[Path, _Page] = {}
    for path in site.rglob("*.html"):
        pages[path.resolve()] = page = _Page()
        page.feed(path.read_text())
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        if name.name == "404.html":  # its links are relative to the root of a server
            continue
        found += [f"{name}: loads {each}" for each in page.loads if urlsplit(each).netloc]
        for link in (*page.links, *page.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                found.append(f"{name}: {link} leads to no file")
                continue
            anchors = pages[target].anchors if target in pages else ()
            if parts.fragment and target in pages and unquote(parts.fragment) not in anchors:
                found.append(f"{name}: {link} leads to no anchor")
    return found


if __name__ == "__main__":
    lines = problems(Path(sys.argv[1]))
    print(
        "\n".join(lines)
        or f"{sys.argv[1]}: all links lead somewhere, nothing comes from another host"
    )
    sys.exit(1 if lines else 0)
