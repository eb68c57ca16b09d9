"""Decoders of the user: built from a manifest, loaded and generated with in a process without their code."""

import json
import shutil
from types import SimpleNamespace

import equinox
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import save_file
from tests import own_decoders
from tests.extent import ALL
from tests.manifests import write_manifest

import prejit.compiler
from prejit.compiler import Generate, Manifest, Model
from prejit.compiler.lowering.user.modules import UserModules
from prejit.compiler.lowering.user.own_decoder import find_model
from prejit.compiler.models.layers.kernel_calls import Forms, using
from prejit.compiler.native.products import Product
from prejit.runtime import load
from prejit.runtime.errors import PrejitError

PROMPT, COUNT = [5, 80, 17, 3, 44, 9, 61, 2, 30, 11, 8], 24
PROGRAM = """
[[program]]
name = "model"
function = "own_decoders:scaled"
args = ["float32[3]"]
params = "scale.safetensors"
"""
SCALED = "\n\ndef scaled(params, x):\n    return params['scale'] * x\n"
ONE_SIZE = {"batch": (2,), "prompt": (8,), "context": (64,)}
KINDS = {"nnx_decoder": ("int8", ONE_SIZE)}
if ALL:
    SIZES = {"batch": (1, 2), "prompt": (8,), "context": (16, 64)}
    KINDS |= {"linen_decoder": ("int8", ONE_SIZE), "PlainDecoder": ("float32", ONE_SIZE)}
    KINDS |= {"equinox_decoder": ("bfloat16", SIZES)}
"""A decoder of each kind of module, with its dtype and sizes. Each dtype occurs: all kinds share what a dtype
does, and what grows a cache. A sample has one; test_own_models.py has all kinds with all dtypes."""


def linen_params():
    named = traverse_util.flatten_dict(own_decoders.linen_variables(), sep=".")
    return {name: np.asarray(value) for name, value in named.items()}


@pytest.fixture(scope="module")
def written(run, python, tmp_path_factory):
    """What each decoder writes in a fresh process. One command builds all of them.

    Their programs called `model` have parameters, which must not replace the weights of the model.
    """
    directory = tmp_path_factory.mktemp("own")
    shutil.copy(own_decoders.__file__, directory / "own_decoders.py")
    with (directory / "own_decoders.py").open("a") as file:
        file.write(SCALED)
    save_file(linen_params(), directory / "weights.safetensors")
    save_file({"scale": np.full(3, 2, np.float32)}, directory / "scale.safetensors")
    manifests = []
    for attribute, (dtype, sizes) in KINDS.items():
        model = f'module = "own_decoders:{attribute}"\ndtype = "{dtype}"\naccuracy = false\n'
        if attribute.startswith("linen"):
            model += 'params = "weights.safetensors"'
        more = {"name": attribute.lower(), "model": model, "generate": "draft_tokens = 3"}
        manifests.append(write_manifest(directory / f"{attribute}.toml", **more, **sizes))
        with manifests[-1].open("a") as file:
            file.write(PROGRAM)
    run("build", *manifests, "-o", directory, quick=True)
    bundles = (directory / attribute.lower() for attribute in KINDS)
    done = python(GENERATE, json.dumps(PROMPT), str(COUNT), *bundles)
    return json.loads(done.stdout.splitlines()[-1])


def stored(attribute, dtype):
    """The decoder with the values that a bundle stores."""
    params = linen_params() if attribute.startswith("linen") else None
    module = getattr(own_decoders, attribute)
    found = find_model(Model(module=module, dtype=dtype), "m", params, UserModules(None))
    weights = {name: jnp.asarray(read()) for name, read in found.stored.values.items()}
    return found.stored.model.bind(weights)


class Xla(dict[Product, str]):
    def get(self, product, default=None):
        del default
        return product.forms[0]


def greedy(model, *arguments):
    """What a decoder writes in plain Python, rounding x in products as a program with kernels does."""
    with using(Forms(Xla())):
        return own_decoders.greedy(model, *arguments)


GENERATE = """
import json, sys
import numpy as np
from prejit.runtime import load
from prejit.runtime.errors import PrejitError

prompt, count = json.loads(sys.argv[1]), int(sys.argv[2])
options = {"max_new_tokens": count, "temperature": 0}
written = {}
for path in sys.argv[3:]:
    bundle = load(path, on_mismatch="error")
    plain = bundle.generate(prompt, **options)
    drafted = bundle.generate(prompt, **options, prompt_lookup=True)
    both = bundle.generate_batch([prompt, prompt[:3]], **options)
    assert bundle.call("model", np.ones(3, np.float32)).tolist() == [2, 2, 2]
    written[bundle.name] = [list(each.token_ids) for each in (plain, drafted, *both)]
assert not {"own_decoders", "flax", "equinox"} & sys.modules.keys()
print(json.dumps(written))
"""


