"""Each step of a build runs no code of prejit that its digest lacks: a change of it makes results again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests import own_decoders, quick_compiling
from tests.decoders import write_random
from tests.parity.encoder_cases import Case

from prejit.compiler.store import own_code

ROOT = Path(__file__).parents[4]
STORING = (
    # What keeps results decides none.
    "prejit.compiler.store.",
    "prejit.compiler.progress",
    "prejit.runtime.base.files",
    "prejit.runtime.base.written_files",
    # What runs the user's code apart from other code, and notes what it reads, decides no result.
    "prejit.compiler.lowering.user.observing",
    "prejit.compiler.lowering.user.observer",
    "prejit.compiler.lowering.user.modules",
    "prejit.compiler.manifest.manifest",
)
BESIDE = {
    # Weights are made while they are packed: the key of a layer has the digests of both.
    "PACKING": ("WEIGHTS", "OWN_WEIGHTS"),
}
SIZES = "[generate]\nbatch = [1]\nprompt = [8]\ncontext = [24]\n"
ENCODER = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 30,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
}
MANIFESTS = {
    "decoder": f'[model]\nsource = "model"\ndtype = "int8"\n{SIZES}',
    "mesh": f'[model]\nsource = "model"\n{SIZES}[mesh]\ntensor = 3\n',
    "encoder": '[model]\nsource = "model"\ndtype = "bfloat16"\n[encode]\nshapes = [[1, 8]]\n',
    "own": f'[model]\nmodule = "own_decoders:nnx_decoder"\ndtype = "int8"\n{SIZES}',
}
RUN = {
    "decoder": {"LOWERING", "PACKING", "WEIGHTS", "ACCURACY", "COMPILING", "GOLDEN"},
    "mesh": {"LOWERING", "PACKING", "WEIGHTS", "COMPILING", "GOLDEN"},
    "encoder": {"LOWERING", "PACKING", "WEIGHTS", "ACCURACY", "COMPILING", "GOLDEN"},
    "own": {"PACKING", "OWN_WEIGHTS", "OWN_ACCURACY", "COMPILING", "GOLDEN"},
}
"""The steps of `prejit.compiler.store.own_code` that each manifest needs."""


def code_of(step: str) -> dict[str, set[str]]:
    """The names of the code that is in the digest of a step, by module."""
    found = own_code.reached(*getattr(own_code, step))
    return {module: {n for each in of for n in each.names} for module, of in found.items()}


@pytest.mark.parametrize(
    "kind",
    [
        "decoder",
        *(
            pytest.param(each, marks=pytest.mark.thorough)
            for each in MANIFESTS
            if each != "decoder"
        ),
    ],
)
def test_no_step_runs_code_that_its_digest_lacks(kind: str, tmp_path: Path) -> None:
    if kind == "own":
        shutil.copy(own_decoders.__file__, tmp_path / "own_decoders.py")
    elif kind == "encoder":
        case = Case("tiny", ENCODER, 7, pooling=("mean_tokens",), normalize=True)
        case.write(tmp_path / "model")
    else:
        write_random("gpt2", tmp_path / "model")
    manifest = tmp_path / "m.toml"
    target = '[[target]]\nname = "cpu-host"\n'
    manifest.write_text(f'[bundle]\nname = "m"\n{MANIFESTS[kind]}{target}')
    quiet = {"PATH": "/nonexistent", "CXX": "/nonexistent", "XLA_FLAGS": quick_compiling.XLA_FLAGS}
    subprocess.run(
        [sys.executable, "-m", "tests.unit.compiler.pipeline.running_steps", manifest, tmp_path],
        cwd=ROOT,
        env={**os.environ, **quiet},  # a compiler for kernels would take half a minute
        check=True,
    )
    ran = json.loads((tmp_path / "ran.json").read_text())
    assert ran.keys() == RUN[kind]
    for step, modules in ran.items():
        digested = [code_of(each) for each in (step, *BESIDE.get(step, ()))]
        outside = {
            f"{module}:{name}"
            for module, names in modules.items()
            for name in names
            if not module.startswith(STORING)
            and not any(name in each.get(module, ()) for each in digested)
        }
        assert not outside, (
            f"{step} runs what is not in its digest (prejit.compiler.store.own_code)"
        )
