"""The programs of the served bundles as models of the Open Inference Protocol.

A program is the model `BUNDLE.PROGRAM`, and `PROGRAM` too if no other served bundle has one of that name.
Its arguments and results are tensors, named by their place: `x`, `batch.tokens`, `layers.0`. A single result
that has no place is `result`. Static arguments are parameters of a request.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from prejit.runtime.base.threads_and_forks import once
from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.device.jax_arrays import weakened
from prejit.runtime.errors import UsageError
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.checks.call_programs import check_arrays, check_static, check_tree
from prejit.runtime.format.constants import Constant, plain
from prejit.runtime.programs import pytree
from prejit.runtime.programs.usage_hint import functions_of
from prejit.server.inference.inference_protocol import TensorMetadata, datatype_of
from prejit.server.served.served import ModelNotFoundError, Served

WHOLE = "result"
"""The name of a tensor that is all that a program returns, or takes."""
_PROTOCOL_PARAMETERS = frozenset(
    ("binary_data_output", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout")
)
"""Parameters of a request that belong to the protocol; the others are static arguments."""


@dataclass(frozen=True, slots=True)
class _Form:
    """The arguments and results of the buckets of a program with the same tree.

    Attributes:
        arguments: the tree of arguments.
        inputs: the arguments of each bucket, in the order of the leaves.
        results: the results of each bucket.
        optional: names of arguments that a caller may leave out.
    """

    arguments: trees.Node
    inputs: tuple[tuple[Array, ...], ...]
    results: tuple[tuple[Array, ...], ...]
    optional: frozenset[str]


@final
class InferenceModel:
    """A program of a bundle, all buckets of it.

    Attributes:
        served: the bundle.
        program: name of the program.
        static: the values of each static argument, by its name.
    """

    def __init__(self, served: Served, program: str, buckets: Sequence[ProgramEntry]) -> None:
        """Read the program table.

        Raises:
            RejectError: it is damaged.
        """
        self.served = served
        self.program = program
        self.static = static_values(buckets)
        forms: dict[str, list[ProgramEntry]] = {}
        for bucket in buckets:
            forms.setdefault(bucket.arguments_tree or "", []).append(bucket)
        self._forms = [self._form(each) for each in forms.values()]

    def _form(self, buckets: Sequence[ProgramEntry]) -> _Form:
        config = self.served.bundle.config
        inputs, results = [], []
        for each in buckets:
            where = f"{config.bundle}: program table of {config.target}: {each.name}"
            inputs.append(check_arrays(each.arguments, each.kind, config.mesh, where))
            results.append(check_arrays(each.results, each.kind, config.mesh, where))
        tree = check_tree(buckets[0].arguments_tree, inputs[0], buckets[0].name)
        assert isinstance(tree, trees.Node)  # arguments are a list or a dict
        mask = buckets[0].mask
        optional = frozenset() if mask is None else frozenset((mask,))
        return _Form(tree, tuple(inputs), tuple(results), optional)

    @once
    def inputs(self) -> list[TensorMetadata]:
        """The tensors that the program takes.

        Raises:
            UsageError: the protocol has no name for a dtype.
        """
        return _tensors([each for form in self._forms for each in form.inputs])

    @once
    def outputs(self) -> list[TensorMetadata]:
        """The tensors that the program gives. Errors as `inputs`."""
        return _tensors([each for form in self._forms for each in form.results])

    def arguments(
        self, given: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments that hold these arrays.

        Args:
            given: arrays by the names of tensors.
            parameters: those of the request, static arguments among them.

        Raises:
            UsageError: a tensor is missing, or there is one, or a parameter, that the program does not take.
        """
        for form in self._forms:
            if _names(form.arguments) - form.optional <= given.keys() <= _names(form.arguments):
                args, kwargs = _nested(form, given)
                return args, kwargs | self._static(parameters)
        names = _names(self._forms[0].arguments)
        missing = sorted(names - self._forms[0].optional - given.keys())
        unknown = sorted(given.keys() - names)
        found = ", and ".join(
            [f"{name!r:.200}{did_you_mean(name, names)}" for name in unknown[:1]]
            + [f"{name!r} missing" for name in missing[:1]]
        )
        expected = ", ".join(map(repr, sorted(names))) or "none"
        raise UsageError(f"inputs: expected {expected} for {self.program!r}, found {found}")

    def _static(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        # A static argument may have the name of one of the protocol's own.
        others = _PROTOCOL_PARAMETERS - self.static.keys()
        given = {k: v for k, v in parameters.items() if k not in others}
        if unknown := given.keys() - self.static.keys():
            known = ", ".join(sorted(self.static)) or "none"
            raise UsageError(
                f"parameters: expected static arguments of {self.program!r} ({known}), "
                f"found {min(unknown)!r:.80}{did_you_mean(min(unknown), self.static)}"
            )
        return given


@final
class InferenceModels:
    """The models of a server by name."""

    def __init__(self, models: Iterable[Served]) -> None:
        """Find the programs of these bundles."""
        self._by_name: dict[str, InferenceModel] = {}
        alone: dict[str, list[InferenceModel]] = {}
        for served in models:
            for name, entries in functions_of(served.bundle.config.programs).items():
                model = InferenceModel(served, name, entries)
                alone.setdefault(name, []).append(model)
                self._by_name[f"{served.name}.{name}"] = model
        for name, found in alone.items():
            if len(found) == 1:
                self._by_name.setdefault(name, found[0])

    def get(self, name: str) -> InferenceModel:
        """Return the model of that name.

        Raises:
            ModelNotFoundError: there is none.
        """
        if (found := self._by_name.get(name)) is None:
            known = ", ".join(sorted(self._by_name)) or "none: the bundles hold no [[program]]"
            raise ModelNotFoundError(
                f"expected one of the models ({known}), found {name!r:.200}"
                + did_you_mean(name, self._by_name)
            )
        return found


def static_values(buckets: Sequence[ProgramEntry]) -> dict[str, list[Any]]:
    """Return the values that buckets have for each static argument, by its name.

    A value that no request can give, such as a dataclass, is returned as a text for people.
    """
    found: dict[str, dict[str, Any]] = {}
    for bucket in buckets:
        for name, value in check_static(bucket, bucket.name).items():
            found.setdefault(name, {})[repr(value)] = _as_json(value)
    return {name: [*values.values()] for name, values in found.items()}


def _as_json(value: Constant) -> Any:
    match plain(value):
        case ["float", text] if math.isfinite(number := float.fromhex(text)):
            return number
        case list():
            return str(value)
        case same:
            return same


def results(value: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of what a program returned, by the names of tensors."""
    return {pytree.dotted(path) or WHOLE: array for path, array in _leaves(value, ())}


def _leaves(value: Any, at: trees.Path) -> Iterator[tuple[trees.Path, np.ndarray[Any, Any]]]:
    """Yield each array of a result with its path. What else it has are constants and None."""
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif hasattr(value, "_fields"):
        parts = zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    elif dataclasses.is_dataclass(value):
        parts = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
    elif hasattr(value, "dtype"):
        yield at, np.asarray(value)
    for key, part in parts:
        yield from _leaves(part, (*at, key))


def _names(tree: trees.Tree) -> frozenset[str]:
    return frozenset(pytree.dotted(path) for path in trees.paths(tree))


def _nested(form: _Form, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as the function takes them."""
    weak = {pytree.dotted(array.path) for array in form.inputs[0] if array.weak}
    given = {name: weakened(value) if name in weak else value for name, value in given.items()}
    values: dict[trees.Key, Any] = {}
    for key, child in zip(form.arguments.keys, form.arguments.children, strict=True):
        names = [pytree.dotted((key, *path)) for path in trees.paths(child)]
        if names and names[0] not in given:
            continue  # the mask, which the engine makes
        values[key] = pytree.unflatten(child, (given[name] for name in names))
    if form.arguments.kind == "dict":
        return (), {str(key): value for key, value in values.items()}
    return tuple(values.values()), {}


def _tensors(buckets: Sequence[tuple[Array, ...]]) -> list[TensorMetadata]:
    """Return the tensors of all buckets; an extent in which they differ is -1."""
    found: dict[str, TensorMetadata] = {}
    for arrays in buckets:
        for array in arrays:
            name = pytree.dotted(array.path) or WHOLE
            open_ = array.variables or ("",) * len(array.shape)
            shape = [
                -1 if variable else extent
                for variable, extent in zip(open_, array.shape, strict=True)
            ]
            if (known := found.get(name)) is not None:
                same = len(known.shape) == len(shape)
                pairs = zip(known.shape, shape, strict=True) if same else ()
                shape = [a if a == b else -1 for a, b in pairs]
            datatype = datatype_of(array.dtype, name)
            found[name] = TensorMetadata(name=name, datatype=datatype, shape=shape)
    return list(found.values())
