"""The JSON of the Open Inference Protocol."""

from __future__ import annotations

from typing import Any

import msgspec


class InferInput(msgspec.Struct, kw_only=True):
    """A tensor of a request.

    Attributes:
        name: its place among the arguments.
        shape: its extents.
        datatype: as in the metadata of the model.
        data: numbers in row-major order, nested or flat; without them, the bytes follow the JSON.
        parameters: `binary_data_size` is the number of those bytes.
    """

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] = {}


class InferOutput(msgspec.Struct, kw_only=True):
    """A result that a client wants.

    Attributes:
        name: its place among the results.
        parameters: `binary_data` asks for bytes behind the JSON.
    """

    name: str
    parameters: dict[str, Any] = {}


class InferRequest(msgspec.Struct, kw_only=True):
    """A call of a program.

    Attributes:
        inputs: its arguments.
        id: comes back in the response.
        parameters: static arguments, and `binary_data_output`.
        outputs: the results that the client wants; all of them if it is missing.
    """

    inputs: list[InferInput] = []
    id: str | None = None
    parameters: dict[str, Any] = {}
    outputs: list[InferOutput] | None = None


class InferResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tensor of a response.

    Attributes:
        name: its place among the results.
        datatype: the protocol's name of its dtype.
        shape: its extents.
        data: its elements in row-major order; null where JSON has no number for one.
        parameters: `binary_data_size` is the number of its bytes behind the JSON.
    """

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class InferResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The results of a program.

    Attributes:
        model_name: the name in the path.
        model_version: always 1.
        id: as in the request.
        outputs: the results.
    """

    model_name: str
    model_version: str
    outputs: list[InferResult]
    id: str | None = None


class TensorMetadata(msgspec.Struct, kw_only=True):
    """A tensor of a model.

    Attributes:
        name: its place.
        datatype: the protocol's name of its dtype.
        shape: its extents; -1 where buckets differ or a caller may give less.
    """

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct, kw_only=True):
    """A model.

    Attributes:
        name: the name in the path.
        versions: its versions.
        platform: what runs it.
        inputs, outputs: its tensors.
    """

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(msgspec.Struct, kw_only=True):
    """A server.

    Attributes:
        name: what it is.
        version: of prejit.
        extensions: extensions of the protocol that it has.
    """

    name: str
    version: str
    extensions: list[str]


class InferError(msgspec.Struct, kw_only=True):
    """An error.

    Attributes:
        error: one sentence with where, what was expected and what was found.
    """

    error: str