@pytest.mark.parametrize("attribute", KINDS)
def test_a_fresh_process_writes_what_the_model_writes(attribute, written):
    model = stored(attribute, KINDS[attribute][0])
    expected = greedy(model, PROMPT, COUNT, 40)
    short = greedy(model, PROMPT[:3], COUNT, 40)
    assert len(set(expected)) > 4, "a text that says something"
    assert written[attribute.lower()] == [expected, expected, expected, short]


@pytest.fixture
def options(build_cache):
    return {"cache": build_cache, "quiet": True, "measure": False}


GENERATE_SIZES = Generate(batch=(1,), prompt=(8,), context=(16,), cache_dtype="bfloat16")


def own(module, generate=GENERATE_SIZES, **model):
    made = Model(module=module, **model)
    return Manifest("own", model=made, generate=generate, targets=["cpu-host"])


@pytest.mark.thorough
def test_a_second_build_compiles_nothing_and_another_value_is_seen(tmp_path, options):
    decoder = own_decoders.equinox_decoder()

    def built(changed):
        return prejit.compiler.build(own(changed, dtype="int8"), tmp_path / "out", **options)

    planned = prejit.compiler.plan(own(decoder), cache=options["cache"])
    assert {(each.state, each.why) for each in planned} == {
        ("traced at build", "EquinoxDecoder is an object of Python, which every build traces")
    }
    first, second = built(decoder), built(decoder)
    assert (first.compiled + first.cached, first.written) == (3, True)
    assert (second.compiled, second.cached, second.written) == (0, 3, False)
    assert (first.digest, first.accuracy) == (second.digest, second.accuracy)
    assert first.accuracy.weights == "int8"
    assert 0 < first.accuracy.logit_difference_millionths < 500_000
    other = equinox.tree_at(lambda each: each.norm.weight, decoder, decoder.norm.weight * 2)
    third = built(other)
    assert (third.compiled, third.cached) == (0, 3)
    assert third.digest != first.digest
    assert load(third.path).decoder.decoder.family == "EquinoxDecoder"


@pytest.mark.thorough
def test_an_encoder_decoder_reads_a_source(tmp_path, options):
    sizes = Generate(batch=(1,), prompt=(4,), context=(32,), source=(4, 8))
    manifest = own(own_decoders.Translator, generate=sizes, dtype="int8")
    built = prejit.compiler.build(manifest, tmp_path / "out", **options)
    assert built.accuracy is None
    bundle, model = load(built.path), stored("Translator", "int8")
    for source in ([3, 50, 7], [9, 8, 7, 6, 5, 4]):
        expected = greedy(model, [1, 2], 12, 32, source)
        found = bundle.generate([1, 2], source=source, max_new_tokens=12, temperature=0)
        assert list(found.token_ids) == expected


class Transposed(own_decoders.PlainDecoder):
    def make_cache(self, rows, positions, dtype):
        return jnp.zeros((positions, rows))


class Half(own_decoders.PlainDecoder):
    def __call__(self, *arguments, every=False):
        logits, cache = own_decoders.run(self, *arguments, every=every)
        return logits.astype(jnp.bfloat16), cache


class Hidden(own_decoders.PlainDecoder):
    def __init__(self):
        super().__init__()
        self.inner = SimpleNamespace(bias=jnp.ones((4000, 97)))

    def __call__(self, *arguments, every=False):
        logits, cache = own_decoders.run(self, *arguments, every=every)
        return logits + self.inner.bias.sum(0), cache


class Raising(own_decoders.PlainDecoder):
    def __call__(self, *arguments, every=False):
        raise ValueError("not today")


MISTAKES = [
    (lambda: own_decoders.Translator, 16, "own': generate.source: missing; Translator is an enc"),
    (own_decoders.PlainDecoder, 128, "context: expected at most 96, the max_positions of Plain"),
    (Transposed, 16, "expected the first axis, and no other, to be rows"),
    (Half, 16, "Half: logits: expected float32[1, 97] for 1 rows of one token, found bfloat16["),
    (Hidden, 16, "large arrays to be parameters, found float32[4000, 97] inside its code"),
    (Raising, 16, "manifest 'own': cannot call Raising: ValueError: not today"),
]


@pytest.mark.parametrize(("module", "context", "error"), MISTAKES)
def test_what_a_decoder_cannot_do_is_said_at_once(tmp_path, options, module, context, error):
    sizes = Generate(batch=(1,), prompt=(8,), context=(context,), cache_dtype="bfloat16")
    with pytest.raises(PrejitError) as caught:
        prejit.compiler.build(own(module(), generate=sizes), tmp_path / "out", **options)
    assert error in str(caught.value)
    assert not (tmp_path / "out").exists()
