"""Methods of a bundle that sleeps: it gives its memory back, and is ready again in milliseconds."""

from __future__ import annotations

from prejit.runtime.base.process_memory import give_back
from prejit.runtime.device._jax_parts import collect_garbage
from prejit.runtime.loaded_bundle import LoadedBundle


class BundleSleeps(LoadedBundle):
    """The methods of `Bundle` that give memory back and take it again."""

    def sleep(self) -> None:
        """Drop executables, and weights on an accelerator, and give their memory back to the system.

        Weights stay mapped files, and what is verified stays verified. A call that runs keeps what it uses,
        and later calls make ready again what they need. Sessions, batches and bound programs keep their own.
        """
        known = vars(self)
        if (encoder := known.get("encoder")) is not None:
            encoder.release()
        getattr(known.get("decoder"), "spares", {}).clear()
        self._programs.release()
        if (dispatched := known.get("dispatched")) is not None:
            dispatched.close()
        known.pop("on_jax", None)
        collect_garbage()
        give_back()

    def wake(self) -> None:
        """Make the programs ready that were used so far. Without it, the first calls do.

        Raises:
            ClosedError: the bundle is closed.
            ExecutableError: XLA cannot load one on this machine any more.
        """
        if names := self._programs.obtained():
            self.prepare(*names)
