"""A headless Chromium, driven by chromedriver's WebDriver protocol. Needs no package beside Debian's two."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

FLAGS = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    *("--force-prefers-reduced-motion", "--no-sandbox"),  # the sandbox does not start as root
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "ArrowRight": "\ue014"}


def missing() -> str:
    """What a machine lacks for a browser; empty: nothing."""
    lacks = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(lacks)}: apt-get install chromium chromium-driver" if lacks else ""


class Browser:
    """A browser with one tab. Use it in a `with` statement."""

    def __init__(self, profile: Path) -> None:
        """Start it with a profile directory of its own."""
        self._profile = profile

    def __enter__(self) -> Self:
        driver = shutil.which("chromedriver")
        assert driver is not None, missing()
        self._driver = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                break
        else:
            raise AssertionError("chromedriver did not start")
        self._at = f"http://127.0.0.1:{found[1]}"
        arguments = [*FLAGS, f"--user-data-dir={self._profile}"]
        options = {"binary": shutil.which("chromium"), "args": arguments}
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        session = self._send("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._at += f"/session/{session['sessionId']}"
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._send("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.communicate()

    def open(self, url: str) -> None:
        self._send("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._send("POST", "/execute/sync", {"script": script, "args": [*arguments]})

    def text(self, selector: str) -> str:
        found = self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        assert isinstance(found, str)
        return found

    def visible(self, selector: str) -> bool:
        script = "return document.querySelector(arguments[0])?.checkVisibility() ?? false"
        return bool(self.run(script, selector))

    def click(self, selector: str) -> None:
        """Click an element as a user does: it must be visible, and nothing may cover it."""
        self._send("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        element = self._find(selector)
        self._send("POST", f"/element/{element}/clear", {})
        self._send("POST", f"/element/{element}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, in whatever has the focus."""
        actions: list[dict[str, str]] = []
        for key in keys:
            value = _KEYS.get(key, key)
            actions += [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        keyboard = {"type": "key", "id": "keys", "actions": actions}
        self._send("POST", "/actions", {"actions": [keyboard]})

    def choose(self, selector: str, value: str) -> None:
        self.click(f'{selector} option[value="{value}"]')

    def wait(self, holds: Callable[[], Any], what: str, seconds: float = 20) -> Any:
        """Wait until a condition holds; what is it, for the error."""
        until = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < until, f"waited {seconds} s for {what}: {self.text('body')}"
            time.sleep(0.02)
        return found

    def size(self, width: int, height: int, *, scale: float = 1) -> None:
        sizes = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", sizes)

    def scheme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        self._devtools("Emulation.setEmulatedMedia", {"features": features})

    def picture(self) -> bytes:
        return base64.b64decode(self._send("GET", "/screenshot"))

    def console(self) -> list[str]:
        """Messages of the console since the last call: warnings, errors, failed requests."""
        return [entry["message"] for entry in self._log("browser")]

    def hosts(self) -> set[str]:
        """Hosts that the page sent requests to since the last call."""
        events = (json.loads(entry["message"])["message"] for entry in self._log("performance"))
        urls = (
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        )
        return {urlsplit(url).netloc for url in urls if not url.startswith(("data:", "blob:"))}

    def _log(self, kind: str) -> Iterator[dict[str, Any]]:
        yield from self._send("POST", "/se/log", {"type": kind})

    def _devtools(self, command: str, params: Mapping[str, Any]) -> Any:
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def _find(self, selector: str) -> str:
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        return str(found[_ELEMENT])

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._at + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                said = json.load(error)["value"]
            raise AssertionError(f"{said['error']}: {said['message'].splitlines()[0]}") from None
