"""A `[[program]]` of a bundle as a model of Triton's Python backend.

`MODEL/1/model.py` has one line, `from prejit.server.adapters.triton_model import TritonPythonModel`, and
`MODEL/config.pbtxt` names the bundle. Triton asks the model for its tensors:

    backend: "python"
    parameters { key: "bundle" value { string_value: "/bundles/scoring" } }
    parameters { key: "program" value { string_value: "score" } }
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import triton_python_backend_utils as triton  # only Triton's own process has it

from prejit.runtime.errors import PrejitError, UsageError
from prejit.server.adapters.hosted_bundle import HostedProgram
from prejit.server.inference.inference_models import results


class TritonPythonModel:
    """The class that Triton looks for in `model.py`."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add the tensors of the program to the configuration of the model."""
        program = _open(config.as_dict())
        try:
            for tensors, add in (
                (program.inputs, config.add_input),
                (program.outputs, config.add_output),
            ):
                for tensor in tensors:
                    kind = f"TYPE_{tensor.datatype}"
                    add({"name": tensor.name, "data_type": kind, "dims": tensor.shape})
        finally:
            program.close()
        # The shapes are whole: the program's own buckets have the batch.
        config.set_max_batch_size(0)
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the bundle."""
        self._program = _open(json.loads(args["model_config"]))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer some requests, whose rows may share runs."""
        return [_response(run) for run in [self._submit(request) for request in requests]]

    def finalize(self) -> None:
        """Free the bundle."""
        self._program.close()

    def _submit(self, request: Any) -> Future[Any] | PrejitError:
        given = {tensor.name(): np.from_dlpack(tensor) for tensor in request.inputs()}
        try:
            return self._program.submit(given, json.loads(request.parameters()))
        except PrejitError as error:
            return error


def _open(config: Mapping[str, Any]) -> HostedProgram:
    """Load the bundle that the parameters of a configuration name."""
    parameters = {k: each["string_value"] for k, each in config.get("parameters", {}).items()}
    if "bundle" not in parameters:
        raise UsageError(
            f"config.pbtxt of {config.get('name')}: expected the parameter bundle, found none",
            hint='add: parameters { key: "bundle" value { string_value: "/bundles/NAME" } }',
        )
    program = HostedProgram(
        parameters["bundle"],
        parameters.get("program"),
        "error" if parameters.get("on_mismatch") == "error" else "jit",
    )
    for tensor in (*program.inputs, *program.outputs):
        if tensor.datatype == "BF16":
            program.close()
            raise UsageError(
                f"{tensor.name}: expected a dtype of which Triton's Python backend makes arrays, found BF16",
                hint="let the program take and return float32",
            )
    return program


def _response(run: Future[Any] | PrejitError) -> Any:
    """Return the response with the results of a run, or with its error."""
    try:
        if isinstance(run, PrejitError):
            raise run
        arrays = results(run.result())
    except PrejitError as error:
        return triton.InferenceResponse(error=triton.TritonError(str(error)))
    return triton.InferenceResponse([_tensor(name, each) for name, each in arrays.items()])


def _tensor(name: str, array: np.ndarray[Any, Any]) -> Any:
    """Return a tensor of Triton with a copy of an array.

    Triton 2.51 was compiled for NumPy 1: with NumPy 2 its own reading of arrays finds zeros or nothing, and
    DLPack is right. It names a capsule that it has taken `used_dlpack`. NumPy's destructor would report that
    as an error, and has nothing to free.
    """
    capsule = array.copy().__dlpack__()  # results are read-only, which DLPack cannot say
    ctypes.pythonapi.PyCapsule_SetDestructor(ctypes.py_object(capsule), None)
    return triton.Tensor.from_dlpack(name, capsule)
