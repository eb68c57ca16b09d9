"""A `[[program]]` of a bundle as a model of MLServer, by the Open Inference Protocol.

`model-settings.json` beside it:

    {
      "name": "score",
      "implementation": "prejit.server.adapters.mlserver_model.PrejitModel",
      "parameters": {"uri": "/bundles/scoring", "extra": {"program": "score"}}
    }
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.errors import InferenceError
from mlserver.types import InferenceRequest, InferenceResponse, MetadataTensor, ResponseOutput
from mlserver.utils import get_model_uri

from prejit.runtime.errors import PrejitError
from prejit.server.adapters.hosted_bundle import HostedProgram
from prejit.server.inference.inference_models import results
from prejit.server.inference.inference_protocol import TensorMetadata


class PrejitModel(MLModel):
    """A program. `parameters.extra` has its name, `program`, and may have `on_mismatch`."""

    async def load(self) -> bool:
        """Load the bundle at `parameters.uri`, and describe its tensors."""
        extra: dict[str, Any] = self._settings.parameters.extra or {}
        uri = await get_model_uri(self._settings)
        self._program = await asyncio.to_thread(HostedProgram, uri, **extra)
        self.inputs = [_described(tensor) for tensor in self._program.inputs]
        self.outputs = [_described(tensor) for tensor in self._program.outputs]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Run the program for one request."""
        given = {tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs}
        parameters = payload.parameters.model_dump(exclude_unset=True) if payload.parameters else {}
        for name in ("content_type", "headers"):  # of MLServer
            parameters.pop(name, None)
        try:
            value = await asyncio.wrap_future(self._program.submit(given, parameters))
        except PrejitError as error:
            raise InferenceError(str(error)) from error
        outputs = [_encoded(name, each) for name, each in results(value).items()]
        return InferenceResponse(model_name=self.name, id=payload.id, outputs=outputs)

    async def unload(self) -> bool:
        """Free the bundle."""
        self._program.close()
        return True


def _described(tensor: TensorMetadata) -> MetadataTensor:
    return MetadataTensor(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)


def _encoded(name: str, array: np.ndarray[Any, Any]) -> ResponseOutput:
    found = NumpyCodec.encode_output(name, array)
    found.shape = list(array.shape)  # it makes [N, 1] of [N]
    return found
