"""Find the function of a [[program]] and make it callable with flat weights."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from prejit.compiler.lowering.program import LoweredProgram, Shapes
from prejit.compiler.lowering.user.arrays import example_of, narrowed
from prejit.compiler.lowering.user.files import read_file
from prejit.compiler.lowering.user.pytrees import arrays_in, differing_names
from prejit.runtime.device.transfer import is_weak, weakened
from prejit.runtime.errors import ManifestError

if TYPE_CHECKING:
    from prejit.compiler.lowering.user.modules import UserModules
    from prejit.compiler.manifest import manifest


@dataclass(frozen=True)
class UserFunction:
    """A function of the user, ready to be lowered.

    Attributes:
        function: takes a flat dict of weights, then the arguments of the manifest.
        args: the manifest's args, or the function that it names, or those of the file.
        weights: shapes of the weights by flat name, sorted.
        values: values of the weights, from the manifest's params or the flax.nnx module.
        modules: the modules that it was found in.
        file: the file of its code; empty: it has none in Python.
    """

    function: Callable[..., Any]
    args: Any
    weights: Shapes
    values: Mapping[str, np.ndarray[Any, Any]]
    modules: UserModules
    file: str = ""

    def example(self, bucket: Mapping[str, int], where: str) -> Any:
        """Return the arguments at a bucket as a pytree of jax.ShapeDtypeStruct.

        Raises:
            BuildError: a function of the user that returns examples fails.
            ManifestError: as `example_of`.
        """
        args = self.args
        if callable(args):
            with self.modules.tracing(where):
                args = jax.eval_shape(lambda: self.args(**bucket))
        return example_of(args, bucket, where)

    def narrowed(self, bucket: Mapping[str, int], where: str) -> tuple[str, ...]:
        """Return, in words, the arguments at a bucket that jax takes for narrower ones than they are."""
        given = [self.args]
        if callable(self.args):
            with self.modules.tracing(where):
                jax.eval_shape(lambda: given.append(self.args(**bucket)))
        return narrowed(given[-1])


def find_function(
    program: manifest.Program,
    at: str,
    parameters: Mapping[str, np.ndarray[Any, Any]] | None,
    modules: UserModules,
    nested: Callable[[Mapping[str, Any]], Any] | None = None,
    file: Path | None = None,
) -> UserFunction | LoweredProgram:
    """Import the function that a [[program]] names, and wrap it.

    It is a function, called as function(params, ...) if the manifest gives params, else as function(...); a
    flax.linen module, which is applied to params; or a module that holds its parameters, of flax.nnx or
    equinox, or any other pytree that can be called. The manifest's params replace those.

    Args:
        program: the section of the manifest.
        at: the manifest, for errors.
        parameters: values by flat name, joined by dots; None if the manifest gives no params.
        modules: the modules beside the manifest.
        nested: makes the first argument of the function from its flat weights; None for nested dicts, by
            the dots in names.
        file: the file that the manifest names in place of a function; None: it names a function.

    Returns:
        The function; or the program of a StableHLO file, which is lowered already.

    Raises:
        ManifestError: the module or the attribute does not exist, raises, or cannot be called.
        BuildError: the file cannot be read.
    """
    found, args, where = program.fn, program.args, f"{at}: program {program.name!r}"
    if file is not None:
        with modules.in_use():
            read = read_file(file, where)
        if isinstance(read, LoweredProgram):
            _refuse_settings(program, where)
            return read
        found, args = read.function, read.example if args is None else args
        if args is None:
            raise ManifestError(
                f"{where}: args: expected the arguments, because {file} has symbolic sizes",
                hint='give shape strings such as "float32[{batch}, 128]", and buckets',
            )
    elif isinstance(found, str):
        found = modules.find(found, f"{where}: function", impure=program.impure)
    if isinstance(args, str):
        args = modules.find(args, f"{where}: args", impure=program.impure)
    values = None if parameters is None else dict(sorted(parameters.items()))
    nested = nested or nested_by_dots
    module = None
    if "flax" in sys.modules:  # else it is no module of flax, whose import takes 0.4 s
        from prejit.compiler.lowering.user.flax_modules import call_module

        module = call_module(found, program.label, where, values, nested)
    if module is not None:
        function, weights = module
    elif callable(found) and jax.tree.leaves(found) != [found]:
        function, weights = _of_pytree(found, where, values)
    elif callable(found):
        function, weights = _calling(found, nested if values is not None else None), values or {}
    else:
        raise ManifestError(
            f"{where}: function: expected something to call, found "
            f"{type(found).__name__} {program.label!r}"
        )
    shapes = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=is_weak(value))
        for name, value in weights.items()
    }
    return UserFunction(function, args, shapes, weights, modules, _file_of(found))


def _file_of(found: Any) -> str:
    """Return the source file of a function, or of an object's class; empty: it has none in Python."""
    while isinstance(found, functools.partial):
        found = found.func
    found = inspect.unwrap(found)
    with suppress(TypeError):  # code in C
        return inspect.getfile(found if inspect.isroutine(found) else type(found))
    return ""


def _refuse_settings(program: manifest.Program, where: str) -> None:
    """Refuse keys that a StableHLO file decides by itself."""
    for key in ("args", "buckets", "params", "static", "donate", "pad", "open_sizes", "repeat"):
        if getattr(program, key) not in (None, {}, (), []):
            raise ManifestError(
                f"{where}: expected no {key!r} for StableHLO, whose file has fixed shapes and no Python",
                hint="name a file for each program",
            )


def _of_pytree(
    module: Callable[..., Any], where: str, parameters: Mapping[str, Any] | None
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Return a function that calls a module which is a pytree of its own parameters, as one of equinox."""
    own, bind = arrays_in(module, lambda path: jax.tree_util.keystr(path).strip(".[]"))
    if parameters is not None and (differing := differing_names(own, parameters)):
        raise ManifestError(
            f"{where}: params: expected the names of the module's arrays: {differing}"
        )

    def function(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return bind(weights)(*args, **kwargs)

    values = parameters or {
        name: weakened(np.asarray(leaf)) if is_weak(leaf) else np.asarray(leaf)
        for name, leaf in own.items()
    }
    return function, dict(sorted(values.items()))


def _calling(
    called: Callable[..., Any], nested: Callable[[Mapping[str, Any]], Any] | None
) -> Callable[..., Any]:
    """Return a function of flat weights and arguments; `nested` is None where `called` takes no weights."""

    def function(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        first = () if nested is None else (nested(weights),)
        return called(*first, *args, **kwargs)

    return function


def nested_by_dots(weights: Mapping[str, Any]) -> Any:
    """Return flat weights as nested dicts."""
    from flax import traverse_util

    return traverse_util.unflatten_dict(dict(weights), sep=".")
