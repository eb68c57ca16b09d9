"""uv in the place of pip, where it is installed: it links files of its cache instead of copying gigabytes.

uv reads none of pip's settings. `translated` gives them to uv as environment variables, which no other user
of the machine sees, unlike arguments: the URL of an index may hold a password.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"(?P<section>[\w:-]+)\.(?P<name>[\w-]+)=(?P<value>.*)")
"""A line of `pip config list`: `global.index-url='...'`, `:env:.find-links='...'`."""
_SECTIONS = ("global", "install", ":env:")
"""The sections of pip's settings that count for `pip install`, the strongest last."""
_WITHOUT_EFFECT = frozenset(
    {
        *("cache-dir", "no-cache-dir", "break-system-packages", "disable-pip-version-check"),
        *("compile", "no-compile", "default-timeout", "debug", "exists-action", "log", "no-color"),
        *("no-input", "no-warn-script-location", "progress-bar", "quiet", "require-virtualenv"),
        *("require-venv", "root-user-action", "user", "no-user", "verbose", "timeout", "retries"),
        *("only-binary", "prefer-binary", "no-python-version-warning", "config-file"),
        *("target", "prefix", "root", "python", "use-feature", "no-build-isolation"),
    }
)
"""Settings of pip that do not change what is installed, or that prejit itself decides."""
_LISTS = {
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
"""Settings with several values: uv's variable, and what separates values there."""
_OFF = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class UvSettings:
    """Settings with which uv installs what pip would install.

    Attributes:
        environ: environment variables.
        options: options of `uv pip install` that have no variable.
    """

    environ: dict[str, str]
    options: tuple[str, ...]


def find_uv() -> str | None:
    """Return the path of uv: beside this interpreter, or on the path."""
    beside = os.path.dirname(sys.executable)
    return shutil.which("uv", path=os.pathsep.join((beside, *os.get_exec_path())))


def translated(listed: str, environ: Mapping[str, str]) -> UvSettings | None:
    """Return the settings with which uv installs what pip would install; None: uv has none like them.

    Args:
        listed: what `pip config list` printed.
        environ: the environment variables of the build. Variables of uv in it win over settings of pip.
    """
    # pip chooses the newest version of all indexes; uv would look no further than the first that has one.
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_PYTHON_DOWNLOADS": "never"}
    found["UV_SYSTEM_CERTS"] = "1"  # as pip does
    options: tuple[str, ...] = ()
    for name, value in _settings(listed).items():
        if name in _LISTS:
            variable, separator = _LISTS[name]
            values = [_absolute(each) for each in value.split()]
            if any(separator in each for each in values):
                return None
            found[variable] = separator.join(values)
        elif name == "index-url":
            found["UV_DEFAULT_INDEX"] = value
        elif name in ("cert", "client-cert"):
            variable = "SSL_CERT_FILE" if name == "cert" else "SSL_CLIENT_CERT"
            if os.path.isdir(value):
                return None
            found[variable] = os.path.abspath(value)
        elif name == "proxy":
            proxy = value if "://" in value else f"http://{value}"
            found |= dict.fromkeys(("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY"), proxy)
        elif name == "no-index":
            if value.lower() not in _OFF:
                options = ("--no-index",)
        elif name == "pre":
            if value.lower() not in _OFF:
                found["UV_PRERELEASE"] = "allow"
        elif name not in _WITHOUT_EFFECT:
            return None
    own = {name: value for name, value in environ.items() if name.startswith("UV_")}
    return UvSettings(found | own, options)


def install_command(uv: str, python: Path, constraints: Path, settings: UvSettings) -> list[str]:
    """Return the command to which the caller appends the packages.

    Args:
        uv: its path.
        python: the interpreter of the environment.
        constraints: the constraints file.
        settings: from `translated`.
    """
    return [
        *(uv, "pip", "install", f"--python={python}", f"--constraint={constraints}"),
        *("--only-binary=:all:", "--no-progress", "--color=never", *settings.options),
    ]


def _settings(listed: str) -> dict[str, str]:
    """Return the settings for `pip install`, by name."""
    by_section: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listed.splitlines():
        if (match := _LINE.fullmatch(line.strip())) and match["section"] in by_section:
            by_section[match["section"]][match["name"]] = str(ast.literal_eval(match["value"]))
    return {
        name: value for section in _SECTIONS for name, value in by_section[section].items() if value
    }


def _absolute(value: str) -> str:
    """Return a directory's absolute path, because uv runs elsewhere; anything else as it is."""
    return os.path.abspath(value) if os.path.exists(value) else value
