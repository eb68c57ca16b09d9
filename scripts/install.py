"""Install packages into the environment that runs this, by its uv, with the user's settings of pip.

    .venv/bin/python -m scripts.install --group test

What uv cannot install, pip does. uv takes a third of pip's CPU time. Neither compiles the modules: a half
minute of CPU time, and most of them are never imported.
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / house) for house in ("runtime", "compiler")]

from prejit.compiler.targets.installing import find_uv, translated  # noqa: E402 (not installed yet)


def main(packages: list[str]) -> int:
    """Install, and return the exit status."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    listed = subprocess.run([*pip, "config", "list"], check=True, stdout=subprocess.PIPE, text=True)
    settings, uv = translated(listed.stdout, os.environ), find_uv()
    if settings is not None and uv is not None:
        command = [uv, "pip", "install", "--quiet", f"--python={sys.executable}", *settings.options]
        environ = os.environ | settings.environ
        if subprocess.run([*command, *packages], check=False, env=environ).returncode == 0:
            return 0
        print("uv cannot install this: trying pip", file=sys.stderr)
    command = [*pip, "install", "--quiet", "--no-compile", *packages]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
