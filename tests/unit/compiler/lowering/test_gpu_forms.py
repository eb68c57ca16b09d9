"""What a program looks like on a GPU: no conditional in a layer, convolutions that need no cuDNN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.extent import one_in

from prejit.compiler.compile.stablehlo_contents import as_text, has_plain_convolutions
from prejit.compiler.lowering.decoder import lower_decoder
from prejit.compiler.lowering.export import export_program
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.models import model_registry
from prejit.compiler.models.layers.attention import mixed_in_parts
from prejit.compiler.models.parameters import parametrized

from ..models.small_models import LLAMA, config


@pytest.mark.parametrize(("platform", "of_layer"), one_in(2, [("cpu", 1), ("cuda", 0), ("tpu", 0)]))
def test_a_layer_has_a_conditional_on_a_cpu_alone(platform, of_layer):
    counts = []
    for layers in (1, 3):
        read = config(LLAMA | {"num_hidden_layers": layers})
        module, shape = model_registry.make_decoder(read), model_registry.describe(read, "float32")
        spec = ProgramSpec("decode", "decode", {"batch": 1, "context": 20})
        lowered = lower_decoder(parametrized(module), shape, spec)
        text = as_text(lowered.portable, lowered.platforms, platform)
        counts.append(text.count("stablehlo.case") + text.count("stablehlo.if"))
    assert counts[1] - counts[0] == 2 * of_layer


@pytest.mark.parametrize(("rows", "slots"), [(3, 192), (3, 64), (3, 100), (65, 128)])
def test_values_are_summed_in_parts_as_whole(rows, slots):
    random = np.random.default_rng(0)
    weights = random.random((2, 3, rows, slots), np.float32) / slots
    values = random.standard_normal((2, 3, slots, 5)).astype(jnp.bfloat16)
    expected = np.einsum("bkrs,bksh->bkrh", weights, values.astype(np.float64))
    np.testing.assert_allclose(mixed_in_parts(weights, values), expected, atol=1e-6)


def test_convolutions_that_nobody_measured_need_no_cudnn():
    def convolve(x, kernel):
        return jax.lax.conv(x, kernel, (1, 1), "SAME")

    x, kernel = jnp.zeros((1, 3, 8, 8)), jnp.zeros((4, 3, 3, 3))
    made, other = export_program(convolve, (x, kernel)), export_program(jnp.sin, (x,))
    for program, platform, tuned, expected in (
        *((made, "cuda", False, True), (made, "cuda", True, False)),
        *((made, "cpu", False, False), (other, "cuda", False, False)),
    ):
        of_program = program.mlir_module_serialized, program.platforms
        assert has_plain_convolutions(*of_program, platform, tuned=tuned) == expected
