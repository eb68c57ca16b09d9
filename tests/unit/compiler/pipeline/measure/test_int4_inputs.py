"""Matrices of decoders are rounded to int4 by what enters them on a text."""

import dataclasses
import hashlib
import os
import sys
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from flax import nnx
from tests.manifests import write_manifest
from tests.parity.cases import Case, shapes_of
from tests.parity.sibling_cases import Sibling
from tests.processes import ran
from tests.unit.compiler.models import small_models

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.models import config_file, int4_rounding, model_registry, quantizing
from prejit.compiler.models.parameters import flat_parameters, parametrized
from prejit.compiler.pipeline.measure import int4_inputs, model_comparison
from prejit.compiler.pipeline.measure.accuracy import round_by_text
from prejit.compiler.pipeline.model import ModelFiles, ModelSource, find_model, read_model
from prejit.compiler.pipeline.published_files import find_published
from prejit.runtime.errors import CheckpointError

SIZES = {
    **{"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4},
    **{"head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": False},
}
LLAMA = {**small_models.LLAMA, **SIZES}
MIXTURE = {
    **{**small_models.QWEN3_MOE, **SIZES, "moe_intermediate_size": 64, "num_experts": 6},
    **{"mlp_only_layers": [], "norm_topk_prob": True},
}
DENSE = shapes_of({**MIXTURE, "model_type": "qwen3"})
SHAPES = {name: shape for name, shape in DENSE.items() if ".mlp." not in name}
for layer in ("model.layers.0.mlp", "model.layers.1.mlp"):
    SHAPES[f"{layer}.gate.weight"] = (6, 64)
    for expert, name in product(range(6), ("gate", "up", "down")):
        SHAPES[f"{layer}.experts.{expert}.{name}_proj.weight"] = (64, 64)
TOKENS = np.random.default_rng(5).integers(0, 300, 3000).astype(np.int32)


def made(config, directory):
    """A model in int4, its checkpoint, and what computes logits from stored values: [R, V]."""
    if not directory.is_dir():
        kind = config["model_type"]
        case = Sibling(kind, config, 1, SHAPES) if config is MIXTURE else Case(kind, config, 1)
        case.write(directory)
    checkpoint, read = open_checkpoint(directory, out_in=True), config_file.load_config(directory)
    make = partial(model_registry.make_decoder, read, out_in=True)
    module, exact = make(dtype="int4"), parametrized(make())
    files = ModelFiles(directory, None, out_in=True, configuration=())
    model = ModelSource(files, read, model_registry.describe(read), module)
    windows = list(TOKENS[-1024:].reshape(-1, 128))

    def logits(values):
        compared = model_comparison.ComparedModel(exact, values)
        return np.concatenate(model_comparison._logits(compared, windows)()).astype(np.float64)

    def stored(words):
        reads = quantizing.readers(module, checkpoint.rows, words=words)
        names = flat_parameters(nnx.state(module))
        packed = {n: reads[n]() if n in reads else checkpoint.read(n) for n in names}
        return quantizing.widened(module, packed)

    return model, checkpoint, logits, stored


def rounded(model, checkpoint, tokens=TOKENS, earlier=MappingProxyType({})):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int4_inputs, "encode_text", lambda *files: (tokens, TOKENS[:1]))
        return int4_inputs.round_by(model, checkpoint, 128, Path("text.txt"), earlier)


def divergence(right, found):
    right, found = (each - np.logaddexp.reduce(each, -1)[:, None] for each in (right, found))
    return (np.exp(right) * (right - found)).sum(-1).mean()


