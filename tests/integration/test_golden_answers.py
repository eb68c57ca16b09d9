"""Builds ask every program for its golden answer: rounding does not change it, and errors of a model do."""

import dataclasses
import json
import shutil

import pytest
from tests.decoders import write_random
from tests.encoders import write_encoder
from tests.extent import cases

import prejit.compiler
import prejit.runtime
from prejit.compiler import Encode, Manifest, Model

pytestmark = pytest.mark.thorough

BUCKETS = {"batch": (1,), "prompt": (4,), "context": (24,)}
KINDS, PARTS = {"prefill", "decode", "verify", "copy"}, {"embed", "layer", "pool"}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_random("gpt2", tmp_path_factory.mktemp("model") / "gpt2")


@pytest.fixture(scope="session")
def built(model, make_decoder):
    return make_decoder(model, **BUCKETS)


def test_an_answer_depends_on_the_number_of_threads(built, prejit):
    env = {"NPROC": "5", "PREJIT_THREADS": "5"}
    done = prejit("verify", built, "--run", "--json", env=env)
    assert all(each["share"] < 0.5 for each in json.loads(done.stdout)["answers"])


@pytest.fixture
def checked(request, built, tmp_path, build_cache):
    """A bundle of a decoder, or with packed sentences."""
    if request.param == "decoder":
        return built
    write_encoder(tmp_path / "model")
    packed = {"encode": Encode(packed=[32]), "targets": ["cpu-host"]}
    manifest = Manifest("packed", model=Model(str(tmp_path / "model")), **packed)
    return prejit.compiler.build(manifest, tmp_path, cache=build_cache, quiet=True).path


@pytest.mark.parametrize("checked", ["decoder", "packed"], indirect=True)
def test_the_portable_programs_give_another_answer(checked, no_warnings_of_fallback):
    """They compute what is no result in another way: such as tokens of no sentence."""
    here = prejit.runtime.Fingerprint.current()
    other = dataclasses.replace(here, jaxlib="0.0.1")
    with prejit.runtime.load(checked, fingerprint=other) as bundle:
        assert {each.kind for each in bundle.config.programs} in (KINDS, PARTS)
        answers = list(bundle.check_answers())
    assert {each.ran for each in answers} == {"portable"}
    assert max(each.share for each in answers) < 0.5


@pytest.mark.parametrize("without", cases(["h.1.attn.c_proj.bias"], others=["ln_f.bias"]))
def test_a_model_without_some_parts_gives_golden_answers(
    without, model, built, tmp_path, make_decoder
):
    from safetensors.numpy import load_file, save_file

    from prejit.runtime.programs.quarantine import compare

    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    (file,) = damaged.glob("*.safetensors")
    tensors = load_file(file)
    zeroed = [name for name in tensors if without in name and ("proj" in name or "ln_f" in name)]
    assert zeroed
    save_file({n: v * 0 if n in zeroed else v for n, v in tensors.items()}, file)
    shares = []
    with (
        prejit.runtime.load(built) as right,
        prejit.runtime.load(make_decoder(damaged, **BUCKETS), canary="off") as wrong,
    ):
        programs = wrong.decoder.programs
        for program in right.config.programs:
            if program.kind != "copy":
                own = dataclasses.replace(programs.table[program.name], golden=program.golden)
                shares.append(compare(programs, own, programs[program.name]).share)
    assert min(shares) > 2, f"{without}: {shares}"
