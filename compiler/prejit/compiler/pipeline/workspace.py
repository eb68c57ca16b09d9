"""State that the steps of one build share: plan, model and the user's code, each read at most once.

Reading the user's code imports JAX and the modules that a manifest names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.compiler.checkpoint.tensor_files import read_parameters
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.pipeline.model import (
    ModelSource,
    check_configuration,
    read_model,
    stores_out_in,
)
from prejit.compiler.pipeline.plan import Plan
from prejit.compiler.pipeline.result_keys import Contents, content_of
from prejit.compiler.progress import Progress
from prejit.compiler.store.store_interface import Store
from prejit.runtime.device.jax_arrays import is_weak, weakened
from prejit.runtime.errors import CheckpointError, ManifestError
from prejit.runtime.format.arrays import DTYPES

if TYPE_CHECKING:
    from prejit.compiler.lowering.export import LoweredProgram
    from prejit.compiler.lowering.user.found_function import UserFunction
    from prejit.compiler.lowering.user.modules import UserModules
    from prejit.compiler.lowering.user.own_decoder import OwnModel

Functions = Mapping[str, "UserFunction | LoweredProgram"]
"""The user's functions, and programs that were lowered elsewhere, by the name of their section."""


@dataclass(frozen=True)
class UserCode:
    """The objects that a manifest names in modules of the user.

    Attributes:
        functions: the functions of [[program]] sections.
        model: the decoder of [model]; None: the manifest names none.
        modules: the modules of both; None: the manifest names no code.
        seconds: CPU time that tracing and lowering each program took.
    """

    functions: Functions = field(default_factory=dict)
    model: OwnModel | None = None
    modules: UserModules | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Workspace:
    """State that the steps of one build share: the plan so far, and how the rest is read and kept.

    `model`, `draft_model` and `code` read the models and import the user's code on the first call, and return
    the same value on later ones.
    """

    plan: Plan
    model: Callable[[], ModelSource]
    code: Callable[[], UserCode]
    store: Store
    progress: Progress
    draft_model: Callable[[], ModelSource]

    @classmethod
    def of(cls, plan: Plan, store: Store, progress: Progress) -> Workspace:
        """Return the workspace of a plan. Nothing is read yet."""
        model, draft = (cache(partial(_read, each)) for each in (plan, plan.of_draft))
        out_in = stores_out_in(plan.manifest, plan.targets)
        code = cache(partial(find_code, plan.manifest, out_in=out_in))
        return cls(plan, model, code, store, progress, draft)

    @property
    def of_draft(self) -> Workspace | None:
        """The workspace of the draft model as if it were alone; None: there is none."""
        plan = self.plan.of_draft
        return None if plan is None else replace(self, plan=plan, model=self.draft_model)

    def with_plan(self, plan: Plan) -> Workspace:
        """Return the workspace with another plan of the same manifest."""
        return replace(self, plan=plan)

    def vocab_size(self) -> int:
        """Return the number of tokens of the model."""
        if self.plan.own is not None:
            return self.plan.own.vocab_size
        own = self.code().model if self.plan.manifest.has_own_model else None
        return self.model().shape.vocab_size if own is None else own.vocab_size

    def parameters(self) -> dict[str, Contents]:
        """Return the parameters of the user's functions by section, where they have any."""
        found: dict[str, Contents] = {}
        for program in self.plan.programs:
            section = program.spec.section
            if program.spec.kind == "call" and section not in found:
                if (contents := program.parameters) is None:
                    values = values_of(self.code(), section)
                    contents = {name: content_of(value) for name, value in values.items()}
                found[section] = contents
        return {section: contents for section, contents in found.items() if contents}


def _read(plan: Plan | None) -> ModelSource:
    assert plan is not None
    assert plan.model is not None
    found = read_model(plan.manifest, plan.model)
    check_configuration(plan.model)
    return found


