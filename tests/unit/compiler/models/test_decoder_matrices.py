"""Rows of a batch have each their own adapter, and one without has the numbers of the model, to the bit."""

import jax
import numpy as np
import pytest
from jax import lax

from prejit.compiler.models import model_registry
from prejit.compiler.models.decoder_matrices import make_room
from prejit.compiler.models.layers.row_adapters import RowAdapters, adapting
from prejit.compiler.models.parameters import parameters_of
from prejit.runtime.errors import ManifestError

from .small_models import CONFIGS, CONTEXT, Model, config, int32, model

ROWS = int32(0, 2, 1)
TOKENS = np.array([[3, 7, 1], [4, 2, 2], [3, 7, 1]], np.int32)


def made(family, targets=()):
    """A model with room for adapters, and random ones in it."""
    module = model_registry.make_decoder(config(CONFIGS[family]))
    room = make_room(module, 2, 3, targets, "m.toml")
    random = np.random.default_rng(1)
    stacks = {
        array.path[0]: random.standard_normal(array.shape, dtype=np.float32) * np.float32(0.3)
        for array in room.arrays
    }
    return Model(module, model(family).weights), room, stacks


def logits(of, rows=None):
    """Float32 [B, V] after TOKENS; `rows` are the adapters of the rows."""
    cache = of.module.make_cache(len(ROWS), CONTEXT, "float32")

    def run(weights, rows):
        with adapting(rows and RowAdapters(*rows)):
            return of.called(weights, TOKENS, int32(0, 0, 0), int32(3, 3, 3), cache)[0]

    return np.asarray(jax.jit(run)(of.weights, rows))


@pytest.mark.thorough
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_each_row_has_the_logits_of_merged_matrices(family, on_cpu, monkeypatch):
    if not on_cpu:
        of_others = lambda *values, default, **_: default(*values)  # noqa: E731
        monkeypatch.setattr(lax, "platform_dependent", of_others)
    adapted, room, stacks = made(family)
    found, without = logits(adapted, (ROWS, stacks)), logits(model(family))
    assert (found[0] == without[0]).all()
    assert np.abs(found[1:] - without[1:]).max() > 0.1
    in_out = {name for name, each in parameters_of(adapted.module).items() if each.in_out}
    for row, slot in enumerate(ROWS):
        weights = dict(adapted.weights)
        for stack in room.stacks if slot else ():
            for layer, name in enumerate(stack.modules):
                down, up = (stacks[f"{stack.name}.{end}"][slot - 1, layer] for end in "AB")
                change = up.T @ down
                name = f"{name}.weight"
                weights[name] = weights[name] + (change.T if name in in_out else change)
        merged = Model(adapted.module, weights)
        assert np.abs(found[row] - logits(merged)[row]).max() < 1e-4


def test_targets_choose_matrices_and_others_are_refused():
    _, room, _ = made("llama", ("q_proj", "mlp.down_proj"))
    assert [each.name for each in room.stacks] == ["self_attn.q_proj", "mlp.down_proj"]
    assert room.stacks[0].modules[1] == "model.layers.1.self_attn.q_proj"
    with pytest.raises(ManifestError, match=r"targets\[0\]: .* found 'lm_head'"):
        made("llama", ("lm_head",))
    with pytest.raises(ManifestError, match="expected none, as this family takes none"):
        made("t5")
