"""Where policies are. It imports next to nothing, because every load asks."""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM_POLICY = Path("/etc/prejit/trust.toml")
"""The policy of the machine. It always applies: no argument and no variable can loosen it."""

TRUST_VARIABLE = "PREJIT_TRUST"
"""The environment variable with the policies of a process, separated by colons as in PATH."""


def policy_paths(trust: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """Return the files of all policies that apply, each once. Each can refuse what the others allow.

    Args:
        trust: another policy, or None.
    """
    paths = []
    try:
        os.lstat(SYSTEM_POLICY)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:  # there may be one, so reading it must fail
        paths.append(os.fspath(SYSTEM_POLICY))
    else:
        paths.append(os.fspath(SYSTEM_POLICY))
    paths += filter(None, os.environ.get(TRUST_VARIABLE, "").split(os.pathsep))
    if trust is not None:
        paths.append(os.fspath(trust))
    return tuple(dict.fromkeys(paths))