@pytest.mark.thorough
def test_what_was_rounded_is_not_rounded_again_and_has_equal_bytes(tmp_path, monkeypatch):
    """An encoder that keeps some matrices in int4 is rounded where bits are chosen, before it is packed."""
    model, checkpoint, _, _ = made(LLAMA, tmp_path / "model")
    whole = rounded(model, checkpoint)
    every = quantizing.int4_matrices(model.module, checkpoint.rows)
    half = dict(list(every.items())[::2])
    monkeypatch.setattr(quantizing, "int4_matrices", lambda *model: half)
    alone = rounded(model, checkpoint)
    monkeypatch.delattr(int4_inputs, "_Rounder")
    earlier = rounded(model, checkpoint, earlier=whole.words)
    assert earlier.line == alone.line
    assert earlier.words.keys() == alone.words.keys() == half.keys()
    for name in half:
        for one, other in zip(alone.words[name], earlier.words[name], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.thorough
@pytest.mark.parametrize("config", [LLAMA, MIXTURE], ids=["llama", "mixture"])
def test_a_text_takes_nothing_from_what_the_logits_lose(config, tmp_path):
    model, checkpoint, logits, stored = made(config, tmp_path / "model")
    found = rounded(model, checkpoint)
    wanted = quantizing.int4_matrices(model.module, checkpoint.rows)
    assert found.words.keys() == wanted.keys()
    assert found.line == f"int4: rounded {len(wanted)} matrices by the first 896 tokens of text.txt"
    right = logits({name: checkpoint.rows(name) for name in checkpoint.names})
    alone, by_text = (divergence(right, logits(stored(each))) for each in ({}, found.words))
    # The router of random experts chooses others after any rounding, which costs the most.
    assert by_text < (0.9 if config is LLAMA else 1) * alone
    for name in wanted if config is MIXTURE else ():
        if "experts" in name:
            kept = int4_rounding.quantized_experts(checkpoint.rows(name), name)[0]
            assert (found.words[name][0] != kept).any(axis=(1, 2, 3)).all(), "each of its experts"


def test_a_text_without_a_tokenizer_is_refused(tmp_path):
    made(LLAMA, tmp_path / "model")
    (tmp_path / "text.txt").write_text("one")
    lines = 'dtype = "int4"\nevaluation = "text.txt"'
    manifest = write_manifest(tmp_path / "m.toml", "model", model=lines, context=(16,))
    read = read_manifest(manifest)
    files = find_model(read, (SimpleNamespace(architecture="x86_64"),), tmp_path / "model")
    plan = SimpleNamespace(manifest=read, model=files)
    space = SimpleNamespace(plan=plan, model=lambda: read_model(read, files))
    published = find_published(read, files)
    expected = r"model/tokenizer\.json: expected a file, which model"
    with pytest.raises(CheckpointError, match=expected) as error:
        round_by_text(space, published.checkpoint)
    assert "leave out model.evaluation" in error.value.hint


@pytest.mark.thorough
def test_texts_that_decide_nothing_are_named_and_matrices_that_none_reaches(tmp_path, monkeypatch):
    model, checkpoint, *_ = made(LLAMA, tmp_path / "model")
    none = int4_inputs.round_by(model, checkpoint, 128, None)
    short = rounded(model, checkpoint, TOKENS[:2200])
    alone = "int4: rounded 14 matrices by their weights alone"
    for found, said in (
        (none, "; with a text in model.evaluation they lose less"),
        (short, ": text.txt has 2,200 tokens, and the last 2,048 measure; 10,240 are enough"),
    ):
        assert (found.words, found.line) == ({}, f"{alone}{said}")
    wanted = {**quantizing.int4_matrices(model.module, checkpoint.rows)}
    wanted["of.images.weight"] = wanted["model.layers.0.mlp.down_proj.weight"]
    monkeypatch.setattr(quantizing, "int4_matrices", lambda *_: wanted)
    line = rounded(model, checkpoint).line
    assert line.endswith("text.txt, 1 by their weights alone: of.images.weight")


@pytest.mark.thorough
def test_a_router_of_as_many_inputs_as_there_are_tokens_is_not_the_head(tmp_path):
    model, checkpoint, *_ = made(MIXTURE, tmp_path / "model")
    shape = dataclasses.replace(model.shape, vocab_size=SIZES["hidden_size"])
    found = rounded(dataclasses.replace(model, shape=shape), checkpoint)
    assert found.words.keys() == quantizing.int4_matrices(model.module, checkpoint.rows).keys()


def digest(directory):
    found = rounded(*made(MIXTURE, directory)[:2])
    held = (each.tobytes() for pair in found.words.values() for each in pair)
    return hashlib.sha256(b"".join(held)).hexdigest()


@pytest.mark.thorough
def test_one_core_and_many_round_to_equal_bytes(tmp_path):
    cpus = os.sched_getaffinity(0)
    if len(cpus) == 1:
        pytest.skip("this machine has one core")
    code = (
        f"import os, sys; os.sched_setaffinity(0, {{{min(cpus)}}}); from pathlib import Path\n"
        f"from {__name__} import digest; print(digest(Path(sys.argv[1])))"
    )
    here = digest(tmp_path / "model")
    assert ran(sys.executable, "-c", code, tmp_path / "model").stdout.split()[-1] == here
