"""A bundle inside a server of others: the application of `prejit serve`, or one program by its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, final

from prejit.runtime.errors import UsageError
from prejit.runtime.programs.usage_hint import functions_of
from prejit.server.gate.server_settings import Settings
from prejit.server.inference.inference_models import InferenceModels
from prejit.server.served.served import Models
from prejit.server.served.served_loading import BundleSource, EngineOptions, MakeServed, finish

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from prejit.server.inference.inference_protocol import TensorMetadata

OnMismatch = Literal["jit", "error"]
"""The values of `on_mismatch`, as `load` takes them."""


def load_models(
    path: str, *, name: str | None = None, slots: int | None = None, on_mismatch: OnMismatch = "jit"
) -> Models:
    """Load a bundle and make its engine, as `prejit serve` does. Nothing is left to compile then.

    Args:
        path: its directory, or a reference such as `oci://HOST/REPOSITORY:TAG`.
        name: the name that clients give as their model; None: its own.
        slots: how many generations run at once; None: the largest batch of the bundle.
        on_mismatch: as of `load`.

    Raises:
        MismatchError, RejectError, StoreError, UntrustedError, UsageError: as `load` and `Engine`.
    """
    engines = EngineOptions(slots=slots, must_match=on_mismatch == "error")
    make = MakeServed(engines, 1, lambda _, engine: engine, Counter())
    served = make(BundleSource(path, name))
    finish(served)
    if not served.bundle.matched:
        served.bundle.prepare()
    return Models(served)


def make_bundle_app(models: Models) -> Starlette:
    """Return the application of `prejit serve`: OpenAI's API, the Open Inference Protocol, metrics, a page.

    The server around it has the keys and the limits.
    """
    from prejit.server.http.app import make_app

    return make_app(models, Settings())


@final
class HostedProgram:
    """A `[[program]]` of a bundle that takes and gives arrays by the names of their tensors.

    Attributes:
        inputs, outputs: the tensors, as the Open Inference Protocol describes them.
    """

    def __init__(
        self, path: str, program: str | None = None, on_mismatch: OnMismatch = "jit"
    ) -> None:
        """Load the bundle. `program` is the name of the program; None: the bundle has only one.

        Raises:
            UsageError: there is no such program, or there are several and no name.
            MismatchError, RejectError, StoreError, UntrustedError: as `load`.
        """
        self._models = load_models(path, on_mismatch=on_mismatch)
        try:
            if program is None:
                program = self._only()
            self._model = InferenceModels(self._models).get(program)
            self.inputs: list[TensorMetadata] = self._model.inputs
            self.outputs: list[TensorMetadata] = self._model.outputs
        except BaseException:
            self.close()
            raise

    def _only(self) -> str:
        [served] = self._models
        names = sorted(functions_of(served.bundle.config.programs))
        if len(names) != 1:
            raise UsageError(
                f"{served.path}: expected a bundle with one [[program]], found {', '.join(names) or 'none'}",
                hint="give the name of one of them as `program`" if names else None,
            )
        return names[0]

    def submit(self, given: Mapping[str, Any], parameters: Mapping[str, Any]) -> Future[Any]:
        """Begin to run the program; `inference_models.results` names the arrays of what it returns.

        Args:
            given: arrays by the names of their tensors. They are copied.
            parameters: static arguments.

        Raises:
            UsageError, QueueFullError, ClosedError: as `Engine.submit_call`.
        """
        args, kwargs = self._model.arguments(given, parameters)
        return self._model.served.engine.submit_call(self._model.program, *args, **kwargs)

    def close(self) -> None:
        """Close the engine and the bundle."""
        for served in self._models:
            served.close()
            served.bundle.close()
