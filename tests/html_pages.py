"""Pages of HTML that tests read: their elements, and whether they need nothing beside themselves."""

import html.parser

EVIL = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"  # a name that must stay text
_VOID = ("meta", "input", "br")


class Elements(html.parser.HTMLParser):
    """All elements, their attributes and text, and whether each is closed where it must be."""

    def __init__(self, source):
        super().__init__()
        self.open = []
        self.found = []
        self.text = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    def check_harmless(self, count, scripts=0):
        """Check that EVIL is text, at least `count` times, and no element."""
        tags = [tag for tag, _ in self.found]
        assert (tags.count("script"), tags.count("img")) == (scripts, 0)
        assert not any(name.startswith("on") for _, found in self.found for name in found)
        assert self.text.count(EVIL) >= count


def alone(source):
    """Return the elements of a page that needs nothing beside itself."""
    found = Elements(source)
    for _, attributes in found.found:
        assert not {"src", "href", "action", "data", "xlink:href"} & attributes.keys()
    assert "http" not in source.replace("http-equiv", "")
    assert not {"url(", "@import"} & {part for part in ("url(", "@import") if part in source}
    assert "prefers-color-scheme: dark" in source
    return found
