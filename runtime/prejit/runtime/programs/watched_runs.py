"""Watch the runs of a bundle's programs: each goes through a function while somebody looks.

Nothing of it is on the way of a run while nobody does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

from prejit.runtime.device.device import Executable

if TYPE_CHECKING:
    from prejit.runtime.device._jaxlib import Run
    from prejit.runtime.programs.ready_programs import Programs

Wrap = Callable[[str, "Run"], "Run"]
"""Returns what runs in place of a program, from the program's name and its own run."""


def watch(programs: Programs, wrap: Wrap | None) -> Wrap | None:
    """Let programs run through what `wrap` returns; None: as they are again. Return the one before.

    Calls that jaxlib dispatches by itself (`dispatched_calls`) do not come by.
    """
    ready = programs._ready
    before, plain = (ready.wrap, ready.plain) if isinstance(ready, _Watched) else (None, ready)
    programs._ready = dict(plain) if wrap is None else _Watched(wrap, plain)
    return before


@final
class _Watched(dict[str, Executable]):
    """Ready programs that run through `wrap`, also those that become ready later."""

    def __init__(self, wrap: Wrap, plain: dict[str, Executable]) -> None:
        super().__init__()
        self.wrap = wrap
        self.plain: dict[str, Executable] = {}
        for name, executable in list(plain.items()):
            self[name] = executable

    def __setitem__(self, name: str, executable: Executable) -> None:
        self.plain[name] = executable
        super().__setitem__(name, executable._replace(run=self.wrap(name, executable.run)))

    def popitem(self) -> tuple[str, Executable]:
        name, _ = super().popitem()
        return name, self.plain.pop(name)
