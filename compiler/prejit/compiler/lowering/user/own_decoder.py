"""Find the decoder of the user that `[model] module` names, and take its parameters apart from it."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from prejit.compiler.lowering.user.flat_arrays import Bind, arrays_in, check_fit, differing_names
from prejit.compiler.lowering.user.flax_modules import own_values, variables_of
from prejit.compiler.lowering.user.found_function import nested_by_dots
from prejit.compiler.models import quantizing
from prejit.compiler.models.own_decoder_narrowing import Stored, narrowed
from prejit.compiler.models.parameters import Parametrized, flat_parameters, parametrized
from prejit.runtime.base.wording import shortened
from prejit.runtime.errors import ManifestError
from prejit.runtime.format.arrays import DTYPES

if TYPE_CHECKING:
    from prejit.compiler.lowering.user.modules import UserModules
    from prejit.compiler.manifest import manifest

Values = Mapping[str, Any]

_LARGEST_CONSTANT = 1 << 20
"""Largest array in bytes that a decoder's code may hold. Every program and every target would hold a copy."""
CHECK_MODEL = "`prejit check-model MODULE` tries all that a decoder must do"
"""The hint of errors about a decoder of the user."""


@dataclass(frozen=True)
class OwnModel:
    """A decoder of the user.

    Attributes:
        label: its name, for messages.
        vocab_size, max_positions: as in models/protocol.py.
        reads_source: whether it is an encoder-decoder.
        exact: the model as the user gave it.
        stored: the model as the bundle stores it.
        modules: the modules that it was found in.
    """

    label: str
    vocab_size: int
    max_positions: int | None
    reads_source: bool
    exact: Stored
    stored: Stored
    modules: UserModules


@dataclass(frozen=True)
class _Held:
    """An object apart from its arrays.

    Attributes:
        arrays: its own arrays by name, or their shapes.
        bind: returns the object with other arrays.
        matrices: names of those that may be stored in a narrow dtype.
        is_nnx: whether it is a module of flax.nnx, whose layers may be those of prejit.
    """

    arrays: Values
    bind: Bind
    matrices: Collection[str]
    is_nnx: bool = False


def find_model(
    model: manifest.Model,
    at: str,
    parameters: Mapping[str, np.ndarray[Any, Any]] | None,
    modules: UserModules,
    nested: Callable[[Mapping[str, Any]], Any] | None = None,
    *,
    out_in: bool = False,
) -> OwnModel:
    """Import the decoder that a manifest names, and take its parameters apart from it.

    It is a module of flax.nnx, one of flax.linen, which needs params, or any other object: a pytree, such as
    a module of equinox, or a plain one whose attributes hold arrays. All arrays are parameters.

    `parameters` are values by flat name, joined by dots (None: the manifest gives no params), and
    `nested` makes the params of a flax.linen module of them (None: nested dicts, by the dots in names).
    With `out_in`, matrices that it only multiplies with are stored (out, in), as kernels read them. `at`
    is the manifest, for errors.

    Raises:
        ManifestError: the object does not exist, cannot be made, or is no decoder; or params does not fit it.
        BuildError: its code raises.
    """
    where, label = f"{at}: model.module", model.label
    found = model.module
    if isinstance(found, str):
        found = modules.find(found, where, impure=model.impure)
    found = _instance(found, modules, where, label)
    held = _held(found, parameters, nested or nested_by_dots, where, label)
    arrays = held.arrays if parameters is None else _fitting(held.arrays, parameters, at, label)
    values = {name: _value(arrays[name], f"{where}: {label}: {name}") for name in sorted(arrays)}
    shapes = {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in values.items()}
    with modules.tracing(f"{where}: cannot read {label}", CHECK_MODEL):
        found = held.bind(values)
        _check_form(found, where, label)
        longest = found.max_positions
        sizes = int(found.vocab_size), None if longest is None else int(longest)
    exact = Stored(
        Parametrized(shapes, held.bind),
        {name: partial(values.__getitem__, name) for name in values},
    )
    with modules.tracing(f"{where}: cannot call {label}", CHECK_MODEL):
        stored = _stored(exact, held, model.dtype, out_in=out_in)
    return OwnModel(label, *sizes, _reads_source(found), exact, stored, modules)


