"""Commands that tests run to their end."""

from __future__ import annotations

import subprocess
from typing import Any


def ran(
    *command: object, status: int | None = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it printed. Its exit status must be `status`; None: any."""
    words = [*map(str, command)]
    given: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 600, **options}
    done = subprocess.run(words, check=False, **given)
    assert status in (None, done.returncode), f"{words}\n{done.stdout}\n{done.stderr}"
    return done
