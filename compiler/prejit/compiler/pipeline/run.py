"""A build, from the manifest to the bundle on disk. Each stage takes values and returns values.

    fetch         find or download the model directory           checkpoint.source
    plan          programs x targets, and what the store has     plan
    check         model, files, functions: mistakes come first   checks, pack.model_layers
    environments  make the environments of pinned versions       targets.installing
    kernels       compile the C++ kernels of each CPU level      native.library
    forms         measure how products are computed fastest      measure.measured_forms
    lower         trace programs to StableHLO                    lowering; lowerers: in processes, if many
    compile       StableHLO to executables, in workers           executables
    weights       round or quantize, and pack                    pack.packed_weights
    sizes         compare programs of open sizes with functions  measure.other_sizes
    accuracy      measure what the dtypes cost                   measure.accuracy
    costs         measure an encoder's programs                  measure.costs
    pack          tables and layers                              pack.contents
    golden        ask programs for their golden answers          measure.golden_answers
    assemble      blobs and index                                pack.contents
    write         the OCI image layout                           writing
    describe      attach the list of parts and the provenance    describe.attaching

`beginning` does all up to the weights, `submitting` among it what decides and makes the programs, and
`finishing` the rest. Workers compile a program while the next one is lowered and while weights are packed.
`build_all` does this for several manifests at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from pathlib import Path
from typing import TypeVar, Unpack

from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.pipeline.beginning import Begun, begin
from prejit.compiler.pipeline.built import Built, Failed
from prejit.compiler.pipeline.executables import Jobs
from prejit.compiler.pipeline.finishing import finish
from prejit.compiler.pipeline.services import BuildOptions, Services
from prejit.compiler.pipeline.shards import Packing, Shard
from prejit.compiler.store.interface import Store
from prejit.runtime.errors import PrejitError

_Step = TypeVar("_Step")


def build(
    manifest: Manifest, output: Path, *, only: tuple[str, ...] = (), **options: Unpack[BuildOptions]
) -> Built:
    """Build the bundle of a manifest into `output/NAME`.

    Args:
        manifest: what to build.
        output: directory of bundles.
        only: names of targets; empty: all targets of the manifest.
        **options: see `BuildOptions`.

    Raises:
        BuildError: a program does not compile, or its worker died or took too long. What was finished stays
            in the store.
        ManifestError, CheckpointError, StoreError, NetworkError: something that the build starts from is
            wrong, or cannot be read.
    """
    results: list[Built | Failed] = []
    build_all([(manifest, only)], output, done=results.append, **options)
    return only_built(results)


def only_built(results: Sequence[Built | Failed]) -> Built:
    """Return the one build that ended, or raise its error."""
    [result] = results
    if isinstance(result, Failed):
        raise result.error
    return result


def build_all(
    requests: Sequence[tuple[Manifest, tuple[str, ...]]],
    output: Path,
    *,
    done: Callable[[Built | Failed], None],
    **options: Unpack[BuildOptions],
) -> None:
    """Build the bundles of several manifests with one executor, each with its targets.

    The next manifest is planned and lowered while programs of the others compile. Each bundle is written as
    soon as its programs are compiled. A build that fails ends no other one. Equal programs compile once.

    Shards begin with different manifests. Each bundle is packed by the first shard that has all its programs;
    the others go on meanwhile.

    Args:
        requests: manifests with different bundle names, each with the names of its targets (empty: all).
        output: directory of bundles.
        done: called with each build as it ends.
        **options: see `BuildOptions`.

    Raises:
        StoreError: the build has shards, and the store cannot be read.
    """
    executor, store, shard = options["executor"], options["store"], options.get("shard")
    service = Services(
        output=output,
        jobs=Jobs(executor, store, options["progress"], several=len(requests) > 1),
        packings=_packings([manifest for manifest, _ in requests], shard, store),
        **options,
    )
    left: list[Begun] = []

    def end(ready: Sequence[Begun], *, patient: bool) -> None:
        for begun in ready:
            step = partial(finish, begun, service, lambda: not patient)
            if (result := _attempt(begun.plan.manifest, step)) is not None:
                left.remove(begun)
                done(result)

    with executor:
        for manifest, only in requests if shard is None else shard.ordered(requests):
            begun = _attempt(manifest, partial(begin, manifest, only, service))
            if isinstance(begun, Failed):
                done(begun)
            else:
                left.append(begun)
            end([each for each in left if each.is_compiled], patient=False)
        while unfinished := [future for each in left for future in each.unfinished]:
            wait(unfinished, return_when=FIRST_COMPLETED)
            if any(each.unfinished for each in left):
                end([each for each in left if each.is_compiled], patient=False)
    # The last ones are packed without workers, which take memory.
    end([*left], patient=False)
    while left:
        end(left[:1], patient=True)  # other shards pack all that is left
        end([*left], patient=False)


def _packings(
    manifests: Sequence[Manifest], shard: Shard | None, store: Store
) -> Mapping[str, Packing]:
    """Return what decides which shard packs each bundle, by its name; empty: the build has no shards.

    All are made before any program: another shard may pack the last bundle before this one plans it.
    """
    if shard is None:
        return {}
    return {each.bundle.name: Packing(shard, each.bundle.name, store) for each in manifests}


def _attempt(manifest: Manifest, step: Callable[[], _Step]) -> _Step | Failed:
    """Return what a step of a build returns, or the error that ends this build alone."""
    try:
        return step()
    except PrejitError as error:
        return Failed(manifest, error)
