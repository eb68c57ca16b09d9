"""Bundles with golden answers, and forgeries of them whose digests are all right."""

import dataclasses

import pytest


@pytest.fixture(scope="session")
def with_answers(tmp_path_factory):
    """Gives the programs of a recipe golden answers, as a build does."""

    def make(recipe):
        from prejit.compiler.pipeline.measure.golden_answers import with_golden_answers
        from prejit.compiler.progress import Quiet
        from prejit.compiler.store.directory_store import DirectoryStore
        from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE

        at = tmp_path_factory.mktemp("answers")
        (at / "weights").write_bytes(recipe.content(WEIGHTS_MEDIA_TYPE))

        def with_file(layer):
            is_weights = layer.media_type == WEIGHTS_MEDIA_TYPE
            return dataclasses.replace(layer, content=at / "weights") if is_weights else layer

        filed = recipe.layered(lambda layers: tuple(map(with_file, layers)))
        store = DirectoryStore.open(at / "cache")
        targets = with_golden_answers(filed.targets, store, Quiet(), 300)
        return dataclasses.replace(recipe, targets=targets)

    return make


@pytest.fixture(scope="session")
def answering(recipe, with_answers):
    """The recipe that most tests read, with golden answers. Its executables are right."""
    return with_answers(recipe)


def forged(right, other, *layers):
    """The programs and golden answers of one recipe, with layers of another, every digest set right."""
    from prejit.runtime.format import names

    of = {
        "executable": names.EXECUTABLES_MEDIA_TYPE,
        "portable": names.PORTABLE_MEDIA_TYPE,
        "weights": names.WEIGHTS_MEDIA_TYPE,
    }
    media_types = {of[name] for name in layers}
    targets = []
    for target, from_ in zip(right.targets, other.targets, strict=True):
        known = {program.name: program for program in from_.config.programs}
        programs = []
        for program in target.config.programs:
            names_of = {"executable", "portable"} & {*layers}
            changes = {name: getattr(known[program.name], name) for name in names_of}
            programs.append(dataclasses.replace(program, **changes))
        config = dataclasses.replace(target.config, programs=tuple(programs))
        kept = [layer for layer in target.layers if layer.media_type not in media_types]
        taken = [layer for layer in from_.layers if layer.media_type in media_types]
        targets.append(dataclasses.replace(target, config=config, layers=(*taken, *kept)))
    return dataclasses.replace(right, targets=tuple(targets))
