"""Check the model and the user's code before anything is lowered: mistakes come first."""

from __future__ import annotations

from functools import cache, partial

from prejit.compiler.checkpoint.checkpoint import Checkpoint
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.pipeline.lowering import own_shape
from prejit.compiler.pipeline.model import (
    ModelSource,
    ReadModel,
    check_model,
    check_own_model,
    file_digests,
    open_weights,
    read_model,
    stores_out_in,
)
from prejit.compiler.pipeline.plan import Plan
from prejit.compiler.pipeline.program_keys import weights_key
from prejit.compiler.pipeline.tracing import parameters_of
from prejit.compiler.pipeline.user_code import ReadCode, find_code
from prejit.compiler.store.interface import Store


def check(plan: Plan, model: ReadModel, weights: Checkpoint | None, code: ReadCode) -> None:
    """Check the model and the user's code against the programs that have to be lowered.

    Others were checked before. All code is imported if any is, so that it finds the same modules each time.

    Args:
        plan: the plan of the build.
        model: reads the model.
        weights: the published weights; None: the manifest has no published model.
        code: reads the user's code.

    Raises:
        ManifestError, BuildError, CheckpointError: the model or the code has a mistake.
    """
    if _is_traced(plan) and (own := code().model):
        check_own_model(plan.manifest, own, own_shape(plan.manifest, own), plan.specs)
    if weights is not None and (new := _new_specs(plan)):
        check_model(plan.manifest, model(), weights, new)


def check_planned(plan: Plan, store: Store) -> None:
    """Check a plan as its build begins: nothing is imported or read that the build would take from the store.

    Args:
        plan: the plan.
        store: has the results of earlier builds.

    Raises:
        ManifestError, BuildError, CheckpointError: the model or the code has a mistake.
    """
    manifest = plan.manifest
    model: ReadModel = cache(partial(read_planned, plan))
    code: ReadCode = cache(
        partial(find_code, manifest, out_in=stores_out_in(manifest, plan.targets))
    )
    weights = None
    if plan.model is not None and not manifest.has_own_model:
        weights = open_weights(plan.model)
    check(plan, model, weights, code)
    if weights is not None and not _new_specs(plan):
        # The build packs other weights, also where nothing is lowered.
        assert plan.model is not None
        files = file_digests(plan.model.directory, weights.files)
        key = weights_key(manifest, plan.model, files, parameters_of(plan, code))
        if store.where(key) is None:
            _ = weights.names  # raises an error that lists every tensor that does not fit


def _new_specs(plan: Plan) -> list[ProgramSpec]:
    """Return the programs of a published model that have to be lowered."""
    return [each.spec for each in plan.programs if each.key is not None and each.lowered is None]


def _is_traced(plan: Plan) -> bool:
    """Return whether code of the user has to be read."""
    has_own = plan.manifest.has_own_model
    return (has_own and plan.own is None) or any(
        each.lowered is None and (each.spec.kind == "call" or has_own) for each in plan.programs
    )


def read_planned(plan: Plan) -> ModelSource:
    """Read the model of a plan that has one."""
    assert plan.model is not None
    return read_model(plan.manifest, plan.model)


def vocab_size(plan: Plan, model: ReadModel, code: ReadCode) -> int:
    """Return the number of tokens of the plan's model."""
    if plan.own is not None:
        return plan.own.vocab_size
    own = code().model if plan.manifest.has_own_model else None
    size: int = model().shape.vocab_size if own is None else own.vocab_size
    return size
