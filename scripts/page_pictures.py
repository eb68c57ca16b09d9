"""Take the pictures of the server's page that the documentation has.

    prejit serve artifacts/demo &
    python -m scripts.page_pictures http://127.0.0.1:8000 docs/how-to/images

Needs Debian's chromium and chromium-driver. It writes page-light.png and page-dark.png of a completion, and
page-narrow.png of a window of 400 pixels.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.webdriver import Browser

MAX_BYTES = 150_000
"""The largest picture that the repository takes."""
SECONDS = 25
"""How long the server works before the first picture."""


def main() -> None:
    """Open the page, complete a text, and take the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--prompt", default='def read(path):\n    """Return the lines of a file."""\n'
    )
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        browser.size(1240, 800)
        browser.scheme("light")
        browser.open(given.url)
        browser.wait(lambda: browser.visible("#tabs [role=tab]:not([hidden])"), "the page")
        browser.click("#tab-complete")
        browser.click("#options summary")
        for field, value in (("temperature", "0.8"), ("max-tokens", "90")):
            browser.type(f"#{field}", value)
        until = time.monotonic() + SECONDS
        seed = 0
        while time.monotonic() < until:  # the figures need some seconds of work
            seed += 1
            browser.type("#seed", str(seed % 7))
            browser.type("#prompt", given.prompt)
            browser.click("#complete-send")
            browser.wait(lambda: browser.text("#completion-stats"), "the completion")
            time.sleep(seed % 5 / 5)
        browser.click("#options summary")
        _save(browser, given.directory / "page-light.png")
        browser.scheme("dark")
        _save(browser, given.directory / "page-dark.png")
        browser.scheme("light")
        browser.size(400, 860)
        _save(browser, given.directory / "page-narrow.png")


def _save(browser: Browser, path: Path) -> None:
    picture = browser.picture()
    if len(picture) > MAX_BYTES:
        raise SystemExit(f"{path}: expected at most {MAX_BYTES} bytes, found {len(picture)}")
    path.write_bytes(picture)
    print(path, len(picture))


if __name__ == "__main__":
    main()
