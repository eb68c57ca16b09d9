"""The part of prejit that runs in the processes of a recorded program.

The program's Python may be another one than prejit's, so this imports jax, Python's library and itself.
`site/sitecustomize.py` calls `start` after the program imported jax. Begin with `watch`.

Files here import names from each other, as `from prejit.runtime.recorded.hook.watch import Orders` does.
`from prejit.runtime.recorded.hook import watch` would import the package `prejit`, which may not be there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

ENVIRONMENT = "PREJIT_HOOK"
"""The environment variable with the orders for the hook, as JSON: the fields of `watch.Orders`."""


def start(load: Callable[[str, str], Any]) -> None:
    """Watch jax in this process, as the environment orders; `load` as `watch.Load`."""
    from prejit.runtime.recorded.hook.watch import Orders, install

    orders = os.environ.get(ENVIRONMENT)
    if orders:
        install(Orders(**json.loads(orders)), load)