def check_call(model: OwnModel, cache: Any, where: str) -> None:
    """Check the results of a call of one token, by their shapes, and that no array is left in the program.

    `cache` has the shapes of its cache; `where` is the manifest, for errors.

    Raises:
        ManifestError: logits or cache are not as models/protocol.py says, or the code holds arrays that are
            no parameters.
    """
    rows = jax.tree.leaves(cache)[0].shape[0]
    row = jax.ShapeDtypeStruct((rows,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32)

    def call(weights: Values, *arguments: Any) -> Any:
        return model.exact.model.bind(weights)(*arguments)

    weights = dict(model.exact.model.weights)
    traced, found = jax.make_jaxpr(call, return_shape=True)(weights, tokens, row, row, cache)
    logits, after = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
    wanted = jax.ShapeDtypeStruct((rows, model.vocab_size), jnp.float32)
    for what, expected, one in (("logits", wanted, logits), ("cache", cache, after)):
        if (given := _shapes(one)) != _shapes(expected):
            raise ManifestError(
                f"{where}: {model.label}: {what}: expected {_shapes(expected)} for {rows} rows of one token, "
                f"found {given}",
                hint=CHECK_MODEL,
            )
    held = [each for each in traced.consts if each.nbytes > _LARGEST_CONSTANT]
    if held:
        raise ManifestError(
            f"{where}: {model.label}: expected all large arrays to be parameters, found "
            f"{', '.join(_shapes(each) for each in held[:4])} inside its code",
            hint="make them attributes of the object itself, or of a pytree or flax module that it holds: "
            "arrays of any other object are not found",
        )


def _shapes(tree: Any) -> str:
    """Return a pytree of arrays in words, at most 400 characters."""

    def spelled(leaf: Any) -> str:
        return f"{leaf.dtype}{[*leaf.shape]}" if hasattr(leaf, "shape") else type(leaf).__name__

    text = str(jax.tree.map(spelled, tree)).replace("'", "")
    return shortened(text, 400)


def _instance(found: Any, modules: UserModules, where: str, label: str) -> Any:
    """Return the object, or the one that a function or class makes."""
    if not (inspect.isroutine(found) or isinstance(found, type | functools.partial)):
        return found
    is_class = isinstance(found, type)
    kind = "class" if is_class else "function"
    try:
        # The metaclass of a class, as that of flax.nnx, may take any arguments; None stands for self.
        signature = inspect.signature(found.__init__ if is_class else found)  # type: ignore[misc]
        signature.bind(*[None] * is_class)
    except TypeError as error:
        raise ManifestError(
            f"{where}: expected a {kind} that takes no arguments, and {label!r} does: {error}",
            hint="make an object beside it and name that: model = Model(...)",
        ) from error
    except ValueError:  # a function in C may have no signature
        pass
    with modules.tracing(f"{where}: cannot make the model of {label}", CHECK_MODEL):
        return found()


def _held(
    found: Any,
    parameters: Values | None,
    nested: Callable[[Mapping[str, Any]], Any],
    where: str,
    label: str,
) -> _Held:
    if isinstance(found, linen.Module):
        if parameters is None:
            raise ManifestError(
                f"{where}: expected model.params beside {label}, a module of flax.linen, which holds no "
                "values; found none",
                hint="save the params of model.init(...) with orbax or safetensors",
            )
        # The values are all collections of variables, or only those of the collection `params`.
        prefix = "params." if any(name.startswith("params.") for name in parameters) else ""
        return _Held(
            parameters,
            lambda values: found.bind(variables_of(nested(values))),
            {name for name in parameters if name.startswith(prefix)},
        )
    if isinstance(found, nnx.Module):
        matrices = flat_parameters(nnx.state(found, nnx.Param)).keys()
        return _Held(own_values(found), parametrized(found).bind, matrices, is_nnx=True)
    tree = found
    plain = jax.tree_util.all_leaves([found]) and hasattr(found, "__dict__")
    if plain:
        tree = dict(vars(found))
    arrays, put = arrays_in(tree, f"{where}: {label}")

    def bind(values: Values) -> Any:
        if not plain:
            return put(values)
        other = copy.copy(found)
        vars(other).update(put(values))
        return other

    return _Held(arrays, bind, arrays.keys())


def _fitting(own: Values, given: Values, at: str, label: str) -> Values:
    """Return the manifest's params in the dtypes of the model's own parameters."""
    where = f"{at}: model.params"
    if differing := differing_names(own, given):
        raise ManifestError(
            f"{where}: expected the names of the parameters of {label}: {differing}",
            hint="names are joined by dots, such as layers.0.weight",
        )
    check_fit(own, given, where, label)
    return {
        name: given[name].astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
        for name, leaf in own.items()
    }


def _value(leaf: Any, where: str) -> np.ndarray[Any, Any]:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ManifestError(
            f"{where}: expected a value, found the shape of one: {leaf.dtype}{[*leaf.shape]}",
            hint="name the values in model.params, or give the model values",
        )
    value = np.asarray(leaf)
    if str(value.dtype) not in DTYPES:
        raise ManifestError(
            f"{where}: expected an array of one of {', '.join(DTYPES)}, found {value.dtype}"
        )
    # As jax takes it: 64 bits become 32 unless jax_enable_x64 is set.
    return value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)


def _reads_source(model: Any) -> bool:
    return hasattr(model, "encode") and not hasattr(model, "make_cache")


def _check_form(model: Any, where: str, label: str) -> None:
    """Check that an object has what models/protocol.py lists."""
    first = ("source", "encode") if _reads_source(model) else ("make_cache",)
    methods = (*first, "__call__")
    missing = [name for name in methods if not callable(getattr(model, name, None))]
    missing += [name for name in ("vocab_size", "max_positions") if not hasattr(model, name)]
    if missing:
        raise ManifestError(
            f"{where}: expected a decoder, and {label}, which is {_spelled(type(model))}, has no "
            f"{', no '.join(missing)}",
            hint=CHECK_MODEL,
        )
    for name in ("vocab_size", "max_positions"):
        size = getattr(model, name)
        allowed = "an integer of 1 or more" + (", or None" if name == "max_positions" else "")
        integer = isinstance(size, int | np.integer) and not isinstance(size, bool) and size > 0
        if not (integer or (size is None and name == "max_positions")):
            raise ManifestError(
                f"{where}: {label}: {name}: expected {allowed}, found {size!r:.80}",
                hint=CHECK_MODEL,
            )


def _spelled(kind: type[Any]) -> str:
    return f"{'an' if kind.__qualname__[:1].lower() in 'aeiou' else 'a'} {kind.__qualname__}"


def _stored(exact: Stored, held: _Held, dtype: str, *, out_in: bool) -> Stored:
    """Return the model as it is stored: prejit's own layers as those of a published model."""
    model, values, matrices = exact.model, exact.values, set(held.matrices)
    if held.is_nnx:
        module = held.bind(model.weights)  # a copy without values, whose dtypes are set in place
        quantizing.store(module, dtype)
        readers = quantizing.readers(module, lambda name: exact.values[name]())
        model = parametrized(module)
        values = {name: readers.get(name) or exact.values[name] for name in model.weights}
        matrices -= readers.keys()
    return narrowed(model, values, dtype, matrices, out_in=out_in)