def find_code(manifest: Manifest, *, out_in: bool = False) -> UserCode:
    """Import the functions and the decoder that a manifest names, and read their parameters.

    With `out_in`, matrices of the decoder are stored (out, in) where it only multiplies with them.

    Raises:
        ManifestError: a module or an attribute does not exist, or raises an error; or the decoder is none.
        BuildError: the decoder's code raises an error.
        CheckpointError: parameters cannot be read.
    """
    if not (manifest.programs or manifest.has_own_model):
        return UserCode()  # and jax is not imported
    from prejit.compiler.lowering.user.modules import UserModules

    modules = UserModules(None if manifest.path is None else manifest.directory)
    own = _find_own_model(manifest, modules, out_in=out_in)
    return UserCode(_find_functions(manifest, modules), own, modules)


def _find_functions(manifest: Manifest, modules: UserModules) -> Functions:
    from prejit.compiler.lowering.user.found_function import find_function

    found = {}
    for program in manifest.programs:
        where = f"{manifest.where}: program {program.name!r}: params"
        parameters, nested = read_params(manifest, program.params, where)
        file = manifest.resolve(str(program.fn)) if program.is_file else None
        with modules.in_use():
            found[program.name] = find_function(
                program, manifest.where, parameters, modules, nested, file
            )
    return found


def _find_own_model(manifest: Manifest, modules: UserModules, *, out_in: bool) -> OwnModel | None:
    if not manifest.has_own_model:
        return None
    from prejit.compiler.lowering.user.own_decoder import find_model

    assert manifest.model is not None
    where = f"{manifest.where}: model.params"
    parameters, nested = read_params(manifest, manifest.model.params, where)
    with modules.in_use():
        return find_model(
            manifest.model, manifest.where, parameters, modules, nested, out_in=out_in
        )


def read_params(
    manifest: Manifest, params: Any, where: str
) -> tuple[dict[str, Any] | None, Callable[[Mapping[str, Any]], Any] | None]:
    """Return parameters by flat name, and what makes a pytree of them again; None for nested dicts.

    Raises:
        ManifestError: two leaves of a pytree have the same name, or one is no array.
        CheckpointError: a file cannot be read.
    """
    if params is None:
        return None, None
    if isinstance(params, str | Path):
        try:
            return read_parameters(manifest.resolve(str(params))), None
        except CheckpointError as error:
            hint = (
                error.hint or "a .safetensors file or orbax's StandardCheckpointer().save() will do"
            )
            raise CheckpointError(f"{where}: {error}", hint=hint) from error
    import jax

    from prejit.compiler.lowering.user.flat_arrays import (
        NO_RANDOM_STATE,
        check_different,
        dotted,
    )
    from prejit.runtime.device.jax_arrays import is_key

    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    names = _names_in_nnx(params) or [dotted(path) or "params" for path, _ in leaves]
    check_different(names, where, "leaves")
    values = {}
    for name, (_, leaf) in zip(names, leaves, strict=True):
        if hasattr(leaf, "dtype") and is_key(leaf):
            raise ManifestError(
                f"{where}: {name}: expected an array, found a random key", hint=NO_RANDOM_STATE
            )
        if isinstance(leaf, np.ma.MaskedArray):  # jax refuses one, too
            raise ManifestError(
                f"{where}: {name}: expected an array without a mask, found a masked array of NumPy",
                hint="give `.filled()`, or `.data` and `.mask` as two arrays",
            )
        value = np.asarray(leaf)
        if str(value.dtype) not in DTYPES:
            raise ManifestError(
                f"{where}: {name}: expected an array of one of {', '.join(DTYPES)}, found {value.dtype}",
                hint="give a pytree of JAX or NumPy arrays",
            )
        values[name] = weakened(value) if is_weak(leaf) else value

    def nested(weights: Mapping[str, Any]) -> Any:
        return jax.tree_util.tree_unflatten(structure, [weights[name] for name in names])

    return values, nested


def _names_in_nnx(params: Any) -> list[str]:
    """Return the names of the leaves of a state of flax.nnx, as its module names them; empty: it is none."""
    if "flax" not in sys.modules:
        return []
    from flax import nnx

    from prejit.compiler.models.parameters import names_of

    return names_of(params) if isinstance(params, nnx.State) else []


def values_of(code: UserCode, section: str) -> Mapping[str, np.ndarray[Any, Any]]:
    """Return the parameters of a function of the user; empty: it has none."""
    return getattr(code.functions[section], "values", None) or {}
