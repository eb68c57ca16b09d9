"""The part of prejit that runs in the processes of a recorded program.

The program's Python may be another one than prejit's, so this imports jax and Python's library alone.
`site/sitecustomize.py` calls `start` after the program imported jax. Begin with `watch`.
"""

from __future__ import annotations

import json
import os

ENVIRONMENT = "PREJIT_HOOK"
"""The environment variable with the orders for the hook, as JSON: the fields of `watch.Orders`."""


def start() -> None:
    """Watch jax in this process, as the environment orders; nothing where it orders nothing."""
    from . import watch

    orders = os.environ.get(ENVIRONMENT)
    if orders:
        watch.install(watch.Orders(**json.loads(orders)))
